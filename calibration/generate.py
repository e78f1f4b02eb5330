"""Self-distillation data: prompts in, the model's own greedy answers and its hidden states out.

Texts are written by many slots side by side (``slots``). A prompt may be but the beginning of a user's message, which
the model then completes by sampling before it answers (``synthesis``).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from eexport.calibration.corpus import TOP, Corpus, Split, Text, TextInfo
from eexport.calibration.data import prompt_key
from eexport.calibration.slots import Slots, run_all
from eexport.runtime.errors import EexportError

SHARD = 128
"""Texts of a shard; an interruption loses those that are not in one yet."""

_TWENTIETHS: tuple[Split, ...] = (*("train",) * 13, *("predictor",) * 2, *("tune",) * 3, *("test",) * 2)
_TEMPERATURE, _TOP_P, _CANDIDATES = 0.8, 0.95, 50  # of prompts that the model writes: varied, and still prompts


@dataclass(frozen=True)
class Job:
    """A text to be written.

    Attributes:
        kind: As ``TextInfo.kind``.
        source: As ``TextInfo.source``.
        ids: Token ids to begin with.
        first: As ``TextInfo.first``.
        closing: What closes a user's message that the model is to complete; empty where the prompt is whole.
        seed: Of that sampling.
        split: What the text is for, and any other with the same prompt; None divides by the prompt's hash.
    """

    kind: str
    source: str
    ids: tuple[int, ...]
    first: int
    closing: tuple[int, ...] = ()
    seed: int = 0
    split: Split | None = None


@dataclass(frozen=True)
class Lengths:
    """Most tokens of an answer, and of what the model adds to a prompt's beginning."""

    answer: int = 160
    message: int = 72


def divide(key: str) -> Split:
    """What a text is for, 65:10:15:10, by its prompt's hash: equal prompts never part."""
    return _TWENTIETHS[int(key[:8], 16) % 20]


def generate(
    slots: Slots, jobs: Sequence[Job], corpus: Corpus, lengths: Lengths, progress: Callable[[int, int], None]
) -> None:
    """Write the texts of ``jobs`` into ``corpus``, going on where it ends; ``progress(done, total)`` counts texts.

    A text does not depend on the others, so an interruption changes nothing.

    Raises:
        EexportError: The activations are not finite, or the disk is full.
    """
    eos = frozenset(slots.manifest.model.eos_token_ids)
    # A prompt has the split of the first job that is given it, also where the model writes it as another kind.
    given = [job for job in reversed(jobs) if not job.closing]
    reserved = {job.ids: job.split or divide(prompt_key(job.kind, job.ids)) for job in given}
    begin = len(corpus)
    left = (_Writer(number, job, lengths, eos) for number, job in list(enumerate(jobs))[begin:])
    finished: dict[int, Text] = {}
    depths = sorted(slots.hidden)

    def hear(logits: NDArray[np.float32], seats: list[tuple[int, _Writer]]) -> Iterator[int]:
        nonlocal begin
        rows = _rows(torch.from_numpy(logits))
        states = {depth: _bfloat16(slots.hidden[depth]) for depth in depths}
        if not np.isfinite(rows.entropy).all():
            raise EexportError(
                f"{slots.manifest.model.name}: the activations are not finite: the checkpoint is damaged"
            )
        for slot, writer in seats:
            if writer.put(rows, states, slot):
                finished[writer.number] = writer.text(reserved)
                yield slot
        begin = _flush(finished, begin, len(jobs), corpus)
        progress(begin + len(finished), len(jobs))

    run_all(slots, left, hear)


@dataclass(frozen=True)
class _Rows:
    """What the head said of the B rows of a step."""

    ids: NDArray[np.int32]  # [B, 50] candidates, best first
    logprobs: NDArray[np.float32]  # [B, 50]
    entropy: NDArray[np.float32]  # [B]


@dataclass
class _Writer:
    """A text being written."""

    number: int
    job: Job
    lengths: Lengths
    eos: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    answer: int = 0
    columns: list[tuple[NDArray[np.int32], NDArray[np.float16], np.float32]] = field(default_factory=list)
    states: list[dict[int, NDArray[np.uint16]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._forced = list(self.job.ids)
        self._added = 0
        self._completing = bool(self.job.closing)
        self._random = np.random.default_rng(self.job.seed)

    def take(self) -> int:
        """The token to run next."""
        self.tokens.append(self._forced.pop(0))
        return self.tokens[-1]

    def put(self, rows: _Rows, states: dict[int, NDArray[np.uint16]], slot: int) -> bool:
        """Record what its row gave and choose the next token; True when the text is complete."""
        top = slice(0, TOP)
        self.columns.append(
            (rows.ids[slot, top].copy(), rows.logprobs[slot, top].astype(np.float16), rows.entropy[slot])
        )
        self.states.append({depth: hidden[slot].copy() for depth, hidden in states.items()})
        if self._forced:
            return False
        if self._completing:
            self._complete(rows.ids[slot], rows.logprobs[slot])
            return False
        if not self.answer:
            self.answer = len(self.tokens)
        likeliest = int(rows.ids[slot, 0])
        if likeliest in self.eos or len(self.tokens) - self.answer == self.lengths.answer:
            return True
        self._forced.append(likeliest)
        return False

    def text(self, reserved: Mapping[tuple[int, ...], Split]) -> Text:
        ids, logprobs, entropy = zip(*self.columns, strict=True)
        prompt = tuple(self.tokens[: self.answer])
        key = prompt_key(self.job.kind, prompt)
        split = reserved.get(prompt) or divide(key)
        info = TextInfo(
            key, self.job.kind, self.job.source, split, self.job.first, self.answer, length=len(self.tokens)
        )
        hidden = {depth: np.stack([states[depth] for states in self.states]) for depth in self.states[0]}
        tokens = np.array(self.tokens, np.int32)
        return Text(info, tokens, hidden, np.stack(ids), np.stack(logprobs), np.array(entropy, np.float32))

    def _complete(self, ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> None:
        """One more token of the user's message, or its end."""
        weights = np.exp((logprobs - logprobs[0]) / _TEMPERATURE)
        weights /= weights.sum()
        kept = int(np.searchsorted(weights.cumsum(), _TOP_P)) + 1
        weights = weights[:kept] / weights[:kept].sum()
        token = int(self._random.choice(ids[:kept], p=weights))
        self._added += 1
        if token in self.eos or token == self.job.closing[0] or self._added == self.lengths.message:
            self._forced += self.job.closing
            self._completing = False
        else:
            self._forced.append(token)


def _rows(logits: torch.Tensor) -> _Rows:
    logprobs = torch.log_softmax(logits, dim=-1)
    values, ids = logprobs.topk(min(_CANDIDATES, logits.shape[-1]))
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return _Rows(ids.int().numpy(), values.numpy(), entropy.numpy())


def _bfloat16(hidden: NDArray[np.generic]) -> NDArray[np.uint16]:
    bits: NDArray[np.uint16] = torch.from_numpy(hidden).bfloat16().view(torch.int16).numpy().view(np.uint16)
    return bits


def _flush(finished: dict[int, Text], begin: int, total: int, corpus: Corpus) -> int:
    """Write every shard whose texts are all there; the number of the first text that is in none."""
    while begin < total:
        numbers = range(begin, min(begin + SHARD, total))
        if not all(number in finished for number in numbers):
            break
        corpus.append([finished.pop(number) for number in numbers])
        begin = numbers.stop
    return begin
