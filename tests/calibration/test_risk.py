import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from eexport.calibration.risk import betting_p, binomial_p, fixed_sequence, least_prompts

Floats = NDArray[np.float64]


def test_binomial_by_hand() -> None:
    assert binomial_p(0, 100, 0.05) == pytest.approx(0.95**100)
    assert binomial_p(1, 3, 0.5) == pytest.approx(1 / 8 + 3 / 8)
    assert binomial_p(2, 10, 0.3) == pytest.approx(sum(math.comb(10, k) * 0.3**k * 0.7 ** (10 - k) for k in range(3)))
    assert binomial_p(10, 10, 0.3) == pytest.approx(1.0)
    assert binomial_p(0, 0, 0.3) == 1.0
    # Many prompts, where binomial coefficients leave the range of a float: half of the mass is up to the mean.
    assert binomial_p(2000, 4000, 0.5) == pytest.approx(0.5, abs=0.01)


def test_betting_by_hand() -> None:
    # Two prompts without a loss, budget 0.5, delta 0.05. The first bet rests on a variance of 1/4, the second on
    # (1/4 + (0 - 1/4)^2) / 2; both come to more than 1, which is the most.
    assert betting_p(np.zeros(2), 0.5, 0.05) == pytest.approx(1 / 1.5**2)
    # A hundred prompts make the first bets smaller than 1.
    first = math.sqrt(2 * math.log(20) / (100 * 0.25))
    second = math.sqrt(2 * math.log(20) / (100 * (0.25 + 0.25**2) / 2))
    assert second < 1
    # What follows the second prompt only loses, so the money was greatest after it.
    losses = np.array([0.0, 0.0] + [1.0] * 98)
    assert betting_p(losses, 0.1, 0.05) == pytest.approx(1 / ((1 + 0.1 * first) * (1 + 0.1 * second)))
    assert betting_p(np.ones(5), 0.1, 0.05) == 1.0
    assert betting_p(np.zeros(0), 0.1, 0.05) == 1.0


def _texts(generator: np.random.Generator, mean: float, count: int) -> Floats:
    """Shares of wrong tokens: most prompts lose nothing, some a lot."""
    rate = np.where(generator.random(count) < 0.2, generator.gamma(0.7, 5 * mean / 0.7, count), 0.0)
    return np.minimum(1.0, generator.poisson(150 * rate) / 150)


def _paired(generator: np.random.Generator, mean: float, count: int) -> Floats:
    """Lost and won answers; twice as many lost as ``mean``, half of them made up for."""
    return generator.choice([1.0, -1.0, 0.0], count, p=[2 * mean, mean, 1 - 3 * mean])


def _lost(generator: np.random.Generator, mean: float, count: int) -> Floats:
    return (generator.random(count) < mean).astype(float)


@pytest.mark.parametrize("draw", [_texts, _paired, _lost])
def test_a_broken_budget_is_rarely_confirmed(draw: Callable[[np.random.Generator, float, int], Floats]) -> None:
    generator, runs, budget = np.random.default_rng(1), 2000, 0.03
    samples = [draw(generator, 1.02 * budget, 300) for _ in range(runs)]
    found = [betting_p(losses, budget, 0.05) for losses in samples]
    if draw is _lost:
        found += [binomial_p(int(losses.sum()), 300, budget) for losses in samples]
    for level in (0.01, 0.05, 0.2):
        most = level + 3 * math.sqrt(level * (1 - level) / len(found))
        assert np.mean(np.array(found) <= level) <= most
    # A p-value that is always 1 would pass as well.
    assert np.mean([betting_p(draw(generator, 0.2 * budget, 600), budget, 0.05) <= 0.05 for _ in range(100)]) > 0.7


def _hoeffding_bentkus(losses: Floats, budget: float) -> float:
    count, mean = len(losses), float(losses.mean())
    if mean >= budget:
        return 1.0
    distance = (1 - mean) * math.log((1 - mean) / (1 - budget)) + (mean * math.log(mean / budget) if mean else 0.0)
    return min(math.exp(-count * distance), math.e * binomial_p(math.ceil(count * mean), count, budget))


def test_betting_needs_fewer_prompts_than_hoeffding_bentkus() -> None:
    generator = np.random.default_rng(2)
    samples = [_texts(generator, 0.015, 400) for _ in range(200)]
    assert np.mean([betting_p(losses, 0.03, 0.05) <= 0.05 for losses in samples]) > 0.85
    assert np.mean([_hoeffding_bentkus(losses, 0.03) <= 0.05 for losses in samples]) < 0.3


def test_a_sequence_stops_at_its_first_failure() -> None:
    asked = []

    def ask(value: float) -> float:
        asked.append(value)
        return value

    assert fixed_sequence(map(ask, [0.01, 0.05, 0.06, 0.001]), 0.05) == 2
    assert asked == [0.01, 0.05, 0.06]
    assert fixed_sequence([0.2, 0.0], 0.05) == 0
    assert fixed_sequence([], 0.05) == 0


@pytest.mark.parametrize(("budget", "needed"), [(0.001, 2995), (0.005, 598), (0.01, 299), (0.05, 59)])
def test_fewest_prompts_that_can_confirm_a_budget(budget: float, needed: int) -> None:
    assert least_prompts(budget, 0.05) == needed
    assert binomial_p(0, needed, budget) <= 0.05 < binomial_p(0, needed - 1, budget)
    # Bets cannot do with fewer, and need hardly more.
    assert betting_p(np.zeros(needed - 1), budget, 0.05) > 0.05
    assert betting_p(np.zeros(math.ceil(1.1 * needed)), budget, 0.05) <= 0.05
