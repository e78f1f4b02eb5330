import math

import numpy as np
import pytest

from eexport.calibration.intervals import mean, paired_loss, prompts_needed, share


def test_wilson_against_published_values() -> None:
    # Newcombe (1998), table I: 81 of 263 and 0 of 20, 95%.
    found = share(81, 263)
    assert (found.value, found.low, found.high) == pytest.approx((0.3080, 0.2553, 0.3662), abs=5e-5)
    assert (share(0, 20).low, share(0, 20).high) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert share(20, 20).high == 1.0


def test_nothing_lost_is_not_nothing_to_lose() -> None:
    same = np.ones(50, bool)
    loss = paired_loss(same, same)
    assert loss.value == 0
    assert loss.high == pytest.approx(3.84 / 53.84, abs=1e-3)
    assert loss.low == pytest.approx(-loss.high)


def test_paired_loss_counts_changed_prompts_only() -> None:
    before = np.array([True] * 60 + [False] * 40)
    after = before.copy()
    after[:10] = False  # ten lost
    after[60:64] = True  # four won
    loss = paired_loss(before, after)
    assert loss.value == pytest.approx(0.06)
    lost, won = share(10, 100), share(4, 100)
    # Without the correlation of the two counts it would be narrower.
    lost, won = share(10, 100), share(4, 100)
    assert loss.high > 0.06 + math.hypot(lost.high - 0.10, 0.04 - won.low)
    assert loss.low < 0.06 - math.hypot(0.10 - lost.low, won.high - 0.04)


@pytest.mark.parametrize(("lost", "won"), [(0.06, 0.025), (0.25, 0.25), (0.35, 0.25)])
def test_paired_loss_covers_the_truth(lost: float, won: float) -> None:
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(2000):
        draw = generator.random(80)
        before = (draw < lost) | (draw > 0.8)
        after = ((draw >= lost) & (draw < lost + won)) | (draw > 0.8)
        loss = paired_loss(before, after)
        covered += loss.low <= lost - won <= loss.high
    assert covered >= 2000 * 0.935


def test_mean() -> None:
    found = mean([1.0, 2.0, 3.0, 4.0])
    half = 3.182 * np.std([1, 2, 3, 4], ddof=1) / 2
    assert (found.value, found.low, found.high) == pytest.approx((2.5, 2.5 - half, 2.5 + half))
    assert mean([1.0]).high == math.inf
    many = mean([float(value) for value in range(41)])  # 40 degrees of freedom: 2.0211
    assert many.high - many.value == pytest.approx(2.0211 * np.std(range(41), ddof=1) / 41**0.5, rel=1e-3)


def test_prompts_needed_is_where_the_interval_fits() -> None:
    needed = prompts_needed(0.05)
    assert share(0, needed).high <= 0.05 < share(0, needed - 1).high
