"""SmolLM2-135M-Instruct, the default model: the tokens of transformers, and the same bits for every row."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from eexport.runtime.backend import Backend
from eexport.runtime.chain import Chain
from eexport.runtime.engine import Engine
from eexport.runtime.manifest import read_manifest
from eexport.runtime.verify import rows_that_differ

Make = Callable[..., Path]
Differ = Callable[[int, int], dict[str, int]]

MODEL = "smollm2-135m-instruct"
PUBLISHED_CONFIG = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "tie_word_embeddings": True,
}


def test_greedy_tokens_are_those_of_transformers(places_that_differ: Differ) -> None:
    assert places_that_differ(4, 60) == {}


@pytest.mark.slow
def test_more_greedy_tokens_are_those_of_transformers(places_that_differ: Differ) -> None:
    assert places_that_differ(10, 200) == {}


def test_fp32_knows_its_language(fp32_engine: Engine, scored_ids: list[int]) -> None:
    """Weights read wrongly would be wrong on transformers' side too, and only show here."""
    logits = fp32_engine.score(scored_ids[:-1])
    chosen = np.take_along_axis(logits, np.array(scored_ids)[1:, None], axis=-1)[:, 0]
    surprise = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1) - chosen
    assert surprise.mean() < 4  # of ln V, over 10, for a guess


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
