"""95% intervals that stay honest for few prompts: a loss that was never seen is bounded, not excluded."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_Z = 1.959964  # 97.5% of the normal distribution
_FEW = (12.706, 4.303, 3.182, 2.776, 2.571)  # and of Student's t with 1 to 5 degrees of freedom


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95% interval."""

    value: float
    low: float
    high: float


def share(count: int, total: int) -> Interval:
    """A proportion, by Wilson's score interval (1927)."""
    p, z2 = count / total, _Z * _Z
    centre = (p + z2 / (2 * total)) / (1 + z2 / total)
    half = _Z / (1 + z2 / total) * math.sqrt(p * (1 - p) / total + z2 / (4 * total * total))
    return Interval(p, max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half)))


def paired_loss(before: NDArray[np.bool_], after: NDArray[np.bool_]) -> Interval:
    """How much lower the share of successes is after than before, on the same prompts [N].

    The difference between the shares that were lost and won, each with Wilson's interval, combined by the method of
    variance estimates recovery (Zou and Donner 2008) with the correlation that two counts of the same N have. With no
    changed prompt it is still about ±4/N.
    """
    lost, won = (share(int(count), len(before)) for count in ((before & ~after).sum(), (after & ~before).sum()))
    rest = (1 - lost.value) * (1 - won.value)
    correlation = -math.sqrt(lost.value * won.value / rest) if rest > 0 else 0.0

    def reach(towards: float, away: float) -> float:
        return math.sqrt(max(0.0, towards**2 + away**2 - 2 * correlation * towards * away))

    value = lost.value - won.value
    return Interval(
        value,
        value - reach(lost.value - lost.low, won.high - won.value),
        value + reach(lost.high - lost.value, won.value - won.low),
    )


def mean(values: Sequence[float]) -> Interval:
    """A mean over prompts, by Student's t; without bounds (infinite) for a single prompt."""
    average = float(np.mean(values))
    if len(values) < 2:
        return Interval(average, -math.inf, math.inf)
    half = _student(len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Interval(average, average - half, average + half)


def _student(freedom: int) -> float:
    """97.5% of Student's t: exact to three digits (Hill's expansion beyond the first few degrees of freedom)."""
    if freedom <= len(_FEW):
        return _FEW[freedom - 1]
    z = _Z
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def prompts_needed(budget: float) -> int:
    """How many prompts an interval takes that confirms a loss under ``budget`` (a share) when none is lost."""
    return math.ceil(_Z * _Z * (1 - budget) / budget)
