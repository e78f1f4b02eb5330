"""A row's bits depend on nothing but the tokens before it: not on its neighbours, the split or the cache.

Speculation, chunked prefill and prefix reuse are only exact because of this, so the comparisons here are for
equality, at every precision in both dialects.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from eexport.runtime.chain import Chain
from eexport.runtime.engine import Engine
from eexport.runtime.verify import rows_that_differ

Make = Callable[..., Path]
Open = Callable[..., Chain]

FORMS = [(dialect, precision) for dialect in ("ort", "standard") for precision in ("fp32", "fp16", "int8", "int4")]
# Grouped, ungrouped (one query head to a KV head, which takes other kernels), one KV head, and a real model's widths.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped": ("llama", {}),
    "ungrouped": ("llama", {"kv_heads": 4}),
    "one-kv-head": ("qwen3", {"head_dim": 32, "kv_heads": 1}),
    "biased": ("qwen2", {"tied": False}),
    "smollm2": (
        "llama",
        {"layers": 2, "hidden": 576, "heads": 9, "kv_heads": 3, "intermediate": 1536, "vocab": 512},
    ),
}


def token_ids(count: int) -> list[int]:
    return np.random.default_rng(2).integers(3, 300, count).tolist()


def forward(chain: Chain, ids: list[int], chunk: int) -> NDArray[np.generic]:
    """Logits [T, V] of `ids` in steps of `chunk` rows, after whatever the chain holds."""
    parts = [ids[start : start + chunk] for start in range(0, len(ids), chunk)]
    return np.concatenate([np.array(chain.forward(part, len(part))) for part in parts])


IDS = token_ids(150)


@pytest.mark.parametrize(("dialect", "precision"), FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_do_not_depend_on_their_number(
    shape: str, dialect: str, precision: str, tiny_checkpoint: Make, tiny_bundle: Make, tiny_chain: Open
) -> None:
    arch, options = SHAPES[shape]
    folder = tiny_checkpoint(arch, soft=True, **options)
    chain = tiny_chain(tiny_bundle(folder, precision=precision, dialect=dialect, blocks="2"))
    assert rows_that_differ(chain, token_ids(64), (2, 3, 4, 5, 8, 64)) == {}


@pytest.mark.parametrize(("dialect", "precision"), FORMS)
@pytest.mark.parametrize("shape", ["grouped", "ungrouped"])
def test_splits_into_blocks_agree(
    shape: str, dialect: str, precision: str, tiny_checkpoint: Make, tiny_bundle: Make, tiny_chain: Open
) -> None:
    arch, options = SHAPES[shape]
    folder = tiny_checkpoint(arch, soft=True, layers=4, **options)
    one, *others = (
        forward(tiny_chain(tiny_bundle(folder, precision=precision, dialect=dialect, blocks=blocks)), IDS, 150)
        for blocks in ("1", "2", "4")
    )
    for other in others:
        if dialect == "standard" and precision != "fp32":
            # The hidden state is rounded to fp16 between blocks, and within one onnxruntime keeps it in fp32.
            assert np.abs(other - one).max() < 0.02 * np.abs(one).max()
        else:
            assert np.array_equal(other, one)


@pytest.mark.parametrize(("dialect", "precision"), FORMS)
@pytest.mark.parametrize("shape", ["grouped", "ungrouped"])
def test_chunks_and_cache_change_nothing(
    shape: str, dialect: str, precision: str, tiny_checkpoint: Make, tiny_bundle: Make, tiny_chain: Open
) -> None:
    arch, options = SHAPES[shape]
    folder = tiny_checkpoint(arch, soft=True, **options)
    chain = tiny_chain(tiny_bundle(folder, precision=precision, dialect=dialect, blocks="2"), 1024)
    expected = forward(chain, IDS, 150)
    for chunk in (1, 7, 64, 149):
        chain.reset()
        assert np.array_equal(forward(chain, IDS, chunk), expected), f"chunks of {chunk}"
    for kept in (0, 1, 63, 64, 149):  # the cache is now as large as it was, and holds what is no longer valid
        chain.kv.trim(150 - kept)
        assert np.array_equal(forward(chain, IDS[kept:], 40), expected[kept:]), f"after trimming to {kept}"
    chain.reset()
    chain.kv.reserve(1000)
    assert np.array_equal(forward(chain, IDS, 50), expected), "a large cache"


@pytest.mark.parametrize("precision", ["fp32", "int4"])
@pytest.mark.parametrize("dialect", ["ort", "standard"])
def test_context_and_other_requests_change_nothing(
    dialect: str, precision: str, tiny_checkpoint: Make, tiny_bundle: Make, tiny_engine: Callable[..., Engine]
) -> None:
    bundle = tiny_bundle(
        tiny_checkpoint(soft=True, context=1024), precision=precision, dialect=dialect, blocks="2"
    )
    request: dict[str, Any] = {"max_tokens": 30, "logprobs": 5, "ignore_eos": True}
    prompt = token_ids(30)
    expected = list(tiny_engine(bundle, context=64).generate(prompt, **request))
    engine = tiny_engine(bundle, context=1024)
    assert list(engine.generate(prompt, **request)) == expected, "another context"
    for other in (token_ids(700), prompt[:20] + token_ids(300), [5]):
        list(engine.generate(other, max_tokens=3))
        assert list(engine.generate(prompt, **request)) == expected, f"after {len(other)} other tokens"
        assert list(engine.generate(prompt, reuse_cache=False, **request)) == expected


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("dialect", ["ort", "standard"])
@pytest.mark.parametrize("shape", ["grouped", "ungrouped"])
def test_one_graph_serves_every_length(
    shape: str, dialect: str, precision: str, tiny_checkpoint: Make, tiny_bundle: Make, tiny_chain: Open
) -> None:
    """No length is special: empty cache, one row, the whole context at once, the last free place."""
    arch, options = SHAPES[shape]
    folder = tiny_checkpoint(arch, soft=True, **options)
    chain = tiny_chain(tiny_bundle(folder, precision=precision, dialect=dialect, blocks="2"), 128)
    ids = token_ids(128)
    whole = forward(chain, ids, 128)
    for length in (1, 2, 7, 127):
        chain.reset()
        assert np.array_equal(forward(chain, ids[:length], length), whole[:length])
        assert np.array_equal(forward(chain, ids[length:], 128), whole[length:])
