"""The chain of stages: embedding, blocks, head, executed over T rows at the end of the cache."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from eexport.runtime.backend import Array, Backend, Buffer, Stage
from eexport.runtime.kv import KVCache, Positions
from eexport.runtime.manifest import Manifest

_CACHED_ROWS = 8  # steps of up to this many rows (decode, verification) stay bound between calls


@dataclasses.dataclass
class _Step:
    """Everything bound for T rows at one cache capacity."""

    token_ids: Array
    write_index: Array
    cos: Array
    sin: Array
    mask: Array
    runs: list[Callable[[], None]]
    last_hidden: Buffer


@dataclasses.dataclass
class _Head:
    """The head bound for R rows; ``source`` is where they are copied to, unless it reads a step's rows in place."""

    run: Callable[[], None]
    source: Array
    logits: Array


class Chain:
    """Loaded stages with their cache. Not thread-safe: one request at a time."""

    def __init__(self, bundle: Path, manifest: Manifest, backend: Backend, context: int) -> None:
        self.manifest = manifest
        self.backend = backend
        self.kv = KVCache(manifest, backend, context)
        self._stages: list[Stage] = [backend.load(bundle / stage.graph, stage) for stage in manifest.stages]
        self._positions = Positions(manifest.model, manifest.precision.activations)
        self._steps: dict[int, _Step] = {}
        self._heads: dict[int, _Head] = {}

    def forward(self, ids: Sequence[int], head_rows: int = 1) -> Array:
        """Run ``ids`` after what the cache holds.

        Args:
            ids: T token ids.
            head_rows: How many of the last rows to give logits for, 0 to T.

        Returns:
            Logits [head_rows, V] in fp32, in memory that the next call with as many head rows writes over.

        Raises:
            ContextError: When the rows do not fit; the cache is as before.
        """
        rows = len(ids)
        if self.kv.reserve(rows):
            self._steps.clear()
            self._heads.clear()
        step = self._steps.get(rows) or self._bind(rows)
        start = self.kv.length
        step.token_ids[0] = ids
        step.write_index[0] = start
        self._positions.fill(start, step.cos, step.sin, step.mask)
        for run in step.runs:
            run()
        self.kv.length = start + rows
        if not head_rows:
            return np.empty((0, self.manifest.model.vocab_size), np.float32)
        return self._logits(step.last_hidden, head_rows)

    def reset(self) -> None:
        """Forget the conversation."""
        self.kv.clear()
        self._steps.clear()
        self._heads.clear()

    def _logits(self, hidden: Buffer, rows: int) -> Array:
        head = self._heads.get(rows)
        if head is None:
            spec = self.manifest.stages[-1]
            source = self.backend.allocate(spec.inputs[0].sized(B=1, T=rows), spec.inputs[0].dtype)
            logits = self.backend.allocate(spec.outputs[0].sized(B=1, T=rows), spec.outputs[0].dtype)
            run = self._stages[-1].bind({spec.inputs[0].name: source, spec.outputs[0].name: logits})
            head = _Head(run, source.array, logits.array)
            self._heads[rows] = head
        head.source[...] = hidden.array[:, -rows:]
        head.run()
        return head.logits[0]

    def _bind(self, rows: int) -> _Step:
        """Allocate what flows between the stages for ``rows`` rows and tie it all together."""
        stages = self.manifest.stages[:-1]
        sizes = {"B": 1, "T": rows, "C": self.kv.capacity}
        shared = {
            spec.name: self.backend.allocate(spec.sized(**sizes), spec.dtype)
            for spec in (*stages[0].inputs, *stages[1].inputs)
            if not spec.name.startswith("past.") and spec.name != "hidden"
        }
        hidden: Buffer | None = None
        runs = []
        for spec, stage in zip(stages, self._stages, strict=False):
            buffers = dict(shared)
            if hidden is not None:
                buffers["hidden"] = hidden
            for past in spec.kv_inputs:
                cache = self.kv.buffers[past.name]
                buffers[past.name] = buffers[past.name.replace("past.", "present.", 1)] = cache
            output = spec.outputs[0]
            hidden = buffers[output.name] = self.backend.allocate(output.sized(**sizes), output.dtype)
            runs.append(stage.bind(buffers))
        assert hidden is not None
        arrays = {name: buffer.array for name, buffer in shared.items()}
        step = _Step(**arrays, runs=runs, last_hidden=hidden)
        if rows <= _CACHED_ROWS:
            self._steps[rows] = step
        return step
