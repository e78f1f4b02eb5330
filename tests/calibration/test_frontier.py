import numpy as np
import pytest

from eexport.calibration.decode import FULL, Written
from eexport.calibration.frontier import Scored, allowed_loss, frontier
from eexport.calibration.intervals import paired_loss

DEPTHS = (2, 4)


def _prompt(full: bool | None, oracle: bool | None, exits: list[int], tokens: list[int] | None = None) -> Scored:
    """Four tokens by the full model, and by one oracle with these exits (0: after layer 2 of 4)."""
    whole = Written([1, 2, 3, 4], [1, 1, 1, 1], [0.0] * 4, [0.5] * 4)
    other = Written(tokens or [1, 2, 3, 4], exits, [0.2] * 4, [0.7] * 4)
    return Scored({FULL: full, 0: oracle}, {FULL: whole, 0: other})


def test_a_point_by_hand() -> None:
    prompts = [
        _prompt(True, True, [0, 0, 1, 1]),
        _prompt(True, False, [0, 0, 0, 0], tokens=[9, 9, 9, 9]),
        _prompt(False, False, [1, 1, 1, 1]),
    ]
    found = frontier(prompts, (0.9,), DEPTHS, 4)
    (point,) = found.points
    assert (found.prompts, found.scored) == (3, 3)
    assert point.skip == pytest.approx(6 * 2 / (12 * 4))
    assert point.same_text == pytest.approx(2 / 3)
    assert found.accuracy is not None and found.accuracy.value == pytest.approx(2 / 3)
    assert point.loss == paired_loss(np.array([1, 1, 0], bool), np.array([1, 0, 0], bool))
    assert point.divergence.value == pytest.approx(0.2)
    assert (found.perplexity, point.perplexity) == pytest.approx((np.exp(0.5), np.exp(0.7)))


def test_free_text_has_no_accuracy() -> None:
    found = frontier([_prompt(None, None, [0, 0, 0, 0])] * 3, (0.9,), DEPTHS, 4)
    assert found.accuracy is None and found.points[0].loss is None and found.budgets == ()


def test_budgets_in_points_and_relative_are_two_things() -> None:
    # From 21% to 17% is four points, but a relative loss of 19%.
    assert allowed_loss("5pp", 0.21) == pytest.approx(0.05)
    assert allowed_loss("5%rel", 0.21) == pytest.approx(0.0105)
    prompts = [_prompt(True, i >= 4, [0] * 4) for i in range(21)] + [_prompt(False, False, [0] * 4)] * 79
    shuffled = [prompts[i] for i in np.random.default_rng(0).permutation(100)]
    budgets = {row.budget: row for row in frontier(shuffled, (0.9,), DEPTHS, 4).budgets}
    assert budgets["5pp"].threshold == 0.9 and budgets["5%rel"].threshold is None


def test_a_loss_that_could_be_larger_is_not_confirmed() -> None:
    unharmed = [_prompt(True, True, [0] * 4)]
    budgets = {row.budget: row for row in frontier(unharmed * 50, (0.9,), DEPTHS, 4).budgets}
    assert budgets["0.5pp"].skip == 0.5 and budgets["0.5pp"].loss.value == 0 and not budgets["0.5pp"].confirmed
    budgets = {row.budget: row for row in frontier(unharmed * 100, (0.9,), DEPTHS, 4).budgets}
    assert budgets["5pp"].confirmed and not budgets["1pp"].confirmed


def test_a_threshold_is_judged_on_the_other_half() -> None:
    # The oracle never fails on even prompts and always on odd ones: chosen by the even, it fails on the odd.
    prompts = [_prompt(True, i % 2 == 0, [0] * 4) for i in range(40)]
    (half_point, *_) = frontier(prompts, (0.9,), DEPTHS, 4).budgets
    assert half_point.loss.value == pytest.approx(0.5)
    assert half_point.threshold is None  # on all prompts, half are lost
