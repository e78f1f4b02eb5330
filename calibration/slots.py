"""Many texts at once, a token each per step: how training data is generated fast.

A row keeps its bits whatever runs beside it (``manifest.RowsInfo``), so a text comes out the same in any company. The
chain that a request runs on has one slot and any number of rows; here it is many slots of one row.
Legend: B slots, C cache capacity, P depths, D hidden width, V vocabulary.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from eexport.runtime.backend import Array, Backend, Buffer
from eexport.runtime.hugepages import huge_page_heap
from eexport.runtime.manifest import Manifest, StageSpec, TensorSpec
from eexport.runtime.positions import RopeTable, TablePositions


class Slots:
    """The stages of an ``ort`` bundle bound for B slots of one row each.

    Attributes:
        lengths: [B] tokens that each slot holds. Setting one to 0 empties that slot.
        hidden: Hidden states [B, D] of the last step, by depth.
    """

    def __init__(self, folder: Path, manifest: Manifest, backend: Backend, slots: int, capacity: int) -> None:
        """Load the stages; every slot holds ``capacity`` tokens at most."""
        self.manifest, self.capacity = manifest, capacity
        self.lengths = np.zeros(slots, np.int64)
        self._spare = manifest.rows.spare
        self._backend, self._sizes = backend, {"B": slots, "T": 1, "C": capacity + self._spare}
        embed, *blocks, head = manifest.stages
        weights = sum(info.bytes for name, info in manifest.files.items() if name.endswith(".bin"))
        with huge_page_heap(weights + weights // 3):
            stages = [backend.load(folder / stage.graph, stage) for stage in manifest.stages]
        self._token_ids, hidden, logits = map(self._new, (embed.inputs[0], embed.outputs[0], head.outputs[0]))
        self._logits = np.asarray(logits.array[:, 0], np.float32)
        self._runs = [stages[0].bind({embed.inputs[0].name: self._token_ids, embed.outputs[0].name: hidden})]
        rope = RopeTable(manifest.model, blocks[0].outputs[0].dtype)
        positions = TablePositions(rope, self._spare, backend, slots)
        self._positions, self._place = positions.bind(1, self._sizes["C"])
        self._states = {0: hidden}  # [B, 1, D] by depth, the embedding among them
        for spec, stage in zip(blocks, stages[1:], strict=False):
            buffers = {**self._positions, **self._new_caches(spec), "hidden": hidden}
            for output, depth in zip(spec.hidden_outputs, (spec.layers[1], *spec.hidden_layers), strict=True):
                buffers[output.name] = self._states[depth] = self._new(output)
            hidden = self._states[spec.layers[1]]
            self._runs.append(stage.bind(buffers))
        self._runs.append(stages[-1].bind({head.inputs[0].name: hidden, head.outputs[0].name: logits}))
        self.hidden: dict[int, Array] = {depth: state.array[:, 0] for depth, state in self._states.items() if depth}

    def step(self, token_ids: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float32]:
        """Append a token to every slot; logits [B, V], in memory that the next call writes over.

        Raises:
            ValueError: A slot is full.
        """
        if self.lengths.max() >= self.capacity:
            raise ValueError(f"a slot holds {self.capacity} tokens")
        self._token_ids.array[:, 0] = token_ids
        self._place(self.lengths)
        for run in self._runs:
            run()
        self.lengths += 1
        return self._logits

    def _new(self, spec: TensorSpec) -> Buffer:
        return self._backend.allocate(spec.sized(**self._sizes), spec.dtype)

    def _new_caches(self, stage: StageSpec) -> dict[str, Buffer]:
        """The caches of ``stage``; past and present of one are the same memory."""
        caches = {past.name: self._new(past) for past in stage.kv_inputs}
        return caches | {name.replace("past.", "present.", 1): cache for name, cache in caches.items()}


class Occupant(Protocol):
    """A text that has a slot to itself until it is done."""

    def take(self) -> int:
        """Its next token."""
        ...


T = TypeVar("T", bound=Occupant)


def run_all(
    slots: Slots, texts: Iterable[T], hear: Callable[[NDArray[np.float32], list[tuple[int, T]]], Iterable[int]]
) -> None:
    """Run texts side by side, each from an empty slot.

    A text's rows do not depend on the others, nor on the number of slots.

    Args:
        slots: To run them in; what is in them is dropped.
        texts: Any number; one is taken when a slot is free.
        hear: Called with a step's logits [B, V] and the slots in use, with their texts; those whose text is done it
            gives back.
    """
    waiting = iter(texts)
    seats = [next(waiting, None) for _ in slots.lengths]
    slots.lengths[:] = 0
    while any(seat is not None for seat in seats):
        logits = slots.step([0 if seat is None else seat.take() for seat in seats])
        for slot in hear(logits, [(slot, seat) for slot, seat in enumerate(seats) if seat is not None]):
            seats[slot] = next(waiting, None)
            slots.lengths[slot] = 0
        for slot, seat in enumerate(seats):
            if seat is None:
                slots.lengths[slot] = 0  # an empty slot writes its first row over and over
