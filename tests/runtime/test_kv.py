"""The caches' bookkeeping, and the angles and masks of rows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding

from eexport.runtime.backend import Backend
from eexport.runtime.backend_fake import FakeBackend
from eexport.runtime.errors import ContextError
from eexport.runtime.kv import KVCache
from eexport.runtime.manifest import Manifest, read_manifest
from eexport.runtime.positions import RopeTable, positions_for

Make = Callable[..., Path]

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
FAR = (0, 1, 1857, 32000)


@pytest.fixture(scope="module")
def manifest(tiny_checkpoint: Make, tiny_bundle: Make) -> Manifest:
    return read_manifest(tiny_bundle(tiny_checkpoint("mistral", head_dim=32, kv_heads=1), blocks="2"))


@pytest.fixture
def kv(manifest: Manifest) -> KVCache:
    return KVCache(manifest, FakeBackend(lambda token: token), 1000)


def write(kv: KVCache, rows: int, value: float) -> None:
    for buffer in kv.buffers.values():
        buffer.array[:, :, kv.length : kv.length + rows] = value
    kv.length += rows


def held(kv: KVCache) -> list[float]:
    """The value that each valid row of all caches has."""
    arrays = [buffer.array[0, 0, : kv.length, 0] for buffer in kv.buffers.values()]
    assert all(np.array_equal(array, arrays[0]) for array in arrays)
    return [float(value) for value in arrays[0]]


def test_shapes_follow_the_model(kv: KVCache) -> None:
    assert kv.reserve(5) and kv.capacity >= 5
    assert set(kv.buffers) == {f"past.{layer}.{kind}" for layer in range(3) for kind in ("key", "value")}
    assert {buffer.shape for buffer in kv.buffers.values()} == {(1, 1, kv.capacity, 32)}


def test_growing_keeps_what_is_held(kv: KVCache) -> None:
    kv.reserve(3)
    write(kv, 3, 1.0)
    assert not kv.reserve(3)  # there is room: nothing to bind again
    write(kv, 3, 2.0)
    assert kv.reserve(900)
    assert held(kv) == [1.0] * 3 + [2.0] * 3
    assert kv.capacity >= 906


def test_memory_follows_the_length(kv: KVCache) -> None:
    for _ in range(990):
        kv.reserve(1)
        write(kv, 1, 0.0)
        assert kv.length <= kv.capacity <= kv.length + 300
    kv.clear()
    assert (kv.length, kv.capacity, kv.buffers) == (0, 0, {})


def test_trim(kv: KVCache) -> None:
    kv.reserve(10)
    write(kv, 6, 1.0)
    write(kv, 4, 2.0)
    kv.trim(5)
    write(kv, 1, 3.0)
    assert held(kv) == [1.0] * 5 + [3.0]
    kv.trim(0)
    for count in (-1, 7):
        with pytest.raises(ValueError, match="cannot trim"):
            kv.trim(count)
    kv.trim(6)
    assert kv.length == 0


def test_the_limit(kv: KVCache) -> None:
    kv.reserve(600)
    write(kv, 600, 1.0)
    capacity, buffers = kv.capacity, dict(kv.buffers)
    with pytest.raises(ContextError, match="1001 tokens .* 1000"):
        kv.reserve(401)
    assert (kv.length, kv.capacity, kv.buffers) == (600, capacity, buffers)
    kv.reserve(400)
    assert kv.capacity >= 1000


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("rope", [{}, YARN], ids=["default", "yarn"])
def test_angles_are_fp32_and_cast_last(
    rope: dict[str, Any], dtype: str, tiny_checkpoint: Make, tiny_bundle: Make
) -> None:
    """In fp16 the angle itself would be off by whole turns at these positions."""
    folder = tiny_checkpoint(rope=rope, context=40000)
    model = read_manifest(tiny_bundle(folder)).model
    cos, sin = RopeTable(model, dtype).upto(max(FAR) + 1)
    expected = LlamaRotaryEmbedding(LlamaConfig.from_pretrained(folder))(torch.zeros(1), torch.tensor([FAR]))
    for table, reference in zip((cos, sin), expected, strict=True):
        assert table.dtype == dtype
        half = reference[0, :, : table.shape[1]].numpy().astype(dtype)
        # One unit in the last place: numpy's and torch's fp32 cosines are not the same bits.
        difference = np.asarray(table[list(FAR)], np.float32) - half.astype(np.float32)
        assert np.abs(difference).max() <= np.finfo(dtype).eps
    again = RopeTable(model, dtype)
    again.upto(10)
    assert np.array_equal(again.upto(max(FAR) + 1)[0], cos)  # however the table grew


@pytest.mark.parametrize("dialect", ["ort", "standard"])
def test_positions_of_rows(dialect: str, backend: Backend, tiny_checkpoint: Make, tiny_bundle: Make) -> None:
    manifest = read_manifest(tiny_bundle(tiny_checkpoint("mistral", head_dim=32, kv_heads=1), dialect=dialect))
    block, rope = manifest.blocks[0], RopeTable(manifest.model, "float32")
    buffers, fill = positions_for(block, manifest.model, manifest.rows, backend).bind(2, 128)
    named = {spec.name: spec.sized(B=1, T=2, C=128) for spec in block.inputs if spec.name in buffers}
    assert named == {name: buffer.shape for name, buffer in buffers.items()}
    for start in (5, 0, 126 - manifest.rows.spare):
        fill(start)
        values = {name: buffer.array for name, buffer in buffers.items()}
        if dialect == "standard":
            _check_mask(values, start, rope.upto(128)[0])
        else:
            _check_lengths(values, start, 2 + manifest.rows.spare, rope.upto(128)[0])


def _check_mask(values: dict[str, NDArray[Any]], start: int, cos: NDArray[Any]) -> None:
    assert values["write_index"].tolist() == [start]
    assert np.array_equal(values["cos"][0], cos[start : start + 2])
    for row, mask in enumerate(values["mask"][0, 0]):
        assert np.array_equal(mask == 0, np.arange(128) <= start + row)
        assert np.array_equal(mask == -np.inf, np.arange(128) > start + row)


def _check_lengths(values: dict[str, NDArray[Any]], start: int, rows: int, cos: NDArray[Any]) -> None:
    assert values["last_index"].tolist() == [start + rows - 1]
    assert values["total_length"].tolist() == [start + rows]
    assert values["new_rows"].tolist() == [rows]
    assert np.array_equal(values["cos_table"], cos)
