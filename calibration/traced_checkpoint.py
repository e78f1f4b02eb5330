"""Every layer of a checkpoint, in fp32 torch: several sequences at once, padded on the left."""

from collections.abc import Sequence

import torch
from torch import Tensor

from eexport.calibration.traced import SLOTS, Floats, check_finite
from eexport.models.checkpoint import Checkpoint
from eexport.models.decoder import Decoder, LayerKV, rms_norm, rope_tables
from eexport.runtime.errors import EexportError

_GRAM_ROWS = 8192  # of the head at a time, while its Gram matrix is summed
WIDTH = 32


class _RoomyKV(LayerKV):
    """A cache with room to grow, written in place: appending by concatenation would copy it for every token."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room = room
        self._buffers: list[Tensor] = []
        self._length = 0

    @property
    def length(self) -> int:
        return self._length

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        start, self._length = self._length, self._length + key.shape[2]
        if not self._buffers:
            size = (*key.shape[:2], self._length + self._room, key.shape[3])
            self._buffers = [torch.empty(size), torch.empty(size)]
        for buffer, new in zip(self._buffers, (key, value), strict=True):
            buffer[:, :, start : self._length] = new
        keys, values = (buffer[:, :, : self._length] for buffer in self._buffers)
        return keys, values

    def trim(self, count: int) -> None:
        self._length -= count

    def keep(self, rows: Tensor) -> None:
        """Drop the other sequences."""
        self._buffers = [buffer[rows] for buffer in self._buffers]


class CheckpointModel:
    """A ``TracedModel`` over a checkpoint; see ``traced.TracedModel``."""

    form = "checkpoint, fp32"

    def __init__(
        self,
        checkpoint: Checkpoint,
        identity: str,
        *,
        width: int = WIDTH,
        slots: int = SLOTS,
        threads: int | None = None,
    ) -> None:
        """Read the whole model into memory; ``threads`` is torch's setting, of the whole process."""
        if threads is not None:
            torch.set_num_threads(threads)
        spec = checkpoint.spec
        self.name, self.identity = checkpoint.source["name"], identity
        self.num_layers = spec.num_layers
        self.depths = tuple(range(1, spec.num_layers + 1))
        self.eos_token_ids = frozenset(spec.eos_token_ids)
        self.context_length = spec.context_length
        self.width, self.slots = width, slots
        self._decoder = Decoder.from_weights(spec, checkpoint.weights)
        self._gram = _gram(self._decoder.head_weight)
        self._kv: list[_RoomyKV] = []
        self._padding = torch.zeros(0, dtype=torch.long)  # [R] rows of padding before each sequence

    def start(self, sequences: Sequence[Sequence[int]], room: int) -> Floats:
        """See ``TracedModel.start``."""
        longest = max(map(len, sequences))
        self._padding = torch.tensor([longest - len(ids) for ids in sequences])
        ids = torch.zeros(len(sequences), longest, dtype=torch.long)
        for row, sequence in zip(ids, sequences, strict=True):
            row[longest - len(sequence) :] = torch.tensor(sequence)
        self._kv = [_RoomyKV(room) for _ in range(self.num_layers)]
        return self._forward(ids)

    def step(self, tokens: Sequence[int]) -> Floats:
        """See ``TracedModel.step``."""
        return self._forward(torch.tensor(tokens)[:, None])

    def keep(self, rows: Sequence[int]) -> None:
        """See ``TracedModel.keep``."""
        index = torch.tensor(rows, dtype=torch.long)
        self._padding = self._padding[index]
        for kv in self._kv:
            kv.keep(index)

    def logits(self, hidden: Floats) -> Floats:
        """See ``TracedModel.logits``."""
        with torch.inference_mode():
            logits: Floats = self._decoder.head(torch.from_numpy(hidden)).numpy()
        return logits

    def logit_cosine(self, hidden: Floats) -> Floats:
        """See ``TracedModel.logit_cosine``: from the head's Gram matrix G, as (Wa)·(Wb) = a·Gb; no logits are made."""
        with torch.inference_mode():
            normed = rms_norm(
                torch.from_numpy(hidden), self._decoder.norm_weight, self._decoder.spec.rms_norm_eps
            ).double()  # [R, P, D]
            seen = normed @ self._gram
            norms = (normed * seen).sum(-1).sqrt()
            cosines = (seen * normed[:, -1:]).sum(-1) / (norms * norms[:, -1:]).clamp_min(1e-300)
        result: Floats = cosines.float().numpy()
        return result

    def _forward(self, ids: Tensor) -> Floats:
        """Hidden states [R, P, D] after each layer at the last of the new tokens [R, T]."""
        try:
            result = self._hidden_states(ids)
        except RuntimeError as error:
            if "allocate" not in str(error):
                raise
            raise EexportError(
                f"out of memory with {len(ids)} sequences: give smaller --prompt-tokens or --tokens"
            ) from None
        check_finite(result, self.depths, self.name)
        return result

    def _hidden_states(self, ids: Tensor) -> Floats:
        with torch.inference_mode():
            past, new = self._kv[0].length, ids.shape[1]
            places = torch.arange(past + new)  # [S]
            positions = (places[past:] - self._padding[:, None]).clamp_min(0)  # [R, T]
            causal = places <= places[past:, None]  # [T, S]
            # A row of padding sees itself, as a softmax over nothing would be NaN.
            real = (places >= self._padding[:, None])[:, None] | (places == places[past:, None])  # [R, T, S]
            visible = (causal & real)[:, None]  # [R, 1, T, S]
            cos, sin = rope_tables(self._decoder.spec.rope, positions)
            hidden, states = self._decoder.embed(ids), []
            for layer, kv in zip(self._decoder.layers, self._kv, strict=True):
                hidden = layer(hidden, cos, sin, kv, visible)
                states.append(hidden[:, -1].clone())  # a view would keep every row of every layer
            result: Floats = torch.stack(states, dim=1).numpy()
        return result


def _gram(head: Tensor) -> Tensor:
    """WᵀW [D, D] in fp64 of a head W [V, D]."""
    total = torch.zeros(head.shape[1], head.shape[1], dtype=torch.float64)
    for part in torch.split(head, _GRAM_ROWS):
        wide = part.double()
        total += wide.T @ wide
    return total
