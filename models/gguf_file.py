"""The header of a GGUF file: metadata and tensor table.

`gguf.GGUFReader` makes two array objects per vocabulary entry and takes seconds; this reads the same in a
fraction of one, and says what is wrong with a broken file.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from eexport.models.errors import CheckpointError
from eexport.models.weights import Entry

_SCALARS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.FLOAT64: "<d",
    GGUFValueType.BOOL: "<?",
}
# What gguf.quants.dequantize is relied on for.
_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")


@dataclass(frozen=True)
class GgufFile:
    """A parsed header: metadata by key, tensors by GGUF name; shapes are [out, in]."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Entry]


def read_gguf(path: Path) -> GgufFile:
    """Read the header of `path`; a split, truncated or otherwise unusable file is a `CheckpointError`."""
    if path.stat().st_size < 24:
        raise CheckpointError(f"{path}: is truncated or not a GGUF file; download it again")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data)
        try:
            return _parse(path, cursor)
        except (struct.error, ValueError, TypeError, ArithmeticError) as error:
            at = f"byte {cursor.position} of {len(data)}"
            raise CheckpointError(f"{path}: is truncated or damaged near {at}; download it again") from error


def _parse(path: Path, cursor: "_Cursor") -> GgufFile:
    if cursor.take(4) != b"GGUF":
        raise CheckpointError(f"{path}: is not a GGUF file")
    version = cursor.scalar("<I")
    if version not in (2, 3):
        raise CheckpointError(f"{path}: GGUF version {version} is not supported (known: 2 and 3, little-endian)")
    tensor_count, key_count = cursor.scalar("<Q"), cursor.scalar("<Q")
    metadata = {cursor.string(): cursor.value() for _ in range(key_count)}
    if (splits := metadata.get("split.count", 0)) > 1:
        raise CheckpointError(f"{path}: is one of {splits} splits; join them first with llama-gguf-split --merge")
    table = [_tensor_info(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    start = -(-cursor.position // alignment) * alignment
    tensors = {}
    for name, shape, type_id, offset in table:
        dtype = _type_name(type_id)
        if dtype not in _TYPES:
            raise CheckpointError(
                f"{path}: tensor {name} has type {dtype}, which is not supported (known: {', '.join(_TYPES)})"
            )
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(type_id)]
        size = math.prod(shape) // block * block_bytes
        if not shape or shape[-1] % block:
            raise CheckpointError(f"{path}: tensor {name} {shape} is not made of {dtype} blocks of {block}")
        if start + offset + size > cursor.end:
            raise CheckpointError(f"{path}: is truncated within tensor {name}; download it again")
        tensors[name] = Entry(path, dtype, shape, start + offset, size)
    return GgufFile(path, metadata, tensors)


def _tensor_info(cursor: "_Cursor") -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    # GGUF lists the fastest-varying dimension first.
    shape = tuple(reversed([cursor.scalar("<Q") for _ in range(cursor.scalar("<I"))]))
    return name, shape, cursor.scalar("<I"), cursor.scalar("<Q")


def _type_name(type_id: int) -> str:
    try:
        return str(GGMLQuantizationType(type_id).name)
    except ValueError:
        return f"number {type_id}"


class _Cursor:
    """A position in the file that moves as values are read."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.end = len(data)
        self.position = 0

    def take(self, count: int) -> bytes:
        taken = self.data[self.position : self.position + count]
        if len(taken) != count:
            raise ValueError("end of file")
        self.position += count
        return taken

    def scalar(self, fmt: str) -> Any:
        (value,) = struct.unpack_from(fmt, self.data, self.position)
        self.position += struct.calcsize(fmt)
        return value

    def string(self) -> str:
        return self.take(self.scalar("<Q")).decode("utf-8")

    def value(self) -> Any:
        return self._value(GGUFValueType(self.scalar("<I")))

    def _value(self, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind != GGUFValueType.ARRAY:
            return self.scalar(_SCALARS[kind])
        item, count = GGUFValueType(self.scalar("<I")), self.scalar("<Q")
        if item in _SCALARS:
            fmt = f"<{count}{_SCALARS[item][1]}"
            return list(struct.unpack(fmt, self.take(struct.calcsize(fmt))))
        return [self._value(item) for _ in range(count)]
