"""Tensors of a checkpoint, read one at a time from where they lie; here for safetensors files."""

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from eexport.models.config import read_json
from eexport.models.errors import CheckpointError

_ITEM_SIZE = {"F32": 4, "F16": 2, "BF16": 2}


class Weights(Protocol):
    """What decoder and exporter ask of a checkpoint, whatever its format; names are Hugging Face's."""

    def names(self) -> frozenset[str]:
        """Every tensor of the checkpoint."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, [out, in] for matrices."""

    def dtype(self, name: str) -> str:
        """How a tensor is stored: F32, F16, BF16 or a GGUF type such as Q4_1."""

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor's values, as a new C-contiguous fp32 array that the caller owns."""


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies: `size` bytes at `offset` of the file `path`."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


class MappedWeights:
    """`Weights` over files: a table of entries and a function that turns a tensor's bytes into numbers.

    Only the tensor being read is mapped, so memory never holds more than one of them.
    """

    def __init__(
        self,
        entries: Mapping[str, Entry],
        decode: Callable[[str, Entry, npt.NDArray[np.uint8]], npt.NDArray[np.float32]],
    ) -> None:
        """Take the table; `decode(name, entry, raw)` turns a tensor's bytes `raw` into a new fp32 array."""
        self._entries = dict(entries)
        self._decode = decode

    def names(self) -> frozenset[str]:
        """Every tensor of the checkpoint."""
        return frozenset(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, [out, in] for matrices."""
        return self._entries[name].shape

    def dtype(self, name: str) -> str:
        """How a tensor is stored."""
        return self._entries[name].dtype

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor's values, as a new C-contiguous fp32 array."""
        entry = self._entries[name]
        raw = np.memmap(entry.path, dtype=np.uint8, mode="r", offset=entry.offset, shape=(entry.size,))
        return self._decode(name, entry, raw.view(np.ndarray)).reshape(entry.shape)


def to_float32(dtype: str, raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """The numbers in `raw`, stored as F32, F16 or BF16, exactly, in a new flat array."""
    if dtype == "BF16":  # bf16 is the upper half of fp32
        return (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    return raw.view("<f4" if dtype == "F32" else "<f2").astype(np.float32)


def open_safetensors(folder: Path) -> MappedWeights:
    """The tensors of a Hugging Face folder: `model.safetensors`, or the shards that its index names."""
    index_path, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index_path.is_file():
        index = read_json(index_path).get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(shard, str) for shard in index.values()):
            raise CheckpointError(f"{index_path}: weight_map is missing or malformed; download it again")
    elif single.is_file():
        index = {}
    elif any(folder.glob("*.bin")):
        raise CheckpointError(
            f"{folder}: holds pickled weights (.bin), which are not loaded; convert them to safetensors "
            "with save_pretrained of transformers"
        )
    else:
        raise CheckpointError(f"{folder}: holds neither model.safetensors nor model.safetensors.index.json")
    entries: dict[str, Entry] = {}
    for shard in sorted(set(index.values())) or [single.name]:
        entries |= _read_header(folder / Path(shard).name)
    for name, shard in index.items():
        if name not in entries or entries[name].path.name != shard:
            raise CheckpointError(f"{folder / shard}: lacks tensor {name} of {index_path.name}; download both again")
    return MappedWeights(entries, lambda _, entry, raw: to_float32(entry.dtype, raw))


def _read_header(path: Path) -> dict[str, Entry]:
    """The tensor table of one safetensors file: 8 bytes of length, JSON, then the data."""
    if not path.is_file():
        raise CheckpointError(f"{path}: this shard is missing; download it")
    broken = CheckpointError(f"{path}: is truncated or not a safetensors file; download it again")
    total = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else total
        if 8 + length > total:
            raise broken
        try:
            header: dict[str, Any] = json.loads(file.read(length))
            header.pop("__metadata__", None)
            return {name: _entry(path, name, tensor, 8 + length, total) for name, tensor in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise broken from error


def _entry(path: Path, name: str, tensor: dict[str, Any], data_start: int, total: int) -> Entry:
    dtype, shape, (begin, end) = tensor["dtype"], tuple(tensor["shape"]), tensor["data_offsets"]
    if dtype not in _ITEM_SIZE:
        raise CheckpointError(f"{path}: tensor {name} is stored as {dtype} (allowed: {', '.join(_ITEM_SIZE)})")
    size = math.prod(shape) * _ITEM_SIZE[dtype]
    if begin < 0 or end - begin != size or data_start + end > total:
        raise CheckpointError(f"{path}: is truncated within tensor {name}; download it again")
    return Entry(path, dtype, shape, data_start + begin, size)
