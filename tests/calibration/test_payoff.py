"""What drafts are worth, by hand."""

import dataclasses

import numpy as np
import pytest
from toys import toy_costs

from eexport.calibration.payoff import draft_size, payoff, survival

# 4 layers of 1 ms, a head of 2, 0.5 for the host; each further row costs a tenth more.
COSTS = toy_costs()


def rows(*passes: str) -> np.ndarray:
    return np.array([[mark == "1" for mark in one] for one in passes])


@pytest.mark.parametrize(
    ("agrees", "expected"),
    [
        (rows("1101"), [3 / 4, 1 / 4, 0, 0, 0, 0]),
        (rows("1111"), [1, 3 / 4, 2 / 4, 1 / 4, 0, 0]),  # as far as the text goes
        (rows("0"), [0, 0, 0, 0, 0, 0]),
        (rows("111", "011"), [1, 2 / 3, 1 / 3, 0, 0, 0]),  # the second pass holds for later tokens
        (rows("111", "110"), [1, 1 / 3, 0, 0, 0, 0]),
        (rows("1111", "1111", "0010"), [1, 3 / 4, 1 / 4, 0, 0, 0]),
        (rows("1011", "1111", "1111"), [3 / 4, 2 / 4, 1 / 4, 1 / 4, 0, 0]),  # what was wrong stays so
    ],
)
def test_survival(agrees: np.ndarray, expected: list[float]) -> None:
    assert survival(agrees, 6).tolist() == pytest.approx(expected)


def test_an_exits_draft_runs_its_layers() -> None:
    found = payoff([0.8, 0.5], COSTS, depth=2, draft_vocabulary=0.25)
    # 2 layers, the head's own, a quarter of the LM head.
    assert found.draft_ms == pytest.approx(2 + 1 + 0.5)
    # One token: it passes 2 layers; then 2 layers and the head for 2 rows.
    one = 1.8 * 6.5 / (3.5 + 2 + 1.1 * (2 + 2) + 0.5)
    two = 2.3 * 6.5 / (7.0 + 2 + 1.2 * (2 + 2) + 0.5)
    assert one > two
    assert (found.speedup, found.length, found.accepted) == (pytest.approx(one), 1, 0.8)
    assert found.per_ms == pytest.approx(1.3 / (3 * 3.5))


def test_a_draft_from_the_last_state_runs_no_layers_of_the_model() -> None:
    found = payoff([0.8, 0.5, 0.1, 0.0], COSTS, depth=4, draft_vocabulary=0.25)
    assert found.draft_ms == pytest.approx(1 + 0.5)
    speedups = [
        (1 + accepted) * 6.5 / (1.5 * length + 6 * (1 + 0.1 * length) + 0.5)
        for length, accepted in ((1, 0.8), (2, 1.3), (3, 1.4), (4, 1.4))
    ]
    assert found.speedup == pytest.approx(max(speedups)) and speedups.index(max(speedups)) == 1
    assert (found.length, found.accepted) == (2, pytest.approx(1.3))
    assert found.per_ms == pytest.approx(1.4 / 4.5)


def test_drafts_that_do_not_pay() -> None:
    found = payoff([0.1, 0.0], COSTS, depth=2, draft_vocabulary=0.25)
    assert (found.speedup, found.length, found.accepted) == (1.0, 0, 0.0)
    assert found.draft_ms == pytest.approx(3.5)


def test_rows_decide() -> None:
    """The same acceptance on a device where rows cost as much as tokens, and on one where they are free."""
    shares = [0.8, 0.64, 0.51]
    dear, free = (payoff(shares, toy_costs(row=row), 4, 0.25) for row in (1.0, 0.0))
    assert (dear.length, free.length) == (0, 3)
    assert free.speedup == pytest.approx(2.95 * 6.5 / (4.5 + 6.5))


def test_the_size_of_the_draft_vocabulary() -> None:
    coverage = {100: 0.8, 200: 0.9, 400: 1.0}
    # Below the head: 2 layers and its own. 0.8 / 3.5, 0.9 / 4 and 1 / 5.
    assert draft_size(coverage, COSTS, depth=2, vocab_size=400) == 100
    assert draft_size({**coverage, 200: 0.912}, COSTS, depth=2, vocab_size=400) == 200, "0.5% less, and more coverage"
    dear = dataclasses.replace(COSTS, stages=(*COSTS.stages[:-1], toy_costs(head=0.4).stages[-1]))
    # 0.8 / 3.1, 0.9 / 3.2 and 1 / 3.4.
    assert draft_size(coverage, dear, depth=2, vocab_size=400) == 400
