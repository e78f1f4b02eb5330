"""Thresholds with a stated risk: Learn-then-Test (Angelopoulos et al. 2021, arXiv:2110.01052).

A candidate is kept if the hypothesis that it loses more than the budget is rejected. Its p-value comes from the losses
of prompts that had no part in making the candidates. The unit is the prompt: the tokens of a text depend on each other.
The p-values hold for any number of prompts and any distribution of losses; they assume that the prompts are independent
draws from the source that will be met later.
"""

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


def binomial_p(lost: int, prompts: int, budget: float) -> float:
    """P-value of "a prompt is lost with a probability over ``budget``", exact.

    The chance of at most ``lost`` losses among ``prompts`` at exactly that probability.
    """
    at = np.arange(lost)
    steps = np.log((prompts - at) / (at + 1)) + math.log(budget / (1 - budget))  # from one count to the next
    logs = prompts * math.log1p(-budget) + np.concatenate(([0.0], np.cumsum(steps)))
    return min(1.0, float(np.exp(logs).sum()))


def betting_p(losses: NDArray[np.floating], budget: float, delta: float) -> float:
    """P-value of "the mean loss is over ``budget``", for losses that are not just 0 or 1.

    Someone bets against the hypothesis, prompt by prompt, with money that does not grow on average while it holds: the
    chance that it ever grows k-fold is at most 1/k. The bets are the predictable plug-in of Waudby-Smith and Ramdas
    (2024, JRSS B 86) in the form of Bates et al. (2021, J. ACM 68, proposition 5). Shares of wrong tokens vary little
    between prompts, which this uses and the bound of Hoeffding and Bentkus does not.

    Args:
        losses: [n] at most 1 each, in random order; gains are negative, as in the change of a paired score.
        budget: Over 0, under 1.
        delta: The level that the bets are sized for; the p-value is valid at every level.
    """
    count = 1 + np.arange(len(losses))
    means = (0.5 + np.cumsum(losses)) / (1 + count)
    variances = (0.25 + np.cumsum((losses - means) ** 2)) / (1 + count)
    known = np.concatenate(([0.25], variances))[: len(losses)]  # before the prompt that is bet on
    bets = np.minimum(1.0, np.sqrt(2 * math.log(1 / delta) / (len(losses) * known)))
    growth = np.cumsum(np.log1p(bets * (budget - losses)))
    return math.exp(-max(0.0, float(np.max(growth, initial=0.0))))


def fixed_sequence(p_values: Iterable[float], delta: float) -> int:
    """How many candidates hold, from the first on: it stops at the first whose p-value is over ``delta``.

    In an order that was fixed beforehand, the chance that any one held breaks its budget is at most ``delta``. What
    follows the first failure is not looked at.
    """
    held = 0
    for p_value in p_values:
        if p_value > delta:
            break
        held += 1
    return held


def least_prompts(budget: float, delta: float) -> int:
    """Fewest prompts that can confirm ``budget`` at all: with fewer, even no loss at all proves nothing."""
    return math.ceil(math.log(delta) / math.log1p(-budget))
