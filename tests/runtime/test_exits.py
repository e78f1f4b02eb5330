import math
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from eexport.runtime.exits import ExitRule, exits_taken


def _one_by_one(
    rule: ExitRule,
    predicted: NDArray[np.integer],
    entropy: NDArray[np.floating],
    final_entropy: NDArray[np.floating],
    lengths: Sequence[int],
) -> list[bool]:
    """The device's loop: a token at a time, each knowing what became of the one before."""
    taken, place = [], 0
    for length in lengths:
        previous = 0.0
        for _ in range(length):
            index = int(predicted[place])
            own = float(entropy[place, index]) if index < entropy.shape[1] else math.inf
            taken.append(rule.leaves(index, own, previous))
            previous = own if taken[-1] else float(final_entropy[place])
            place += 1
    return taken


def test_a_rule_by_hand() -> None:
    rule = ExitRule((0.5, 1.0), previous=0.4)
    predicted = np.array([0, 1, 1, 2, 0, 1])
    entropy = np.array([[0.3, 9], [9, 0.6], [9, 0.1], [0, 0], [0.1, 9], [9, 0.2]], np.float32)
    final = np.array([5, 0.2, 0.3, 2.0, 0.0, 0.0], np.float32)
    # Leaves; leaves after 0.3; not after its own 0.6; full depth; not after 2.0; leaves after 0.0, for it stayed.
    assert exits_taken(rule, predicted, entropy, final, [6]).tolist() == [True, True, False, False, False, True]
    # The first token of a text has none before it.
    apart = exits_taken(rule, predicted, entropy, final, [2, 1, 1, 1, 1])
    assert apart.tolist() == [True, True, True, False, True, True]


@pytest.mark.parametrize("previous", [math.inf, 1.0, 0.3, 0.0])
def test_all_at_once_is_one_by_one(previous: float) -> None:
    generator = np.random.default_rng(0)
    seen = []
    for exits in (1, 2, 4):
        lengths = [0, *generator.integers(0, 30, 40).tolist(), 0]
        tokens = sum(lengths)
        predicted = generator.integers(0, exits + 1, tokens).astype(np.uint8)
        entropy = generator.exponential(0.5, (tokens, exits)).astype(np.float32)
        final = generator.exponential(0.5, tokens).astype(np.float32)
        for scale in (0.0, 0.2, 1.0, 10.0):
            rule = ExitRule(tuple((scale * generator.random(exits)).tolist()), previous)
            taken = exits_taken(rule, predicted, entropy, final, lengths)
            assert taken.tolist() == _one_by_one(rule, predicted, entropy, final, lengths)
            seen.append(float(taken.mean()))
    assert min(seen) == 0
    assert max(seen) > (0.3 if previous > 0 else 0.01)


def test_thresholds_are_compared_in_full_precision() -> None:
    entropy = np.array([[np.float32(0.1)]], np.float32)  # a little over 0.1
    rule = ExitRule((0.1,), math.inf)
    assert not rule.leaves(0, float(entropy[0, 0]), 0.0)
    assert exits_taken(rule, np.array([0]), entropy, np.zeros(1), [1]).tolist() == [False]


def test_nothing_to_decide() -> None:
    assert exits_taken(ExitRule((1.0,), 1.0), np.zeros(0, int), np.zeros((0, 1)), np.zeros(0), []).shape == (0,)
    assert not exits_taken(ExitRule((), 1.0), np.zeros(3, int), np.zeros((3, 0)), np.zeros(3), [3]).any()
    assert not ExitRule((0.0, 0.0), math.inf).exits
