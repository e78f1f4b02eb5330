"""Models that show their hidden states: against the reference decoder, and a bundle against its checkpoint."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import edit_tensors, make_checkpoint

from eexport.calibration.traced import TracedModel, cosine
from eexport.calibration.traced_bundle import BundleModel
from eexport.calibration.traced_checkpoint import CheckpointModel
from eexport.models.checkpoint import checkpoint_identity, open_checkpoint
from eexport.models.decoder import Decoder, LayerKV, rope_tables
from eexport.runtime.backend_ort import OrtBackend
from eexport.runtime.errors import EexportError
from eexport.runtime.manifest import read_manifest

PROMPTS = [[5, 9, 30, 7, 8], [11], [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50]]


def _states(decoder: Decoder, ids: list[int]) -> np.ndarray:
    """Hidden states [L, D] of the last token, one sequence at a time and without a cache."""
    cos, sin = rope_tables(decoder.spec.rope, torch.arange(len(ids))[None])
    hidden, states = decoder.embed(torch.tensor([ids])), []
    for layer in decoder.layers:
        hidden = layer(hidden, cos, sin, LayerKV())
        states.append(hidden[0, -1].numpy())
    return np.stack(states)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_sequences_together_are_as_each_alone(tiny_checkpoint: Callable[..., Path], arch: str) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint(arch))
    decoder = Decoder.from_weights(checkpoint.spec, checkpoint.weights)
    model = CheckpointModel(checkpoint, "")
    texts = [list(ids) for ids in PROMPTS]
    hidden = model.start(texts, 4)
    for tokens in ([3, 4, 5], [6, 7, 8]):
        for row, ids in enumerate(texts):
            assert hidden[row] == pytest.approx(_states(decoder, ids), abs=2e-5)
            ids.append(tokens[row])
        hidden = model.step(tokens)
    model.keep([2, 0])
    texts = [[*texts[2], 9], [*texts[0], 10]]
    hidden = model.step([9, 10])
    for row, ids in enumerate(texts):
        assert hidden[row] == pytest.approx(_states(decoder, ids), abs=2e-5)


def test_head_and_cosines_are_those_of_the_logits(tiny_checkpoint: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint(tied=False))
    decoder = Decoder.from_weights(checkpoint.spec, checkpoint.weights)
    model = CheckpointModel(checkpoint, "")
    hidden = model.start(PROMPTS, 4)
    logits = model.logits(hidden[2])
    assert logits[-1] == pytest.approx(decoder(torch.tensor([PROMPTS[2]]))[0, -1].numpy(), abs=2e-5)
    assert model.logit_cosine(hidden)[2] == pytest.approx(cosine(logits, logits[-1:]), abs=1e-5)


def test_a_bundle_shows_what_its_checkpoint_shows(
    tiny_checkpoint: Callable[..., Path], tiny_bundle: Callable[..., Path], backend: OrtBackend
) -> None:
    folder = tiny_checkpoint(layers=6)
    checkpoint = CheckpointModel(open_checkpoint(folder), "")
    path = tiny_bundle(folder, blocks="2,5")
    bundle = BundleModel(path, read_manifest(path), backend, 512)
    assert bundle.depths == (1, 2, 3, 4, 5, 6)
    places = [depth - 1 for depth in bundle.depths]
    for ids in (PROMPTS[2], [*PROMPTS[2][:4], 99, 98], list(range(3, 300)), PROMPTS[1]):  # some begin alike
        found, expected = bundle.start([ids], 8), checkpoint.start([ids], 8)
        for token in (8, 9):
            assert found[0] == pytest.approx(expected[0][places], abs=1e-3)
            assert bundle.logits(found[0]) == pytest.approx(checkpoint.logits(expected[0][places]), abs=1e-3)
            assert bundle.logit_cosine(found)[0] == pytest.approx(
                checkpoint.logit_cosine(expected)[0][places], abs=1e-3
            )
            found, expected = bundle.step([token]), checkpoint.step([token])


def test_another_model_has_another_identity(tmp_path: Path) -> None:
    first, same, other = (
        checkpoint_identity(open_checkpoint(make_checkpoint(tmp_path / name, seed=seed)))
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert first == same != other


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_activations_that_are_not_finite_name_the_layer(tmp_path: Path, value: float) -> None:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.down_proj.weight"][3, 3] = value

    folder = edit_tensors(make_checkpoint(tmp_path / "broken"), damage)
    model: TracedModel = CheckpointModel(open_checkpoint(folder), "")
    with pytest.raises(EexportError, match="after layer 2 are not finite"):
        model.start([[4, 5]], 1)
