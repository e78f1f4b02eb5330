"""The chain of stages: embedding, blocks, head, executed over T rows at the end of the cache."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from eexport.runtime.backend import Array, Backend, Stage
from eexport.runtime.hugepages import huge_page_heap
from eexport.runtime.kv import KVCache
from eexport.runtime.manifest import Manifest
from eexport.runtime.positions import Fill, positions_for

_CACHED_ROWS = 8  # steps of up to this many rows (decode, verification) stay bound between calls


@dataclasses.dataclass
class _Step:
    """Everything bound for T rows at one cache capacity."""

    token_ids: Array
    fill: Fill
    runs: list[Callable[[], None]]
    hidden: dict[int, Array]  # by depth, in the order of ``Chain.depths``, [1, T, D]


@dataclasses.dataclass
class _Head:
    """The head bound for R rows, which are copied to ``source``."""

    source: Array
    run: Callable[[], None]
    logits: Array


class Chain:
    """Loaded stages with their cache. Not thread-safe: one request at a time."""

    def __init__(self, bundle: Path, manifest: Manifest, backend: Backend, context: int) -> None:
        self.manifest = manifest
        self.backend = backend
        self.kv = KVCache(manifest, backend, context)
        weights = sum(info.bytes for name, info in manifest.files.items() if name.endswith(".bin"))
        with huge_page_heap(weights + weights // 3):  # a third more: what kernels precompute from them
            self._stages: list[Stage] = [backend.load(bundle / stage.graph, stage) for stage in manifest.stages]
        self._positions = positions_for(manifest.blocks[0], manifest.model, manifest.rows, backend)
        self._multiple = manifest.rows.multiple
        self._full_depth = manifest.model.num_layers
        self._steps: dict[int, _Step] = {}
        self._heads: dict[int, _Head] = {}

    @property
    def depths(self) -> tuple[int, ...]:
        """Depths at which the blocks give out hidden states, ascending; the last is the full depth."""
        blocks = self.manifest.blocks
        return tuple(sorted({depth for block in blocks for depth in (*block.hidden_layers, block.layers[1])}))

    def forward(self, ids: Sequence[int], head_rows: int = 1) -> Array:
        """Run ``ids`` after what the cache holds.

        Args:
            ids: T token ids.
            head_rows: How many of the last rows to give logits for, 0 to T.

        Returns:
            Logits [head_rows, V] in fp32, in memory that the next call writes over.

        Raises:
            ContextError: When the rows do not fit; the cache is as before.
        """
        step = self._run(ids)
        if not head_rows:
            return np.empty((0, self.manifest.model.vocab_size), np.float32)
        return self.head(step.hidden[self._full_depth][0, len(ids) - head_rows : len(ids)])

    def hidden_states(self, ids: Sequence[int]) -> Array:
        """Run ``ids`` as ``forward`` does; hidden states [P, D] of the last token at ``depths``, in a copy."""
        step = self._run(ids)
        return np.stack([rows[0, len(ids) - 1] for rows in step.hidden.values()])

    def head(self, hidden: Array) -> Array:
        """Final norm and head of hidden states [R, D]: logits [R, V], in memory that the next call writes over."""
        head = self._fed_head(hidden)
        head.run()
        return head.logits[0, : len(hidden)]

    def time_stages(self, ids: Sequence[int]) -> list[float]:
        """Seconds that each stage takes for ``ids`` after what the cache holds, which stays as it is.

        The head runs for every row. What happens between the stages, on the host, is not counted.

        Raises:
            ContextError: When the rows do not fit.
        """
        step = self._fed_step(ids)
        seconds = [_seconds(run) for run in step.runs]
        return [*seconds, _seconds(self._fed_head(step.hidden[self._full_depth][0, : len(ids)]).run)]

    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` more tokens at once, where they would come in several steps. Raises ContextError."""
        if self.kv.reserve(rows):
            self._steps.clear()

    def reset(self) -> None:
        """Forget the conversation and give its memory back."""
        self.kv.clear()
        self._steps.clear()

    def _run(self, ids: Sequence[int]) -> _Step:
        step = self._fed_step(ids)
        for run in step.runs:
            run()
        self.kv.length += len(ids)
        return step

    def _fed_step(self, ids: Sequence[int]) -> _Step:
        """What is bound for this many rows, with its inputs filled."""
        count = len(ids)
        self.reserve(count)
        rows = self._padded(count)
        step = self._steps.get(rows) or self._bind(rows)
        step.token_ids[0, :count] = ids
        step.token_ids[0, count:] = ids[-1]  # padding rows: their keys lie beyond the length and are written over
        step.fill(self.kv.length)
        return step

    def _fed_head(self, hidden: Array) -> _Head:
        """The head for hidden states [R, D], with its input filled."""
        head = self._head(self._padded(len(hidden)))
        head.source[0, : len(hidden)] = hidden
        head.source[0, len(hidden) :] = hidden[-1]
        return head

    def _padded(self, rows: int) -> int:
        return -(-rows // self._multiple) * self._multiple

    def _head(self, rows: int) -> _Head:
        if (head := self._heads.get(rows)) is not None:
            return head
        spec = self.manifest.stages[-1]
        source, logits = (
            self.backend.allocate(t.sized(B=1, T=rows), t.dtype) for t in (spec.inputs[0], spec.outputs[0])
        )
        run = self._stages[-1].bind({spec.inputs[0].name: source, spec.outputs[0].name: logits})
        head = _Head(source.array, run, logits.array)
        if rows <= _CACHED_ROWS:
            self._heads[rows] = head
        return head

    def _bind(self, rows: int) -> _Step:
        """Allocate what flows between the stages for ``rows`` rows and tie it all together."""
        sizes = {"B": 1, "T": rows, "C": self.kv.capacity}
        embed, *blocks, _ = self.manifest.stages
        token_ids, hidden = (
            self.backend.allocate(t.sized(**sizes), t.dtype) for t in (embed.inputs[0], embed.outputs[0])
        )
        runs = [self._stages[0].bind({embed.inputs[0].name: token_ids, embed.outputs[0].name: hidden})]
        positions, fill = self._positions.bind(rows, self.kv.capacity)
        states: dict[int, Array] = {}
        for spec, stage in zip(blocks, self._stages[1:], strict=False):
            buffers = {**positions, "hidden": hidden}
            for past in spec.kv_inputs:
                cache = self.kv.buffers[past.name]
                buffers[past.name] = buffers[past.name.replace("past.", "present.", 1)] = cache
            for output, depth in zip(spec.hidden_outputs, (spec.layers[1], *spec.hidden_layers), strict=True):
                buffers[output.name] = self.backend.allocate(output.sized(**sizes), output.dtype)
                states[depth] = buffers[output.name].array
            hidden = buffers[spec.outputs[0].name]
            runs.append(stage.bind(buffers))
        step = _Step(token_ids.array, fill, runs, dict(sorted(states.items())))
        if rows <= _CACHED_ROWS:
            self._steps[rows] = step
        return step


def _seconds(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
