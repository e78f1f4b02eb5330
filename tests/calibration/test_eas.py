import numpy as np
import pytest

from eexport.calibration.eas import ALPHAS, eas, from_cosine, layer_scores


def test_the_teaching_example() -> None:
    # 32 layers, exit after 24: mapped similarity 0.90, skip ratio 0.25, alpha 0.5.
    (score,) = layer_scores(np.array([0.9]), [24], 32, 0.5)
    assert score == pytest.approx((0.9 * 0.25) ** 0.5, abs=1e-12)
    assert round(score, 3) == 0.474


def test_a_toy_model_by_hand() -> None:
    # Four layers; cosines -0.6, 0.2 and 0.62 map to 0.2, 0.6 and 0.81; skip ratios 3/4, 1/2 and 1/4.
    similarity = from_cosine(np.array([-0.6, 0.2, 0.62, 1.0]))
    assert similarity == pytest.approx([0.2, 0.6, 0.81, 1.0], abs=1e-12)
    depths = [1, 2, 3, 4]
    by_hand = ((0.2 * 0.75) ** 0.5 + (0.6 * 0.5) ** 0.5 + (0.81 * 0.25) ** 0.5) / 3
    assert eas(similarity, depths, 4, 0.5) == pytest.approx(by_hand, abs=1e-9)
    by_hand = (0.2**0.8 * 0.75**0.2 + 0.6**0.8 * 0.5**0.2 + 0.81**0.8 * 0.25**0.2) / 3
    assert eas(similarity, depths, 4, 0.8) == pytest.approx(by_hand, abs=1e-9)


def test_the_ends_of_alpha_are_skipping_and_similarity() -> None:
    similarity, depths = np.array([0.2, 0.6, 0.81, 1.0]), [1, 2, 3, 4]
    assert eas(similarity, depths, 4, 0.0) == pytest.approx(np.mean([0.75, 0.5, 0.25]), abs=1e-9)
    assert eas(similarity, depths, 4, 1.0) == pytest.approx(np.mean([0.2, 0.6, 0.81]), abs=1e-9)
    assert (ALPHAS[0], ALPHAS[-1], len(ALPHAS)) == (0.0, 1.0, 21)


def test_the_full_depth_is_no_candidate() -> None:
    assert eas(np.array([0.5, 1.0]), [2, 4], 4, 0.5) == pytest.approx(0.5, abs=1e-12)


def test_cosines_beyond_one_by_rounding_stay_in_range() -> None:
    assert from_cosine(np.array([-1.0000001, 1.0000001])).tolist() == [0.0, 1.0]
