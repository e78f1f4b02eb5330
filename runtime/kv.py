"""Key/value caches: one buffer per layer and kind, updated in place by the graphs, sized near the current length."""

import numpy as np

from eexport.runtime.backend import Array, Backend, Buffer
from eexport.runtime.errors import ContextError
from eexport.runtime.manifest import Manifest, ModelInfo

# Attention on a CPU pays for the capacity, not the length, so caches follow the length in small steps.
_STEP = 64


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

    def reserve(self, rows: int) -> bool:
        """Make room for ``rows`` more tokens; True when the buffers are new and must be bound again.

        Raises:
            ContextError: When that would exceed the limit. Nothing has changed then.
        """
        needed = self.length + rows
        if needed > self.limit:
            raise ContextError(
                f"{needed} tokens do not fit in the context of {self.limit}: shorten the prompt or raise --context"
            )
        if needed <= self.capacity:
            return False
        step = max(_STEP, self.length // 8 // _STEP * _STEP)  # growing copies the cache: seldom when it is large
        self.capacity = min(-(-needed // step) * step, -(-self.limit // _STEP) * _STEP)
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


class Positions:
    """Rotary angles and masks for the rows of a step."""

    def __init__(self, model: ModelInfo, dtype: str) -> None:
        self._dtype = np.dtype(dtype)
        self._inv_freq = np.asarray(model.rope_inv_freq, np.float32)
        self._factor = np.float32(model.rope_attention_factor)
        self._cos = self._sin = np.empty((0, self._inv_freq.size), self._dtype)

    def fill(self, start: int, cos: Array, sin: Array, mask: Array) -> None:
        """Write the rows ``start``, ``start + 1``, … into cos and sin [1, T, Hd/2] and mask [1, 1, T, C]."""
        rows, capacity = mask.shape[2:]
        if len(self._cos) < capacity:
            self._extend(2 * capacity)
        cos[0] = self._cos[start : start + rows]
        sin[0] = self._sin[start : start + rows]
        if rows == 1:
            mask[0, 0, 0, : start + 1] = 0.0
            mask[0, 0, 0, start + 1 :] = -np.inf
        else:
            visible = np.arange(capacity) <= np.arange(start, start + rows)[:, None]  # [T, C]
            mask[0, 0] = np.where(visible, 0.0, -np.inf)

    def _extend(self, length: int) -> None:
        # Angles in fp32, as the models were trained, and cast last (transformers#25681).
        angles = np.arange(length, dtype=np.float32)[:, None] * self._inv_freq  # [length, Hd/2]
        self._cos = (np.cos(angles) * self._factor).astype(self._dtype)
        self._sin = (np.sin(angles) * self._factor).astype(self._dtype)
