"""Continuations and oracles: against a loop that decodes one sequence at a time without any sharing."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import IM_END, make_checkpoint, make_scripted

from eexport.calibration.decode import FULL, Continuation, Written, continue_prompts, first_over
from eexport.calibration.traced_bundle import BundleModel
from eexport.calibration.traced_checkpoint import CheckpointModel
from eexport.models.checkpoint import open_checkpoint
from eexport.models.decoder import Decoder, LayerKV, rope_tables
from eexport.runtime.backend_ort import OrtBackend
from eexport.runtime.manifest import read_manifest

PROMPTS = [[5, 9, 30, 7, 8], [11], [40, 41, 42, 43, 44, 45, 46], [100, 7], [60, 61, 60, 61], [200], [201, 3]]
THRESHOLDS = (-0.5, 0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


def _lens(decoder: Decoder, ids: list[int]) -> np.ndarray:
    """Logits [L, V] after each layer for the last token, the whole text run anew."""
    cos, sin = rope_tables(decoder.spec.rope, torch.arange(len(ids))[None])
    hidden, logits = decoder.embed(torch.tensor([ids])), []
    for layer in decoder.layers:
        hidden = layer(hidden, cos, sin, LayerKV())
        logits.append(decoder.head(hidden[:, -1])[0].double().numpy())
    return np.stack(logits)


def _oracle(decoder: Decoder, prompt: list[int], threshold: float | None, limit: int) -> Written:
    """Appendix C as it reads: run the full model, take the earliest layer over the threshold, go on from its token."""
    path, ids = Written(), list(prompt)
    while len(path.tokens) < limit:
        logits = _lens(decoder, ids)
        layer = len(logits) - 1
        if threshold is not None:
            for candidate, row in enumerate(logits):
                similarity = row @ logits[-1] / (np.linalg.norm(row) * np.linalg.norm(logits[-1]))
                if similarity > threshold:
                    layer = candidate
                    break
        p, q = (np.exp(row - row.max()) / np.exp(row - row.max()).sum() for row in (logits[-1], logits[layer]))
        token = int(logits[layer].argmax())
        path.tokens.append(token)
        path.exits.append(layer)
        path.divergence.append(float((p * np.log(p / q)).sum()))
        path.surprise.append(-float(np.log(p[token])))
        ids.append(token)
        if token == IM_END:
            break
    return path


def _assert_same(found: Continuation, decoder: Decoder, prompt: list[int], limit: int) -> None:
    for policy, path in found.paths.items():
        expected = _oracle(decoder, prompt, None if policy == FULL else THRESHOLDS[policy], limit)
        assert (path.tokens, path.exits) == (expected.tokens, expected.exits)
        assert path.divergence == pytest.approx(expected.divergence, abs=1e-4)
        assert path.surprise == pytest.approx(expected.surprise, abs=1e-4)
    assert found.measures.argmax[:, -1].tolist() == found.paths[FULL].tokens


@pytest.mark.parametrize(("width", "slots"), [(1, 1 << 14), (3, 1 << 14), (32, 1 << 14), (32, 40)])
def test_oracles_against_brute_force(tiny_checkpoint: Callable[..., Path], width: int, slots: int) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint(layers=5))
    decoder = Decoder.from_weights(checkpoint.spec, checkpoint.weights)
    ticks: list[int] = []
    found = continue_prompts(
        CheckpointModel(checkpoint, "", width=width, slots=slots), PROMPTS, THRESHOLDS, 12, lambda: ticks.append(1)
    )
    for continuation, prompt in zip(found, PROMPTS, strict=True):
        _assert_same(continuation, decoder, prompt, 12)
    assert len(ticks) == sum(len(c.paths[FULL].tokens) for c in found)
    texts = {tuple(path.tokens) for path in found[0].paths.values()}
    exits = {depth for c in found for path in c.paths.values() for depth in path.exits}
    assert len(texts) > 2 and len(exits) > 3  # or nothing was tried


def test_a_bundle_decodes_as_its_checkpoint(
    tiny_checkpoint: Callable[..., Path], tiny_bundle: Callable[..., Path], backend: OrtBackend
) -> None:
    """The depths that a fp32 bundle of one layer a block shows are all of the checkpoint's."""
    folder = tiny_checkpoint(layers=5)
    checkpoint = open_checkpoint(folder)
    path = tiny_bundle(folder, blocks="1,2,3,4")
    model = BundleModel(path, read_manifest(path), backend, 512)
    decoder = Decoder.from_weights(checkpoint.spec, checkpoint.weights)
    for continuation, prompt in zip(continue_prompts(model, PROMPTS, THRESHOLDS, 12), PROMPTS, strict=True):
        _assert_same(continuation, decoder, prompt, 12)


def test_measures_are_those_of_the_tokens(tiny_checkpoint: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint(layers=5))
    decoder = Decoder.from_weights(checkpoint.spec, checkpoint.weights)
    (found,) = continue_prompts(CheckpointModel(checkpoint, ""), PROMPTS[:1], (), 6)
    tokens = found.paths[FULL].tokens
    for place in range(6):
        logits = _lens(decoder, [*PROMPTS[0], *tokens[:place]])
        p = np.exp(logits - logits.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        norms = np.linalg.norm(logits, axis=-1)
        assert found.measures.entropy[place] == pytest.approx(-(p * np.log(p)).sum(-1), abs=1e-4)
        assert found.measures.logit_cosine[place] == pytest.approx(logits @ logits[-1] / norms / norms[-1], abs=1e-4)
        assert found.measures.argmax[place].tolist() == logits.argmax(-1).tolist()


def test_an_end_token_ends_a_continuation(tmp_path: Path) -> None:
    folder = make_scripted(tmp_path / "scripted", {10: 11, 11: 12, 12: IM_END, 20: 21}, default=20)
    model = CheckpointModel(open_checkpoint(folder), "")
    short, long = continue_prompts(model, [[10], [20]], (0.99,), 5)
    assert short.paths[FULL].tokens == [11, 12, IM_END]
    assert len(long.paths[FULL].tokens) == 5


def test_the_context_ends_a_continuation(tmp_path: Path) -> None:
    model = CheckpointModel(open_checkpoint(make_checkpoint(tmp_path / "short", context=16)), "")
    found = continue_prompts(model, [list(range(3, 15)), [4]], (0.3,), 50)
    assert [len(c.paths[FULL].tokens) for c in found] == [4, 15]


def test_first_over_is_strict_and_falls_back_to_the_last() -> None:
    cosines = np.array([0.2, 0.8, 0.5, 1.0], np.float32)
    assert first_over(cosines, 0.1) == 0
    assert first_over(cosines, float(cosines[1])) == 3
    assert first_over(cosines, 0.79) == 1
    assert first_over(cosines, 1.0) == 3
