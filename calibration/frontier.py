"""Accuracy against skipped layers: what oracles lose on real tasks, and how much of it is certain.

Per threshold: the share of layers that the oracle's tokens would have left out, and what became of the answers,
compared prompt by prompt with the full model's own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eexport.calibration.decode import FULL, Written
from eexport.calibration.intervals import Interval, mean, paired_loss, share

BUDGETS = ("0.5pp", "1pp", "5pp", "5%rel")
"""Accuracy that may be lost: in percentage points, or as a share of the full model's accuracy."""


@dataclass(frozen=True)
class Scored:
    """One prompt: whether each policy's answer is right (None: not scored), and the paths themselves."""

    correct: dict[int, bool | None]
    paths: dict[int, Written]


@dataclass(frozen=True)
class Point:
    """One threshold; losses are shares (0.01 is a percentage point), divergence and surprise nats a token."""

    threshold: float
    skip: float
    same_text: float
    accuracy: Interval | None
    loss: Interval | None
    divergence: Interval
    surprise: Interval
    perplexity: float


@dataclass(frozen=True)
class Budget:
    """The most skipping within a budget: threshold chosen on one half, ``skip`` and ``loss`` from the other.

    ``confirmed``: whether the 95% interval of the loss lies within the budget as well. ``threshold`` is the choice
    on all prompts; None if none fits.
    """

    budget: str
    allowed: float
    threshold: float | None
    skip: float
    loss: Interval
    confirmed: bool


@dataclass(frozen=True)
class Frontier:
    """Points by falling threshold, and budgets where answers are scored."""

    prompts: int
    scored: int
    accuracy: Interval | None
    perplexity: float
    points: tuple[Point, ...]
    budgets: tuple[Budget, ...]


def frontier(
    prompts: Sequence[Scored], thresholds: Sequence[float], depths: Sequence[int], num_layers: int
) -> Frontier:
    """The frontier of prompts of one kind, one or more of them."""
    scored = [prompt for prompt in prompts if prompt.correct[FULL] is not None]
    points = tuple(
        _point(prompts, scored, policy, thresholds[policy], depths, num_layers)
        for policy in sorted(range(len(thresholds)), key=lambda policy: -thresholds[policy])
    )
    before = _correct(scored, FULL)
    surprise = [float(np.mean(prompt.paths[FULL].surprise)) for prompt in prompts]
    return Frontier(
        prompts=len(prompts),
        scored=len(scored),
        accuracy=share(int(before.sum()), len(before)) if scored else None,
        perplexity=math.exp(float(np.mean(surprise))),
        points=points,
        budgets=tuple(_budget(scored, text, thresholds, depths, num_layers) for text in BUDGETS) if scored else (),
    )


def allowed_loss(budget: str, accuracy: float) -> float:
    """A budget such as "0.5pp" or "5%rel" as a share, for a model of this accuracy."""
    if budget.endswith("pp"):
        return float(budget.removesuffix("pp")) / 100
    return float(budget.removesuffix("%rel")) / 100 * accuracy


def skipped(paths: Sequence[Written], depths: Sequence[int], num_layers: int) -> float:
    """Share of layers left out over all tokens of ``paths``."""
    exits = np.concatenate([np.asarray(path.exits, np.int64) for path in paths])
    return float(1 - np.asarray(depths)[exits].mean() / num_layers)


def _point(
    prompts: Sequence[Scored],
    scored: Sequence[Scored],
    policy: int,
    threshold: float,
    depths: Sequence[int],
    num_layers: int,
) -> Point:
    paths = [prompt.paths[policy] for prompt in prompts]
    after = _correct(scored, policy)
    surprise = mean([float(np.mean(path.surprise)) for path in paths])
    return Point(
        threshold=threshold,
        skip=skipped(paths, depths, num_layers),
        same_text=float(np.mean([p.paths[policy].tokens == p.paths[FULL].tokens for p in prompts])),
        accuracy=share(int(after.sum()), len(after)) if scored else None,
        loss=paired_loss(_correct(scored, FULL), after) if scored else None,
        divergence=mean([float(np.mean(path.divergence)) for path in paths]),
        surprise=surprise,
        perplexity=math.exp(surprise.value),
    )


def _budget(
    scored: Sequence[Scored], budget: str, thresholds: Sequence[float], depths: Sequence[int], num_layers: int
) -> Budget:
    before = _correct(scored, FULL)
    allowed = allowed_loss(budget, float(before.mean()))

    def choose(part: Sequence[Scored]) -> int:
        """The policy that skips most within the budget; the full model where no oracle is."""
        fitting = [FULL] + [
            policy
            for policy in range(len(thresholds))
            if paired_loss(_correct(part, FULL), _correct(part, policy)).value <= allowed + 1e-12
        ]
        return max(fitting, key=lambda policy: skipped([p.paths[policy] for p in part], depths, num_layers))

    halves = (scored[::2], scored[1::2]) if len(scored) > 1 else (scored, scored)
    chosen = [choose(half) for half in halves[::-1]]
    judged = [(prompt, policy) for half, policy in zip(halves, chosen, strict=True) for prompt in half]
    after = np.array([bool(prompt.correct[policy]) for prompt, policy in judged])
    full = np.array([bool(prompt.correct[FULL]) for prompt, _ in judged])
    overall = choose(scored)
    loss = paired_loss(full, after)
    return Budget(
        budget=budget,
        allowed=allowed,
        threshold=None if overall == FULL else thresholds[overall],
        skip=skipped([prompt.paths[policy] for prompt, policy in judged], depths, num_layers),
        loss=loss,
        confirmed=loss.high <= allowed,
    )


def _correct(prompts: Sequence[Scored], policy: int) -> NDArray[np.bool_]:
    return np.array([bool(prompt.correct[policy]) for prompt in prompts], dtype=bool)
