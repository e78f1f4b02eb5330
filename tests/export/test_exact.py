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
from tiny import make_checkpoint

from eexport.export.build import BuildOptions, build
from eexport.models.checkpoint import open_checkpoint
from eexport.runtime.backend import Backend, Buffer
from eexport.runtime.chain import Chain
from eexport.runtime.engine import Engine
from eexport.runtime.manifest import Manifest, read_manifest
from eexport.runtime.positions import RopeTable
from eexport.runtime.summary import check
from eexport.runtime.verify import rows_that_differ

Make = Callable[..., Path]
Open = Callable[..., Chain]

FORMS = [(dialect, precision) for dialect in ("ort", "standard") for precision in ("fp32", "fp16", "int8", "int4")]
# Grouped, ungrouped (one query head to a KV head, which takes other kernels), one KV head, and real widths.
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
    return [int(token) for token in np.random.default_rng(2).integers(3, 300, count)]


def forward(chain: Chain, ids: list[int], chunk: int) -> NDArray[np.float32]:
    """Logits [T, V] of `ids` in steps of `chunk` rows, after whatever the chain holds."""
    parts = [ids[start : start + chunk] for start in range(0, len(ids), chunk)]
    return np.concatenate([np.array(chain.forward(part, len(part)), np.float32) for part in parts])


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


@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("dialect", ["ort", "standard"])
def test_larger_quantisation_blocks(
    dialect: str, precision: str, block_size: int, tiny_checkpoint: Make, tiny_bundle: Make, tiny_chain: Open
) -> None:
    sizes = {"hidden": 512, "heads": 8, "kv_heads": 2, "intermediate": 1536, "vocab": 512, "layers": 2}
    options = {"precision": precision, "dialect": dialect, "block_size": block_size}
    chain = tiny_chain(tiny_bundle(tiny_checkpoint(soft=True, **sizes), **options))
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


@pytest.mark.slow
@pytest.mark.parametrize(("dialect", "precision"), [("ort", "int8"), ("ort", "int4"), ("standard", "int8")])
def test_far_positions(
    dialect: str, precision: str, tiny_checkpoint: Make, tiny_bundle: Make, tiny_chain: Open
) -> None:
    """Attention over long caches is computed in tiles, whose edges must not show."""
    arch, options = SHAPES["smollm2"]
    folder = tiny_checkpoint(arch, soft=True, context=2048, **options)
    chain = tiny_chain(tiny_bundle(folder, precision=precision, dialect=dialect), 2048)
    ids = token_ids(1500)
    expected = forward(chain, ids, 128)
    for chunk in (1500, 33):
        chain.reset()
        assert np.array_equal(forward(chain, ids, chunk), expected), f"chunks of {chunk}"
    for chunk in (1, 3, 8):
        chain.kv.trim(40)
        assert np.array_equal(forward(chain, ids[-40:], chunk), expected[-40:]), f"steps of {chunk}"


@pytest.mark.parametrize("precision", ["fp32", "int4"])
@pytest.mark.parametrize("dialect", ["ort", "standard"])
def test_context_and_other_requests_change_nothing(
    dialect: str, precision: str, tiny_checkpoint: Make, tiny_bundle: Make, tiny_engine: Callable[..., Engine]
) -> None:
    bundle = tiny_bundle(tiny_checkpoint(soft=True, context=1024), precision=precision, dialect=dialect, blocks="2")
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


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("dialect", ["ort", "standard"])
def test_slots_do_not_depend_on_each_other(
    dialect: str, precision: str, backend: Backend, tiny_checkpoint: Make, tiny_bundle: Make
) -> None:
    """A batch of slots at different positions gives each the bits that it gets alone."""
    bundle = tiny_bundle(tiny_checkpoint(soft=True), precision=precision, dialect=dialect, blocks="1")
    manifest = read_manifest(bundle)
    block = manifest.blocks[0]
    stage = backend.load(bundle / block.graph, block)
    random = np.random.default_rng(0)
    starts, rows, capacity = [5, 40, 0], 4, 64
    hidden = random.standard_normal((3, rows, manifest.model.hidden_size)).astype(np.float32)
    caches = {t.name: random.standard_normal(t.sized(B=3, C=capacity)) * 0.5 for t in block.kv_inputs}

    def run(slots: list[int]) -> tuple[NDArray[Any], dict[str, NDArray[Any]]]:
        sizes = {"B": len(slots), "T": rows, "C": capacity}
        buffers = {t.name: backend.allocate(t.sized(**sizes), t.dtype) for t in block.inputs}
        output = backend.allocate(block.outputs[0].sized(**sizes), block.outputs[0].dtype)
        buffers["hidden"].array[...] = hidden[slots]
        for name, values in caches.items():
            buffers[name].array[...] = values[slots]
        fill_positions(buffers, manifest, [starts[slot] for slot in slots], rows)
        presents = {name.replace("past.", "present."): buffers[name] for name in caches}
        stage.bind({**buffers, **presents, "hidden_out": output})()
        return output.array, {name: buffer.array for name, buffer in presents.items()}

    together, kept = run([0, 1, 2])
    for slot, start in enumerate(starts):
        alone, kept_alone = run([slot])
        assert np.array_equal(together[slot], alone[0])
        for name, cache in kept.items():
            valid = slice(0, start + rows)
            assert np.array_equal(cache[slot, :, valid], kept_alone[name][0, :, valid])


def fill_positions(buffers: dict[str, Buffer], manifest: Manifest, starts: list[int], rows: int) -> None:
    """The position inputs of slots that each have `rows` rows from their own start on."""
    cos, sin = RopeTable(manifest.model, "float32").upto(64)
    arrays = {name: buffer.array for name, buffer in buffers.items()}
    if "mask" not in arrays:
        arrays["cos_table"][...], arrays["sin_table"][...] = cos, sin
        seen = rows + manifest.rows.spare
        arrays["last_index"][...] = [start + seen - 1 for start in starts]
        arrays["new_rows"][...] = seen
        arrays["total_length"][...] = max(starts) + seen
        return
    arrays["write_index"][...] = starts
    for slot, start in enumerate(starts):
        arrays["cos"][slot], arrays["sin"][slot] = cos[start : start + rows], sin[start : start + rows]
        visible = np.arange(64) <= np.arange(start, start + rows)[:, None]
        arrays["mask"][slot, 0] = np.where(visible, 0.0, -np.inf)


def test_a_bundle_that_is_not_exact_says_so(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_checkpoint(tmp_path / "checkpoint"))
    manifest = build(checkpoint, tmp_path / "bundle", BuildOptions(precision="int8", exact=False))
    assert manifest.rows.multiple == 1 and manifest.rows.spare == 0 and not manifest.rows.exact
    assert check(tmp_path / "bundle", "cpu", 2)["ok"]
