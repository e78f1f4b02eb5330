"""A scripted backend for tests of the engine: no graph is read, a function of the token ids makes the logits."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from eexport.runtime.backend import Array, Buffer
from eexport.runtime.manifest import StageSpec


class FakeBuffer:
    """Plain numpy memory."""

    def __init__(self, shape: Sequence[int], dtype: str) -> None:
        self.array: Array = np.zeros(tuple(shape), np.dtype(dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.array.shape


class FakeStage:
    """Passes the token id along in ``hidden[..., 0]``; the head turns it into a one-hot of the scripted next token."""

    def __init__(self, spec: StageSpec, next_token: Callable[[int], int]) -> None:
        self._spec = spec
        self._next_token = next_token

    def bind(self, buffers: Mapping[str, Buffer]) -> Callable[[], None]:
        """See ``backend.Stage.bind``."""
        source = buffers[self._spec.inputs[0].name].array
        target = buffers[self._spec.outputs[0].name].array

        def run() -> None:
            if self._spec.kind == "embed":
                target[..., 0] = source
            elif self._spec.kind == "block":
                target[...] = source
                self._write_kv(buffers, source)
            else:
                target[...] = 0.0
                for row, token in enumerate(source[0, :, 0]):
                    target[0, row, self._next_token(int(token))] = 1.0

        return run

    def _write_kv(self, buffers: Mapping[str, Buffer], source: Array) -> None:
        rows = source.shape[1]
        if "write_index" in buffers:
            start = int(buffers["write_index"].array[0])
        else:
            start = int(buffers["last_index"].array[0]) + 1 - int(buffers["new_rows"].array[0])
        for spec in self._spec.kv_inputs:
            buffers[spec.name].array[0, :, start : start + rows] = source[0, :, :1]


class FakeBackend:
    """Runs a chain of ``FakeStage``; ``next_token`` maps the current token to the one that follows it."""

    name = "fake"
    device = "none"
    threads = 1

    def __init__(self, next_token: Callable[[int], int]) -> None:
        self._next_token = next_token

    def allocate(self, shape: Sequence[int], dtype: str) -> FakeBuffer:
        """See ``backend.Backend.allocate``."""
        return FakeBuffer(shape, dtype)

    def load(self, graph: Path, stage: StageSpec) -> FakeStage:
        """See ``backend.Backend.load``."""
        return FakeStage(stage, self._next_token)
