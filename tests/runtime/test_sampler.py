import math

import numpy as np
import pytest

from eexport.runtime.errors import EexportError, RequestError
from eexport.runtime.sampler import Sampler, SamplingParams

LOGITS = np.log(np.array([0.30, 0.02, 0.22, 0.08, 0.16, 0.12, 0.06, 0.04], np.float32))
# Upper 0.1% points of chi-square for 1 to 7 degrees of freedom.
CHI2 = [10.83, 13.82, 16.27, 18.47, 20.52, 22.46, 24.32]


def row(size=152_000, seed=0, scale=3.0):
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def distribution(logits, **params):
    """The expected distribution [V], computed the plain way: a full sort, in double precision."""
    p = np.exp(logits.astype(np.float64) / params.get("temperature", 1.0))
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    if k := params.get("top_k"):
        p[order[k:]] = 0
        p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= params.get("top_p", 1.1)]] = 0
    p[p < params.get("min_p", 0) * p.max()] = 0
    return p / p.sum()


def dense(sampler, logits):
    ids, probabilities = sampler.probabilities(logits)
    assert np.all(np.diff(ids) > 0)
    assert probabilities.sum() == pytest.approx(1)
    full = np.zeros(logits.size)
    full[ids] = probabilities
    return full


FILTERS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_p": 0.5},
    {"top_p": 0.9, "temperature": 1.5},
    {"min_p": 0.3},
    {"top_k": 3},
    {"top_k": 100},
    {"top_k": 6, "top_p": 0.85, "min_p": 0.2},
]


@pytest.mark.parametrize("chosen", FILTERS)
def test_draws_follow_the_distribution(chosen):
    sampler = Sampler(SamplingParams(**{"temperature": 1.0, "seed": 11} | chosen))
    expected = distribution(LOGITS, **chosen)
    np.testing.assert_allclose(dense(sampler, LOGITS), expected, atol=1e-6)
    draws = 20_000
    counts = np.bincount([sampler.sample(LOGITS).token_id for _ in range(draws)], minlength=8)
    kept = expected > 0
    assert counts[~kept].sum() == 0
    chi2 = np.sum((counts[kept] - draws * expected[kept]) ** 2 / (draws * expected[kept]))
    assert chi2 < CHI2[kept.sum() - 2]


@pytest.mark.parametrize("chosen", [*FILTERS, {"top_k": 50, "top_p": 0.95}, {"temperature": 8.0, "top_p": 0.99}])
def test_a_large_vocabulary_gives_the_same_distribution(chosen):
    logits = row()
    sampler = Sampler(SamplingParams(**{"temperature": 1.0, "seed": 1} | chosen))
    expected = distribution(logits, **chosen)
    # Rounding may move the edge of a set of thousands by a few tokens of next to no weight.
    assert np.abs(dense(sampler, logits) - expected).sum() < 1e-4
    assert all(expected[sampler.sample(logits).token_id] > 0 for _ in range(10))


def test_draws_over_many_blocks_follow_the_distribution():
    logits = row(5000, scale=1.0)
    sampler = Sampler(SamplingParams(temperature=1.0, seed=5))
    counts = np.bincount([sampler.sample(logits).token_id // 625 for _ in range(20_000)], minlength=8)
    expected = 20_000 * distribution(logits).reshape(8, 625).sum(axis=1)
    assert np.sum((counts - expected) ** 2 / expected) < CHI2[6]


@pytest.mark.parametrize("chosen", FILTERS)
def test_same_seed_same_tokens(chosen):
    params = SamplingParams(**{"temperature": 1.0, "seed": 42} | chosen)
    first, second = Sampler(params), Sampler(params)
    rows = [row(1000, seed) for seed in range(20)]
    assert [first.sample(r) for r in rows] == [second.sample(r) for r in rows]
    # One random number a token, so what was asked for in between changes nothing.
    assert first.probabilities(rows[0]) is not None
    assert first.sample(rows[0]) == second.sample(rows[0])


def test_seeds():
    rows = [row(1000, seed, 1.0) for seed in range(8)]

    def tokens(seed):
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed))
        return [sampler.sample(r).token_id for r in rows]

    assert tokens(1) != tokens(2)
    assert tokens(None) != tokens(None)
    assert tokens(-1) == tokens(2**64 - 1)


@pytest.mark.parametrize("temperature", [0, 1e-6, 1e-300])
def test_next_to_no_temperature_is_greedy(temperature):
    sampler = Sampler(SamplingParams(temperature=temperature))
    logits = row()
    logits.setflags(write=False)
    assert sampler.sample(logits) == (int(logits.argmax()), None, ())
    ids, probabilities = sampler.probabilities(logits)
    assert (ids.tolist(), probabilities.tolist()) == ([int(logits.argmax())], [1.0])


@pytest.mark.parametrize("temperature", [1e-4, 100])
def test_extreme_temperatures_stay_finite(temperature):
    logits = row(1000)
    logits[3], logits[4] = -np.inf, np.finfo(np.float32).min
    sampler = Sampler(SamplingParams(temperature=temperature, seed=0))
    with np.errstate(all="raise", under="ignore"):
        tokens = {sampler.sample(logits).token_id for _ in range(50)}
    assert tokens.isdisjoint({3, 4})
    assert temperature > 1 or tokens == {int(logits.argmax())}


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.0}, {"presence_penalty": 1.0}, {"temperature": 1.0, "top_k": 2}]
)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_an_error(params, bad):
    sampler = Sampler(SamplingParams(**params), [1, 2, 3])
    sampler.observe(4)
    logits = row(1000)
    logits[500] = bad
    for call in (sampler.sample, sampler.probabilities):
        with pytest.raises(EexportError, match="non-finite logits from the model at position 4"):
            call(logits)
        with pytest.raises(EexportError, match="non-finite"):
            call(np.full(8, -np.inf, np.float32))


def test_ties_go_to_the_lower_token():
    logits = np.array([1, 2, 2, 2, 0], np.float32)
    assert Sampler(SamplingParams()).sample(logits).token_id == 1
    for params, kept in (
        ({"top_k": 2}, [1, 2]),
        ({"top_k": 1}, [1]),
        ({"top_p": 0.5}, [1, 2]),
        ({"top_p": 0.0}, [1]),
    ):
        ids, _ = Sampler(SamplingParams(temperature=1.0, **params)).probabilities(logits)
        assert ids.tolist() == kept


def test_penalties():
    logits = np.array([2.0, -2.0, 1.0, 3.0, 0.0, 1.0], np.float32)
    before = logits.copy()
    chosen = {"repetition_penalty": 2.0, "frequency_penalty": 0.5, "presence_penalty": 0.25}
    sampler = Sampler(SamplingParams(temperature=1.0, logit_bias={4: 1.5}, **chosen), [0, 1, 1])
    for token_id in (3, 3, 1):
        sampler.observe(token_id)
    # Prompt and output are divided or multiplied; only the output is counted.
    adjusted = np.array([1.0, -4.0 - 0.5 - 0.25, 1.0, 1.5 - 2 * 0.5 - 0.25, 1.5, 1.0])
    np.testing.assert_allclose(dense(sampler, logits), distribution(adjusted), atol=1e-6)
    assert np.array_equal(logits, before)
    assert sampler.sample(logits).logprob is None


def test_penalties_without_a_prompt_and_for_many_tokens():
    rng, logits = np.random.default_rng(2), row(1000)
    sampler = Sampler(SamplingParams(temperature=1.0, frequency_penalty=0.5))
    output = rng.integers(0, 1000, 500)
    np.testing.assert_allclose(dense(sampler, logits), distribution(logits), atol=1e-6)
    for token_id in output.tolist():
        sampler.observe(token_id)
    counts = np.bincount(output, minlength=1000)
    np.testing.assert_allclose(dense(sampler, logits), distribution(logits - 0.5 * counts), atol=1e-6)


def test_greedy_with_a_penalty_and_a_bias():
    logits = np.array([3.0, 2.0, 1.0], np.float32)
    assert Sampler(SamplingParams(repetition_penalty=2.0), [0]).sample(logits).token_id == 1
    assert Sampler(SamplingParams(logit_bias={0: -100, 1: -100})).sample(logits).token_id == 2
    with pytest.raises(RequestError, match="logit_bias: token 3 is outside the vocabulary") as caught:
        Sampler(SamplingParams(logit_bias={3: 1})).sample(logits)
    assert caught.value.field == "logit_bias"


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logprobs_are_the_models_own(temperature):
    logits = row(1000)
    params = SamplingParams(temperature=temperature, top_k=5, seed=0, logit_bias={7: 100}, logprobs=3)
    token_id, logprob, top = Sampler(params).sample(logits)
    expected = logits - math.log(np.exp(logits.astype(np.float64)).sum())
    assert token_id == 7
    assert logprob == pytest.approx(expected[7], abs=1e-5)
    best = np.argsort(-expected)[:3]
    assert [i for i, _ in top] == best.tolist()
    np.testing.assert_allclose([value for _, value in top], expected[best], atol=1e-5)


def test_logprobs_of_the_chosen_token_alone():
    token_id, logprob, top = Sampler(SamplingParams(logprobs=0)).sample(LOGITS)
    assert (token_id, top) == (0, ())
    assert logprob == pytest.approx(math.log(0.3), abs=1e-5)
    assert len(Sampler(SamplingParams(logprobs=20)).sample(LOGITS).top) == 8


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_tokens", [0, -1, 1.5, "5", True]),
        ("temperature", [-0.1, 101, math.nan, math.inf, "0.5", None, True]),
        ("top_k", [-1, 1.0, "5", None]),
        ("top_p", [-0.1, 1.1, math.nan, "x", None]),
        ("min_p", [-0.1, 1.1, math.nan, None]),
        ("repetition_penalty", [0, -1, math.nan, None]),
        ("frequency_penalty", [-2.1, 2.1, math.nan, "1"]),
        ("presence_penalty", [-2.1, 2.1, math.nan, "1"]),
        ("logit_bias", [None, [1], {"1": 1}, {-1: 1}, {1: 101}, {1: math.nan}, {1: "1"}]),
        ("stop", ["", ["a", ""], [1], None, 5, b"a"]),
        ("stop_token_ids", [None, 5, "5", ["5"], [-1], [True]]),
        ("seed", ["1", 1.0, True, 2**64]),
        ("logprobs", [-1, 21, "1", True]),
        ("ignore_eos", [1, None, "yes"]),
    ],
)
def test_wrong_params_are_named(name, values):
    for value in values:
        with pytest.raises(RequestError, match=f"^{name}: expected .*, got ") as caught:
            SamplingParams(**{name: value})
        assert caught.value.field == name
        assert "\n" not in str(caught.value)


def test_params_become_plain_python():
    params = SamplingParams(
        max_tokens=10**9,
        temperature=np.float32(0.5),
        top_k=np.int64(3),
        stop="END",
        stop_token_ids=[2],
        seed=0,
    )
    assert (params.max_tokens, params.temperature, params.top_k) == (10**9, 0.5, 3)
    assert (type(params.temperature), type(params.top_k)) == (float, int)
    assert (params.stop, params.stop_token_ids) == (("END",), (2,))
    assert SamplingParams().is_greedy and not params.is_greedy
