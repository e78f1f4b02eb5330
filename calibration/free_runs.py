"""Texts that an exit rule lets run freely: each token is an exit's where the rule believes it, else the full model's.

The layers left out run all the same, so keys and values are exact, as with a KV fill of "recompute". Legend: N tokens
of an answer, E exits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eexport.calibration.exit_slots import ExitRows, ExitSlots, run_exits
from eexport.calibration.thresholds import never
from eexport.runtime.exits import ExitRule, exits_taken


@dataclass(frozen=True, eq=False)
class FreeRun:
    """An answer.

    Attributes:
        tokens: N of them, at least one; an end-of-text token is the last.
        depths: N layers that ran before each was out.
        tried: For how many of them an exit's head was asked.
        rows: What was said at the N places.
    """

    tokens: tuple[int, ...]
    depths: tuple[int, ...]
    tried: int
    rows: ExitRows


def run_freely(
    slots: ExitSlots,
    prompts: Sequence[Sequence[int]],
    rule: ExitRule | None,
    answer_tokens: int,
    progress: Callable[[int, int], None],
) -> list[FreeRun]:
    """Answer prompts greedily under a rule.

    Args:
        slots: A prompt and its answer fit in one.
        prompts: Token ids, one or more each.
        rule: When to leave at which of the slots' exits; None for never.
        answer_tokens: Most tokens of an answer, at least one.
        progress: Called with (done, total) prompts.

    Raises:
        EexportError: The activations are not finite.
        ValueError: The rule is for another number of exits.
    """
    rule = _rule(slots, rule)
    eos = frozenset(slots.manifest.model.eos_token_ids)
    answers = [_Answer(prompt, rule, answer_tokens, eos) for prompt in prompts]
    finished = 0

    def done(_: _Answer) -> None:
        nonlocal finished
        finished += 1
        progress(finished, len(answers))

    run_exits(slots, answers, done)
    return [_run(slots, answer.rows, rule) for answer in answers]


def run_again(
    slots: ExitSlots,
    prompts: Sequence[Sequence[int]],
    runs: Sequence[FreeRun],
    rule: ExitRule | None,
    answer_tokens: int,
    progress: Callable[[int, int], None],
) -> list[FreeRun]:
    """What ``run_freely`` gives, faster: from ``runs`` of the same prompts and length under another rule.

    What is said at a place depends on the tokens before it alone. So a run in which ``rule`` would have picked the very
    same tokens stands, and only the others, of which a careful rule makes few, are run.
    """
    rule = _rule(slots, rule)
    found = {i: again for i, run in enumerate(runs) if (again := _run(slots, run.rows, rule)).tokens == run.tokens}
    rest = [i for i in range(len(runs)) if i not in found]
    found |= zip(rest, run_freely(slots, [prompts[i] for i in rest], rule, answer_tokens, progress), strict=True)
    return [found[i] for i in range(len(runs))]


class _Answer:
    """An answer being given to a prompt; its ``rows`` when it is done."""

    def __init__(self, prompt: Sequence[int], rule: ExitRule, most: int, eos: frozenset[int]) -> None:
        self._tokens, self._first, self._most = list(prompt), len(prompt), most
        self._rule, self._eos = rule, eos
        self._given, self._previous = 0, 0.0  # the first token may leave, as after one that was certain
        self._rows: list[ExitRows] = []

    @property
    def asks(self) -> bool:
        return self._given == len(self._tokens)

    def take(self) -> int:
        self._given += 1
        return self._tokens[self._given - 1]

    def put(self, row: ExitRows) -> bool:
        self._rows.append(row)
        token, self._previous = self._choose(row)
        self._tokens.append(token)
        if token not in self._eos and len(self._tokens) - self._first < self._most:
            return False
        self.rows = ExitRows.join(self._rows)
        self._rows.clear()
        return True

    def _choose(self, row: ExitRows) -> tuple[int, float]:
        """The next token, and the entropy of what it comes from."""
        place = int(row.predicted[0])
        entropy = float(row.entropy[0, place]) if place < len(self._rule.entropy) else 0.0
        if self._rule.leaves(place, entropy, self._previous):
            return int(row.tokens[0, place]), entropy
        return int(row.final_tokens[0]), float(row.final_entropy[0])


def _rule(slots: ExitSlots, rule: ExitRule | None) -> ExitRule:
    if rule is None:
        return never(slots.exits)
    if len(rule.entropy) != slots.exits:
        raise ValueError(f"a rule for {len(rule.entropy)} exits, where there are {slots.exits}")
    return rule


def _run(slots: ExitSlots, rows: ExitRows, rule: ExitRule) -> FreeRun:
    """What ``rule`` makes of these rows, one token from each."""
    exits, count = len(rule.entropy), len(rows)
    taken = exits_taken(rule, rows.predicted, rows.entropy[:, :exits], rows.final_entropy, [count])
    place, places = np.where(taken, rows.predicted, exits), np.arange(count)  # E is the full model's
    tokens = np.column_stack((rows.tokens[:, :exits], rows.final_tokens))[places, place]
    entropy = np.column_stack((rows.entropy[:, :exits], rows.final_entropy))[places, place]
    depths = np.array((*slots.depths[:exits], slots.manifest.model.num_layers))[place]
    believable = np.array((*rule.entropy, 0.0))[rows.predicted] > 0
    previous = np.concatenate(([0.0], entropy[:-1]))
    tried = int((believable & (previous <= rule.previous)).sum())
    return FreeRun(_tuple(tokens), _tuple(depths), tried, rows)


def _tuple(values: NDArray[np.int64]) -> tuple[int, ...]:
    return tuple(values.tolist())
