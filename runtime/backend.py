"""What the engine asks of a backend: buffers, and graphs that run on buffers bound once.

A step of the engine calls nothing but bound runs, so per token nothing is allocated and no tensor is looked up by
name. ``backend_ort`` (ONNX Runtime) and ``backend_fake`` (scripted, for tests) implement this.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from eexport.runtime.manifest import StageSpec

Array = NDArray[np.generic]


class Buffer(Protocol):
    """A tensor of fixed shape that lives where the backend computes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape; fixed for its life."""
        ...

    @property
    def array(self) -> Array:
        """The memory itself as a writable numpy view. Only host backends have it."""
        ...


class Stage(Protocol):
    """One loaded graph."""

    def bind(self, buffers: Mapping[str, Any]) -> Callable[[], None]:
        """Tie every input, and the outputs that are named in ``buffers``, to memory; the result runs the graph once.

        ``buffers`` are those of the same backend.
        The same buffer may serve a ``past`` input and its ``present`` output: the cache is then updated in place.
        """
        ...


class Backend(Protocol):
    """A way to execute stages on one device."""

    name: str
    device: str
    threads: int

    def allocate(self, shape: Sequence[int], dtype: str) -> Buffer:
        """A zeroed buffer of this shape and dtype ("float32", "float16", "int32", "int64")."""
        ...

    def load(self, graph: Path, stage: StageSpec) -> Stage:
        """Load one graph. Raises BundleError when the file is not a graph this backend can run."""
        ...
