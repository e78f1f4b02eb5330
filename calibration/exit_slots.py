"""Slots whose exits run as well: what every head, the predictor and the full model say at each row.

Legend: B slots, R rows, D hidden width, H heads, E of them exits, Vd draft vocabulary. Heads are in the order of their
depth, so a head at the full depth, which only drafts and is no exit, comes last.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from eexport.calibration.slots import Occupant, Slots, run_all
from eexport.runtime.backend import Backend, Buffer
from eexport.runtime.errors import EexportError
from eexport.runtime.manifest import Manifest, StageSpec


@dataclass(frozen=True, eq=False)
class ExitRows:
    """What is said of the next token at R rows.

    It depends on the tokens up to a row and on nothing else, so it holds under every exit rule that leads to them, as
    long as keys and values of the layers left out are recomputed exactly.

    Attributes:
        predicted: [R] int64 exit that the predictor names; E for full depth, also where there is no predictor.
        tokens: [R, H] int64 the likeliest token of each head.
        entropy: [R, H] float32 of each head over the draft vocabulary, in nats.
        final_tokens: [R] int64 the full model's likeliest token.
        final_entropy: [R] float32 of the full model, in nats.
    """

    predicted: NDArray[np.int64]
    tokens: NDArray[np.int64]
    entropy: NDArray[np.float32]
    final_tokens: NDArray[np.int64]
    final_entropy: NDArray[np.float32]

    def __len__(self) -> int:
        """R."""
        return len(self.predicted)

    def __getitem__(self, rows: slice) -> "ExitRows":
        """Some of the rows."""
        return ExitRows(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    @classmethod
    def join(cls, parts: Sequence["ExitRows"]) -> "ExitRows":
        """The rows of one or more one after the other."""
        return cls(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)})

    @property
    def agrees(self) -> NDArray[np.bool_]:
        """[R, H] whether a head's token is the full model's."""
        return np.asarray(self.tokens == self.final_tokens[:, None])


class ExitSlots(Slots):
    """Slots of a bundle with trained exits, which run at every row: a head needs its own keys of all of them.

    Attributes:
        depths: [H] layers run before each head.
        exits: E, the heads short of the full depth.
    """

    def __init__(self, folder: Path, manifest: Manifest, backend: Backend, slots: int, capacity: int) -> None:
        """Load all stages; see ``Slots``. Raises EexportError where the bundle has no exits."""
        if manifest.exits is None:
            raise EexportError(f"{folder}: has no trained exits: build it with a calibration")
        super().__init__(folder, manifest, backend, slots, capacity)
        heads, predictor = manifest.exits.heads, manifest.exits.predictor
        self.depths = tuple(head.layers[0] for head in heads)
        self.exits = len(manifest.exit_heads)
        self._draft_ids = np.load(folder / manifest.exits.draft_ids).astype(np.int64)
        self._previous = self._new(manifest.stages[0].outputs[0])
        self._exit_runs: list[Callable[[], None]] = []
        self.head_logits = [self._bind_exit(folder, head) for head in heads]
        self.predictor_logits = None if predictor is None else self._bind_exit(folder, predictor)

    def step(self, token_ids: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float32]:
        """See ``Slots.step``."""
        self._previous.array[...] = self._states[self.manifest.model.num_layers].array
        self._previous.array[self.lengths == 0] = 0
        logits = super().step(token_ids)
        for run in self._exit_runs:
            run()
        return logits

    def read(self, slots: Sequence[int]) -> ExitRows:
        """What the last step said in these R slots.

        Raises:
            EexportError: The activations are not finite.
        """
        places = list(slots)
        final_tokens, final_entropy = _likeliest(self._logits[places])
        heads = [_likeliest(logits[places]) for logits in self.head_logits]
        if not all(np.isfinite(entropy).all() for _, entropy in (*heads, (None, final_entropy))):
            raise EexportError(f"{self.manifest.model.name}: the activations are not finite: build the bundle again")
        tokens, entropy = (np.stack(column, axis=1) for column in zip(*heads, strict=True))
        if self.predictor_logits is None:
            predicted = np.full(len(places), self.exits)
        else:
            predicted = self.predictor_logits[places].argmax(axis=1)
        return ExitRows(predicted, self._draft_ids[tokens], entropy, final_tokens, final_entropy)

    def exit_seconds(self) -> list[float]:
        """What each head takes, then the predictor, run again on what the last step left."""
        seconds = []
        for run in self._exit_runs:
            began = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - began)
        return seconds

    def _bind_exit(self, folder: Path, stage: StageSpec) -> NDArray[np.float32]:
        """Its logits [B, Vd] or [B, E + 1], which every step writes."""
        logits = self._new(next(output for output in stage.outputs if output.name == "logits"))
        buffers = {source.name: self._source(source.name, stage.layers[0]) for source in stage.sources}
        if stage.kv_inputs:
            buffers |= {**self._positions, **self._new_caches(stage)}
        loaded = self._backend.load(folder / stage.graph, stage)
        self._exit_runs.append(loaded.bind({**buffers, "logits": logits}))
        return np.asarray(logits.array[:, 0], np.float32)

    def _source(self, name: str, depth: int) -> Buffer:
        """What a stage at ``depth`` reads under this name; see ``models.exits``."""
        if name == "previous":
            return self._previous
        if name == "embedding":
            return self._states[0]
        return self._states[depth if name == "hidden" else int(name.removeprefix("hidden."))]


class Listener(Occupant, Protocol):
    """A text that hears what is said after some of its tokens."""

    @property
    def asks(self) -> bool:
        """Whether it wants to know what is said after the token that it gave last."""
        ...

    def put(self, row: ExitRows) -> bool:
        """Hear what is said, in one row; True when it is done."""
        ...


T = TypeVar("T", bound=Listener)


def run_exits(slots: ExitSlots, texts: Iterable[T], done: Callable[[T], None]) -> None:
    """``run_all`` with exits; ``done`` is called with each text that is."""

    def hear(_: NDArray[np.float32], seats: list[tuple[int, T]]) -> Iterator[int]:
        asking = [(slot, text) for slot, text in seats if text.asks]
        rows = slots.read([slot for slot, _ in asking])
        for index, (slot, text) in enumerate(asking):
            if text.put(rows[index : index + 1]):
                done(text)
                yield slot

    run_all(slots, texts, hear)


def _likeliest(logits: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Place of the highest of logits [R, V], and the entropy of their distribution in nats, [R] each."""
    values = torch.from_numpy(logits)
    logprobs = torch.log_softmax(values, dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return values.argmax(-1).numpy(), entropy.clamp_min(0).numpy()
