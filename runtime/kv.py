"""Key/value caches: one buffer per layer and kind, updated in place by the graphs, sized near the current length."""

from eexport.runtime.backend import Backend, Buffer
from eexport.runtime.errors import ContextError
from eexport.runtime.manifest import Manifest

# Growing copies the caches and binds them anew; masked attention pays for the capacity and not the length.
_STEP = 256


class KVCache:
    """The caches of one slot over all blocks; ``length`` tokens are valid, ``capacity`` fit without growing."""

    def __init__(self, manifest: Manifest, backend: Backend, limit: int) -> None:
        """``limit`` caps the capacity, in tokens."""
        self.limit = limit
        self.length = 0
        self.capacity = 0
        self.buffers: dict[str, Buffer] = {}
        self._specs = [spec for block in manifest.blocks for spec in block.kv_inputs]
        self._backend = backend
        self._overrun = manifest.rows.overrun

    def reserve(self, rows: int) -> bool:
        """Make room for ``rows`` more tokens; True when the buffers are new and must be bound again.

        The rows that a step may touch beyond these (``RowsInfo.overrun``) fit too.

        Raises:
            ContextError: When that would exceed the limit. Nothing has changed then.
        """
        needed = self.length + rows
        if needed > self.limit:
            raise ContextError(
                f"{needed} tokens do not fit in the context of {self.limit}: shorten the prompt or raise --context"
            )
        needed += self._overrun
        if needed <= self.capacity:
            return False
        step = max(_STEP, self.length // 8 // _STEP * _STEP)  # growing copies the cache: seldom when it is large
        self.capacity = min(-(-needed // step) * step, -(-(self.limit + self._overrun) // _STEP) * _STEP)
        for spec in self._specs:
            grown = self._backend.allocate(spec.sized(B=1, C=self.capacity), spec.dtype)
            if self.length:
                grown.array[:, :, : self.length] = self.buffers[spec.name].array[:, :, : self.length]
            self.buffers[spec.name] = grown
        return True

    def trim(self, count: int) -> None:
        """Forget the last ``count`` tokens; their rows are masked out and written over."""
        if not 0 <= count <= self.length:
            raise ValueError(f"cannot trim {count} of {self.length} tokens")
        self.length -= count

    def clear(self) -> None:
        """Forget everything and give the memory back, so that one long request does not hold it for ever."""
        self.length = self.capacity = 0
        self.buffers.clear()
