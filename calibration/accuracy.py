"""What a rule does to accuracy, measured: the same prompts answered in full and under the rule, and both scored."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eexport.calibration.data import Encoded
from eexport.calibration.exit_records import ExitRecord
from eexport.calibration.exit_slots import ExitSlots
from eexport.calibration.free_runs import FreeRun, run_again, run_freely
from eexport.calibration.intervals import Interval, paired_loss
from eexport.calibration.tasks import score
from eexport.runtime.console import Progress
from eexport.runtime.exits import ExitRule


class Marker:
    """Says whether answers are right. Equal answers to a prompt are judged once, as running code takes time."""

    def __init__(self, decode: Callable[[Sequence[int]], str], run_code: bool) -> None:
        """``decode`` makes text of tokens; code that the model wrote is run to be scored only with ``run_code``."""
        self._decode, self._run_code = decode, run_code
        self._known: dict[tuple[str, str], float] = {}

    def __call__(self, prompt: Encoded, tokens: Sequence[int]) -> float:
        """1 where an answer is right, 0 where not, NaN where that cannot be said.

        Raises:
            EexportError: Code cannot be run within limits on this system.
        """
        if prompt.cut:  # the question may have lost what its answer needs
            return np.nan
        text = self._decode(tokens)
        key = (prompt.hash, text)
        if key not in self._known:
            right = score(prompt.prompt, text, self._run_code)
            self._known[key] = np.nan if right is None else float(right)
        return self._known[key]


@dataclass(frozen=True, eq=False)
class Answers:
    """Answers to P prompts.

    Attributes:
        runs: P of them.
        correct: [P] as ``Marker`` says.
    """

    runs: list[FreeRun]
    correct: NDArray[np.float64]


@dataclass(frozen=True)
class Change:
    """What a rule does to the answers of some prompts. Shares are of tokens under the rule unless said otherwise.

    Attributes:
        prompts: How many.
        tokens: Those of their answers, end-of-text tokens among them.
        tried: Share for which an exit's head was asked.
        left: Share that left early.
        by_exit: Share that left at each exit, shallowest first.
        layers: Mean layers run before a token was out.
        same: Share of the prompts with the very same answer.
        scored: Prompts whose answers could be scored.
        before: Share of these that are right in full; None where there are none.
        after: The same under the rule.
        accuracy: Change of that in percentage points, under 0 for a loss; with a paired 95% interval.
    """

    prompts: int
    tokens: int
    tried: float
    left: float
    by_exit: tuple[float, ...]
    layers: float
    same: float
    scored: int
    before: float | None
    after: float | None
    accuracy: Interval | None


@dataclass(frozen=True)
class Changes:
    """Of all prompts together, of each kind, and of each source: a file's name, or "built-in"."""

    all: Change
    kinds: dict[str, Change]
    sources: dict[str, Change]


def measure_rules(
    slots: ExitSlots,
    prompts: Sequence[Encoded],
    rules: Mapping[str, ExitRule],
    answer_tokens: int,
    mark: Marker,
    progress: Progress,
) -> tuple[Answers, dict[str, Changes]]:
    """Answer prompts in full and under each rule.

    Args:
        slots: A prompt and its answer fit in one.
        prompts: One or more.
        rules: By the name that they are reported under.
        answer_tokens: Most tokens of an answer.
        mark: Scores the answers.
        progress: Called with (what, done, total).

    Returns:
        The answers in full, and what each rule changes, by its name.

    Raises:
        EexportError: The activations are not finite, or code cannot be run within limits on this system.
    """
    ids = [prompt.ids for prompt in prompts]

    def marked(runs: list[FreeRun]) -> Answers:
        return Answers(runs, np.array([mark(p, run.tokens) for p, run in zip(prompts, runs, strict=True)]))

    def at(what: str) -> Callable[[int, int], None]:
        return lambda done, total: progress(what, done, total)

    full = marked(run_freely(slots, ids, None, answer_tokens, at("answering in full")))
    changes = {}
    for name, rule in rules.items():
        runs = run_again(slots, ids, full.runs, rule, answer_tokens, at(f"answering at {name}"))
        changes[name] = compare(prompts, full, marked(runs), slots.depths[: slots.exits])
    return full, changes


def full_record(slots: ExitSlots, prompts: Sequence[Encoded], answers: Answers) -> ExitRecord:
    """What exits say on answers given in full; with ``Answers.correct`` thresholds can be judged on it."""
    return ExitRecord.of(slots, [run.rows for run in answers.runs], [prompt.prompt.kind for prompt in prompts])


def compare(prompts: Sequence[Encoded], full: Answers, ruled: Answers, exits: Sequence[int]) -> Changes:
    """What changes from answers given in full to those under a rule; ``exits`` are the exits' depths."""
    kinds = [prompt.prompt.kind for prompt in prompts]
    sources = [prompt.prompt.source.rpartition(":")[0] for prompt in prompts]

    def of(chosen: Sequence[int]) -> Change:
        return _change(_pick(full, chosen), _pick(ruled, chosen), exits)

    def by(names: Sequence[str]) -> dict[str, Change]:
        return {name: of([i for i, other in enumerate(names) if other == name]) for name in sorted(set(names))}

    return Changes(of(range(len(prompts))), by(kinds), by(sources))


def _pick(answers: Answers, chosen: Sequence[int]) -> Answers:
    return Answers([answers.runs[i] for i in chosen], answers.correct[list(chosen)])


def _change(full: Answers, ruled: Answers, exits: Sequence[int]) -> Change:
    depths = np.concatenate([run.depths for run in ruled.runs])
    scored = ~np.isnan(full.correct) & ~np.isnan(ruled.correct)
    before, after = full.correct[scored] == 1, ruled.correct[scored] == 1
    by_exit = [float((depths == depth).mean()) for depth in exits]
    same = [one.tokens == other.tokens for one, other in zip(full.runs, ruled.runs, strict=True)]
    any_scored = bool(scored.any())
    return Change(
        prompts=len(ruled.runs),
        tokens=len(depths),
        tried=sum(run.tried for run in ruled.runs) / len(depths),
        left=sum(by_exit),
        by_exit=tuple(by_exit),
        layers=float(depths.mean()),
        same=float(np.mean(same)),
        scored=int(scored.sum()),
        before=float(before.mean()) if any_scored else None,
        after=float(after.mean()) if any_scored else None,
        accuracy=_points(paired_loss(before, after)) if any_scored else None,
    )


def _points(loss: Interval) -> Interval:
    """A loss of shares as a gain in percentage points."""
    return Interval(0.0 - 100 * loss.value, -100 * loss.high, -100 * loss.low)
