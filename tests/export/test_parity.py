"""Bundles against transformers: the same logits and greedy tokens, whatever the model and the split."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny import edit_config, edit_tensors, make_checkpoint
from transformers import AutoModelForCausalLM

from eexport.export.quantize import block_for, quantize
from eexport.models.checkpoint import open_checkpoint
from eexport.models.decoder import Decoder
from eexport.models.weights import Weights
from eexport.runtime.engine import Engine
from eexport.runtime.manifest import Manifest, read_manifest

Make = Callable[..., Path]
Load = Callable[..., Engine]

ROWS, GREEDY = 300, 24
LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
WIDE = {"head_dim": 32, "kv_heads": 1}  # 4 heads of 32 on a hidden width of 64

# Every architecture, RoPE type, head layout and kind of head, each at least once; all with 4 layers.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-linear-untied": ("llama", {"rope": LINEAR, "tied": False}),
    "llama-llama3": ("llama", {"rope": LLAMA3}),
    "llama-yarn": ("llama", {"rope": YARN}),
    "llama-ungrouped": ("llama", {"kv_heads": 4}),
    "llama-one-kv-head": ("llama", {"kv_heads": 1, "tied": False}),
    "llama-all-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-bf16": ("llama", {"dtype": torch.bfloat16}),
    "mistral-wide-untied": ("mistral", {**WIDE, "tied": False}),
    "mistral-yarn": ("mistral", {"rope": YARN}),
    "qwen2": ("qwen2", {}),
    "qwen2-yarn-untied": ("qwen2", {"rope": YARN, "tied": False}),
    "qwen2-ungrouped": ("qwen2", {"kv_heads": 4, "rope": LINEAR}),
    "qwen3-wide": ("qwen3", WIDE),
    "qwen3-wide-biased": ("qwen3", {**WIDE, "attention_bias": True, "tied": False, "rope": LLAMA3}),
    "qwen3-ungrouped": ("qwen3", {"kv_heads": 4}),
}


def token_ids(count: int = ROWS) -> list[int]:
    return [int(token) for token in np.random.default_rng(1).integers(3, 300, count)]


@cache
def reference(folder: Path) -> tuple[NDArray[np.float32], list[int]]:
    """What transformers makes of `token_ids()`: logits [T, V], and the greedy continuation."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([token_ids()])
    with torch.inference_mode():
        logits = model(ids).logits[0].numpy()
        greedy = model.generate(ids, max_new_tokens=GREEDY, do_sample=False)[0, ROWS:].tolist()
    assert logits.std() > 0.3, "the test model has nothing to say"
    return logits, greedy


def assert_same_model(engine: Engine, folder: Path) -> None:
    logits, greedy = reference(folder)
    assert np.abs(np.asarray(engine.score(token_ids()), np.float32) - logits).max() < 1e-4
    tokens = engine.generate(token_ids(), max_tokens=GREEDY, ignore_eos=True)
    assert [token.token_id for token in tokens] == greedy


# Half of the product: each case in both dialects, and in all numbers of blocks.
SPLITS = [("ort", "1"), ("standard", "2"), ("ort", "4"), ("standard", "1"), ("ort", "2"), ("standard", "4")]


@pytest.mark.parametrize(
    ("case", "dialect", "blocks"),
    [(case, *split) for i, case in enumerate(CASES) for split in SPLITS[i % 2 * 3 :][:3]],
)
def test_logits_and_tokens_are_those_of_transformers(
    case: str, dialect: str, blocks: str, tiny_checkpoint: Make, tiny_bundle: Make, tiny_engine: Load
) -> None:
    arch, options = CASES[case]
    folder = tiny_checkpoint(arch, layers=4, **options)
    engine = tiny_engine(tiny_bundle(folder, dialect=dialect, blocks=blocks))
    assert len(engine.manifest.blocks) == int(blocks)
    assert_same_model(engine, folder)


@pytest.mark.parametrize("dialect", ["ort", "standard"])
@pytest.mark.parametrize("rope", [{}, LINEAR, LLAMA3, YARN], ids=["default", "linear", "llama3", "yarn"])
def test_flat_rope_fields(
    rope: dict[str, Any], dialect: str, tmp_path: Path, tiny_bundle: Make, tiny_engine: Load
) -> None:
    """Before version 5, transformers wrote rope_theta and rope_scaling side by side."""
    folder = make_checkpoint(tmp_path / "flat", "llama")
    edit_config(folder, rope_parameters=..., rope_theta=50000.0, rope_scaling=rope or None)
    assert_same_model(tiny_engine(tiny_bundle(folder, dialect=dialect)), folder)


@pytest.mark.parametrize("dialect", ["ort", "standard"])
def test_large_biases(dialect: str, tmp_path: Path, tiny_bundle: Make, tiny_engine: Load) -> None:
    folder = make_checkpoint(tmp_path / "biased", "qwen2")

    def enlarge(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith(("k_proj.bias", "v_proj.bias")):
                tensor.mul_(5)

    edit_tensors(folder, enlarge)
    assert_same_model(tiny_engine(tiny_bundle(folder, dialect=dialect)), folder)


@pytest.mark.parametrize("precision", ["fp16", "int8", "int4"])
@pytest.mark.parametrize("dialect", ["ort", "standard"])
@pytest.mark.parametrize(("arch", "options"), [("llama", {}), ("qwen2", {"tied": False}), ("qwen3", WIDE)])
def test_lower_precisions_compute_what_their_weights_say(
    arch: str,
    options: dict[str, Any],
    dialect: str,
    precision: str,
    tiny_checkpoint: Make,
    tiny_bundle: Make,
    tiny_engine: Load,
) -> None:
    """Their error is that of the stored weights; what else there is comes from rounding activations."""
    folder = tiny_checkpoint(arch, soft=True, **options)
    bundle = tiny_bundle(folder, precision=precision, dialect=dialect)
    found = np.asarray(tiny_engine(bundle).score(token_ids(64)), np.float32)
    checkpoint = open_checkpoint(folder)
    stored = StoredWeights(checkpoint.weights, read_manifest(bundle))
    with torch.inference_mode():
        expected = Decoder.from_weights(checkpoint.spec, stored)(torch.tensor([token_ids(64)]))[0].numpy()
    cosines = (found * expected).sum(-1) / np.linalg.norm(found, axis=-1) / np.linalg.norm(expected, axis=-1)
    assert cosines.min() > (0.9999 if precision == "fp16" else 0.998)


class StoredWeights:
    """A checkpoint's weights as a bundle stores them."""

    def __init__(self, weights: Weights, manifest: Manifest) -> None:
        self._weights, self._dialect, self._precision = weights, manifest.dialect, manifest.precision

    def __getattr__(self, name: str) -> Any:
        return getattr(self._weights, name)

    def read(self, name: str) -> NDArray[np.float32]:
        values, precision = self._weights.read(name), self._precision
        is_vocab = name in ("model.embed_tokens.weight", "lm_head.weight")
        form = precision.vocab_weights if is_vocab else precision.weights
        if values.ndim == 1 or form == "fp16":
            return values.astype(np.float16).astype(np.float32) if self._dialect == "standard" else values
        bits, scales = (
            {"int8": 8, "int4": 4}[form],
            torch.float32 if self._dialect == "ort" else torch.float16,
        )
        block = block_for(values.shape[1], precision.block_size or 32)
        assert block is not None
        weight: NDArray[np.float32] = quantize(torch.from_numpy(values), bits, block, scales).dequantize().numpy()
        return weight
