import numpy as np
import pytest

from eexport.calibration.measures import Measures, log_softmax, measure, top_tokens
from eexport.calibration.traced import cosine


def _brute_force(hidden: np.ndarray, logits: np.ndarray) -> dict[str, list[float]]:
    """The same figures, the long way, in fp64."""
    hidden, logits = hidden.astype(np.float64), logits.astype(np.float64)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    top = [sorted(range(logits.shape[1]), key=lambda token, row=row: (-row[token], token))[:10] for row in logits]
    return {
        "hidden_cosine": [row @ hidden[-1] / np.linalg.norm(row) / np.linalg.norm(hidden[-1]) for row in hidden],
        "top_overlap": [len(set(row) & set(top[-1])) for row in top],
        "top_order": [sum(a == b for a, b in zip(row, top[-1], strict=True)) for row in top],
        "argmax": [row[0] for row in top],
        "probability": p.max(-1).tolist(),
        "entropy": (-(p * np.log(p)).sum(-1)).tolist(),
    }


@pytest.mark.parametrize("vocab", [12, 700, 3001])
def test_measures_against_brute_force(vocab: int) -> None:
    generator = np.random.default_rng(vocab)
    hidden = generator.normal(size=(5, 16)).astype(np.float32)
    logits = generator.normal(size=(5, vocab), scale=3).astype(np.float32)
    logits[2] = logits[4] + 0.5 * logits[2]  # alike enough to share some of the ten
    found = measure(hidden, logits.copy(), cosine(logits, logits[-1:]))
    for name, expected in _brute_force(hidden, logits).items():
        assert getattr(found, name).tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5), name
    assert found.top_overlap[-1] == found.top_order[-1] == 10
    assert 0 < found.top_overlap[2] < 10
    assert found.agrees[-1]


@pytest.mark.parametrize("vocab", [10, 63, 640, 641, 5000])
def test_top_tokens_are_the_likeliest_and_ties_go_to_the_lower_id(vocab: int) -> None:
    generator = np.random.default_rng(1)
    logits = generator.integers(0, 40, size=(6, vocab)).astype(np.float32)  # many ties
    found = top_tokens(logits, 10)
    expected = np.sort(logits, axis=-1)[:, ::-1][:, :10]
    assert np.array_equal(np.take_along_axis(logits, found, -1), expected)
    assert np.array_equal(found[:, 0], logits.argmax(-1))


def test_a_certain_and_an_even_distribution() -> None:
    logits = np.zeros((2, 1000), np.float32)
    logits[1, 3] = 1000.0
    found = measure(np.ones((2, 4), np.float32), logits, np.ones(2, np.float32))
    assert found.entropy == pytest.approx([np.log(1000), 0.0], abs=1e-5)
    assert found.probability == pytest.approx([0.001, 1.0])


def test_stacking() -> None:
    rows = [measure(np.ones((2, 4), np.float32), np.eye(2, 20, dtype=np.float32), np.ones(2, np.float32))] * 3
    stacked = Measures.stack(rows)
    assert stacked.entropy.shape == (3, 2) and Measures.join([stacked, stacked]).agrees.shape == (6, 2)


def test_log_softmax_does_not_overflow() -> None:
    found = log_softmax(np.array([[1e4, 1e4, -1e4]], np.float32))
    assert found[0, :2] == pytest.approx(-np.log(2)) and np.isfinite(found).all()


def test_cosine_of_nothing_is_zero() -> None:
    assert cosine(np.zeros((1, 3), np.float32), np.ones((1, 3), np.float32)).tolist() == [0.0]
