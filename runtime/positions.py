"""What tells a block where its rows stand: rotary angles, and which keys each row may see.

The two dialects ask for it in two forms, and the inputs that a block lists say which. ``standard`` takes the rows' own
angles, a mask that is added to the scores and the index to write at; ``ort`` takes tables of angles and lengths, from
which GroupQueryAttention derives the rest.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from eexport.runtime.backend import Array, Backend, Buffer
from eexport.runtime.manifest import ModelInfo, RowsInfo, StageSpec

Fill = Callable[[int], None]
"""Writes the inputs for rows that start at this position."""


class Positions(Protocol):
    """Makes the position inputs of blocks."""

    def bind(self, rows: int, capacity: int) -> tuple[Mapping[str, Buffer], Fill]:
        """Buffers for T rows at this cache capacity, and the function that fills them."""
        ...


def positions_for(block: StageSpec, model: ModelInfo, rows: RowsInfo, backend: Backend) -> Positions:
    """The form that ``block`` asks for, which may be an exit head as well."""
    rope = RopeTable(model, block.outputs[0].dtype)
    masked = any(spec.name == "mask" for spec in block.inputs)
    return MaskedPositions(rope, backend) if masked else TablePositions(rope, rows.spare, backend)


class RopeTable:
    """Cosines and sines of every position up to the longest asked for so far."""

    def __init__(self, model: ModelInfo, dtype: str) -> None:
        self.dtype = dtype
        self._inv_freq = np.asarray(model.rope_inv_freq, np.float32)
        self._factor = np.float32(model.rope_attention_factor)
        self._cos = self._sin = np.empty((0, self._inv_freq.size), dtype)

    def upto(self, length: int) -> tuple[Array, Array]:
        """Cosines and sines [length, Hd/2]."""
        if len(self._cos) < length:
            # Angles in fp32, as the models were trained, and cast last (transformers#25681).
            angles = np.arange(2 * length, dtype=np.float32)[:, None] * self._inv_freq
            self._cos = (np.cos(angles) * self._factor).astype(self.dtype)
            self._sin = (np.sin(angles) * self._factor).astype(self.dtype)
        return self._cos[:length], self._sin[:length]


class TablePositions:
    """Inputs cos_table, sin_table [C, Hd/2]; last_index, new_rows [B] and total_length [1] (int32)."""

    def __init__(self, rope: RopeTable, spare: int, backend: Backend, slots: int = 1) -> None:
        self._rope, self._spare, self._backend, self._slots = rope, spare, backend, slots
        self._tables: dict[str, Buffer] = {}

    def bind(self, rows: int, capacity: int) -> tuple[Mapping[str, Buffer], Callable[[int | Array], None]]:
        """See ``Positions``; the function also takes a position for each slot."""
        if not self._tables or self._tables["cos_table"].shape[0] != capacity:
            for name, values in zip(("cos_table", "sin_table"), self._rope.upto(capacity), strict=True):
                self._tables[name] = self._backend.allocate(values.shape, self._rope.dtype)
                self._tables[name].array[...] = values
        last, total, new = (self._backend.allocate((size,), "int32") for size in (self._slots, 1, self._slots))
        seen = rows + self._spare
        new.array[:] = seen

        def fill(start: int | Array, last: Array = last.array, total: Array = total.array) -> None:
            last[:] = start + (seen - 1)
            total[0] = last.max() + 1

        return {**self._tables, "last_index": last, "total_length": total, "new_rows": new}, fill


class MaskedPositions:
    """Inputs cos, sin [B, T, Hd/2], mask [B, 1, T, C] added to the scores, write_index [B] (int64)."""

    def __init__(self, rope: RopeTable, backend: Backend) -> None:
        self._rope, self._backend = rope, backend

    def bind(self, rows: int, capacity: int) -> tuple[Mapping[str, Buffer], Fill]:
        """See ``Positions``."""
        cos_table, sin_table = self._rope.upto(capacity)
        cos, sin = (self._backend.allocate((1, rows, cos_table.shape[1]), self._rope.dtype) for _ in range(2))
        mask = self._backend.allocate((1, 1, rows, capacity), self._rope.dtype)
        write_index = self._backend.allocate((1,), "int64")

        def fill(start: int) -> None:
            write_index.array[0] = start
            cos.array[0] = cos_table[start : start + rows]
            sin.array[0] = sin_table[start : start + rows]
            visible = np.arange(capacity) <= np.arange(start, start + rows)[:, None]  # [T, C]
            mask.array[0, 0] = np.where(visible, 0.0, -np.inf)

        return {"cos": cos, "sin": sin, "mask": mask, "write_index": write_index}, fill
