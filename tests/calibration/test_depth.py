import numpy as np
import pytest

from eexport.calibration.depth import (
    boilerplate,
    confident_at,
    decided_at,
    histogram,
    layer_ranges,
    layer_use,
    skip_share,
)

ENTROPY = np.array(
    [
        [0.1, 0.1, 0.1, 0.1],  # sure from the first depth on
        [0.1, 0.9, 0.4, 0.2],  # sure, unsure again, sure from the third on
        [2.0, 2.0, 2.0, 0.5],  # exactly at the threshold at the end
        [0.1, 0.1, 0.1, 0.9],  # unsure at the end
    ],
    np.float32,
)


def test_confidence_must_last() -> None:
    assert confident_at(ENTROPY, 0.5).tolist() == [0, 2, 3, 4]


def test_an_answer_must_last() -> None:
    argmax = np.array([[7, 7, 7, 7], [7, 3, 7, 7], [1, 2, 3, 4]], np.int32)
    assert decided_at(argmax).tolist() == [0, 2, 3]


def test_shares_and_histogram() -> None:
    places = confident_at(ENTROPY, 0.5)
    assert histogram(places, 4) == [1, 0, 1, 1]  # and one that never gets there
    # Depths 2, 4, 6, 8 of 8 layers; who never exits runs them all.
    assert skip_share(places, (2, 4, 6, 8), 8) == pytest.approx((6 + 2 + 0 + 0) / 4 / 8)


def test_layer_ranges_of_the_paper() -> None:
    assert layer_ranges(32) == [(1, 8), (9, 12), (13, 24), (25, 32)]
    assert layer_ranges(30) == [(1, 8), (9, 11), (12, 22), (23, 30)]
    assert layer_ranges(1) == [(1, 1)]
    for layers in range(1, 100):
        ranges = layer_ranges(layers)
        assert ranges[0][0] == 1 and ranges[-1][1] == layers
        assert all(end + 1 == start for (_, end), (start, _) in zip(ranges, ranges[1:], strict=False))


def test_layer_use() -> None:
    # Of 32 layers: exits after 8, 12, 24 and never.
    assert layer_use(np.array([0, 1, 2, 4]), (8, 12, 24, 32), 32) == [1.0, 0.75, 0.5, 0.25]


def test_boilerplate_signals() -> None:
    rapid = [0.1, 0.1, 0.1, 0.1]
    late = [2.0, 2.0, 2.0, 0.1]
    hard = [2.0, 2.0, 2.0, 2.0]
    texts = [np.array([rapid, rapid, rapid, hard, hard, late], np.float32)]
    found = boilerplate(texts, (1, 2, 3, 4), 4, 0.5)
    assert (found.rapid, found.low_final, found.both) == pytest.approx((3 / 6, 4 / 6, 3 / 6))
    pairs = np.corrcoef([1, 1, 1, 0, 0], [1, 1, 0, 0, 0])[0, 1]
    assert found.neighbours == pytest.approx(pairs)


def test_a_text_without_variation_has_no_correlation() -> None:
    found = boilerplate([np.zeros((5, 4), np.float32)], (1, 2, 3, 4), 4, 0.5)
    assert found.both == 1 and found.neighbours is None
