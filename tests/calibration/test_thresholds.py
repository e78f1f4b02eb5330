import dataclasses
import math

import numpy as np
import pytest

from eexport.calibration.exit_traces import ExitTraces, replay, report
from eexport.calibration.risk import binomial_p
from eexport.calibration.thresholds import Budget, choose, exit_path, never, resample, walk
from eexport.runtime.errors import EexportError
from eexport.runtime.exits import ExitRule

DEPTHS, LAYERS = (4, 8, 12), 16
NAN = math.nan


def simulated(texts: int, seed: int, *, reasoning: bool = False) -> ExitTraces:
    """Texts of differing difficulty, tokens like their neighbours, entropies that tell something of being right.

    With ``reasoning``, what follows a token of high entropy is wrong more often than its own entropies tell.
    """
    generator = np.random.default_rng(seed)
    lengths = generator.integers(10, 50, texts)
    starts, tokens = np.cumsum(lengths) - lengths, int(lengths.sum())
    difficulty = generator.normal(0, 0.6, texts)
    hardness = generator.normal(0, 0.8, tokens)
    for start, length, base in zip(starts, lengths, difficulty, strict=True):
        for i in range(start + 1, start + length):
            hardness[i] += 0.6 * hardness[i - 1]
        hardness[start : start + length] += base
    at_exit = hardness[:, None] - np.array([0.0, 0.5, 1.0])
    entropy = np.exp(1.6 * at_exit - 2 + generator.normal(0, 0.7, at_exit.shape)).astype(np.float32)
    wrong = generator.random(at_exit.shape) < 1 / (1 + np.exp(3 - 2.4 * at_exit))
    final_entropy = np.exp(hardness - 1.5 + generator.normal(0, 0.5, tokens))
    if reasoning:
        after = np.roll(final_entropy > 1, 1)
        after[starts] = False
        wrong |= after[:, None] & (generator.random(at_exit.shape) < 0.3)
    required = len(DEPTHS) - np.cumprod(~wrong[:, ::-1], axis=1).sum(axis=1)
    predicted = np.clip(required + generator.choice([-1, 0, 1], tokens, p=[0.25, 0.6, 0.15]), 0, len(DEPTHS))
    correct = (generator.random(texts) < 1 / (1 + np.exp(2 * difficulty))).astype(float)
    correct[::5] = NAN
    kinds = tuple("code" if coin else "text" for coin in generator.random(texts) < 0.5)
    return ExitTraces(DEPTHS, LAYERS, lengths, predicted, entropy, ~wrong, final_entropy, correct, kinds)


@pytest.fixture(scope="module")
def population() -> ExitTraces:
    return simulated(500, seed=0)


def three_texts() -> ExitTraces:
    """Two exits, after 2 and 4 of 8 layers. Texts of 3, 2 and 1 tokens; all that may leave is at 0.1 nats."""
    return ExitTraces(
        depths=(2, 4),
        num_layers=8,
        lengths=np.array([3, 2, 1]),
        predicted=np.array([0, 1, 2, 0, 1, 0]),
        entropy=np.full((6, 2), 0.1, np.float32),
        agrees=np.array([[1, 1], [1, 0], [1, 1], [1, 1], [0, 1], [1, 1]], bool),
        final_entropy=np.array([0.2, 0.2, 0.2, 3.0, 0.2, 0.2]),
        correct=np.array([1.0, 0.0, NAN]),
        kinds=("code", "math", "code"),
    )


@pytest.mark.parametrize(
    ("text", "kind", "share"), [("0.5pp", "pp", 0.005), ("5%rel", "%rel", 0.05), (".1%tokens", "%tokens", 0.001)]
)
def test_budgets_are_read(text: str, kind: str, share: float) -> None:
    budget = Budget.parse(text)
    assert (budget.kind, budget.share) == (kind, pytest.approx(share))
    assert Budget.parse(str(budget)) == budget


@pytest.mark.parametrize(
    "text", ["", "0.5", "0.5%", "pp", "-1pp", "0pp", "100pp", "nanpp", "1e-3pp", "1 pp", "1%tokens."]
)
def test_other_budgets_are_refused_in_a_line(text: str) -> None:
    with pytest.raises(EexportError, match=r"^budget '.*': give [^\n]+$"):
        Budget.parse(text)


def test_replay_by_hand() -> None:
    found = replay(three_texts(), ExitRule((0.5, 0.5), math.inf))
    assert found.exits.tolist() == [[1, 1], [1, 1], [1, 0]]
    assert found.wrong.tolist() == [1, 0, 0]  # the second token, at the second exit
    assert found.layers.tolist() == [2 + 4 + 8, 2 + 4, 2]
    assert found.tried.tolist() == [2, 2, 1]
    assert found.saved(8) == pytest.approx(1 - 22 / 48)
    # At 0.1 a token must be under, and is not; a threshold of 0 is not even tried.
    found = replay(three_texts(), ExitRule((0.1, 0.0), math.inf))
    assert not found.exits.any()
    assert found.tried.tolist() == [1, 1, 1]
    # What stayed at 0.2 or 3 nats stops the next; what left at 0.1 does not.
    found = replay(three_texts(), ExitRule((0.0, 0.5), 0.15))
    assert found.exits.tolist() == [[0, 0], [0, 0], [0, 0]]
    found = replay(three_texts(), ExitRule((0.5, 0.5), 0.15))
    assert found.exits.tolist() == [[1, 1], [1, 1], [1, 0]]


def test_losses_by_hand() -> None:
    found = replay(three_texts(), ExitRule((0.5, 0.5), math.inf))
    assert Budget("%tokens", 0.1).losses(found).tolist() == pytest.approx([1 / 3, 0, 0])
    assert Budget("pp", 0.1).losses(found).tolist() == [1, 0]
    assert Budget("%rel", 0.1).losses(found).tolist() == [1]


def test_picked_texts_keep_their_tokens() -> None:
    traces, rule = three_texts(), ExitRule((0.5, 0.5), math.inf)
    picked = traces.pick([2, 0, 0])
    assert picked.lengths.tolist() == [1, 3, 3]
    assert picked.predicted.tolist() == [0, 0, 1, 2, 0, 1, 2]
    assert picked.kinds == ("code", "code", "code")
    assert replay(picked, rule).wrong.tolist() == replay(traces, rule).wrong[[2, 0, 0]].tolist()


def test_report_by_kind() -> None:
    found = report(three_texts(), ExitRule((0.5, 0.5), math.inf))
    assert list(found) == ["all", "code", "math"]
    every, code, maths = found.values()
    assert (every.prompts, every.tokens, every.scored, every.solved) == (3, 6, 2, 1)
    assert (every.tried, every.left, every.layers) == pytest.approx((5 / 6, 5 / 6, 22 / 6))
    assert every.by_exit == pytest.approx((3 / 6, 2 / 6))
    assert every.disagreement.value == pytest.approx(1 / 9)
    assert every.lost is not None and every.lost_of_solved is not None
    assert (every.lost.value, every.lost_of_solved.value) == (0.5, 1.0)
    assert (code.tokens, code.scored, code.layers) == (4, 1, pytest.approx(16 / 4))
    assert (maths.lost, maths.lost_of_solved) == (maths.lost, None)
    # No wrong token in one text does not mean that there is none.
    assert maths.disagreement.value == 0 and maths.disagreement.high > 0.5


def test_traces_that_do_not_fit_are_refused() -> None:
    traces = three_texts()
    with pytest.raises(ValueError, match="do not fit"):
        ExitTraces(
            (2,),
            8,
            traces.lengths,
            traces.predicted,
            traces.entropy,
            traces.agrees,
            traces.final_entropy,
            traces.correct,
            traces.kinds,
        )


def test_the_path_goes_from_never_to_always(population: ExitTraces) -> None:
    path = exit_path(population)
    found = [replay(population, ExitRule(rule.entropy, math.inf)) for rule in path]
    left = [int(one.exits.sum()) for one in found]
    assert left == sorted(left)
    assert left[0] < 0.001 * len(population.predicted)
    assert left[-1] > 0.999 * population.named.sum()
    thresholds = np.array([rule.entropy for rule in path])
    assert (np.diff(thresholds, axis=0) > 0).all()


def test_risk_is_spent_where_it_leaves_out_most(population: ExitTraces) -> None:
    """The path loses less than one threshold for all exits, and than thresholds in the opposite proportion."""
    path = exit_path(population.pick(range(100)))
    rest = population.pick(range(100, 500))

    def saved_at(rules: "list[ExitRule]", wrong: float) -> float:
        found = [replay(rest, rule) for rule in rules]
        return float(np.interp(wrong, [one.wrong_share.mean() for one in found], [one.saved(LAYERS) for one in found]))

    proportion = np.array(path[0].entropy) / path[0].entropy[0]
    levels = [rule.entropy[0] for rule in path]
    paths = {
        power: [ExitRule(tuple((level * proportion**power).tolist()), path[0].previous) for level in levels]
        for power in (-1, 0, 1)
    }
    best, equal, opposite = (saved_at(paths[power], 0.005) for power in (1, 0, -1))
    assert best > equal + 0.005
    assert equal > opposite


def test_the_previous_token_counts_where_it_tells_something() -> None:
    assert exit_path(simulated(300, seed=1, reasoning=True))[0].previous <= 2
    assert exit_path(simulated(300, seed=1))[0].previous >= 3


def test_a_rule_of_the_tested_texts_only(population: ExitTraces) -> None:
    """What is said of the chosen rule is what the texts that tested it say."""
    path, tested = exit_path(population.pick(range(100))), population.pick(range(100, 500))
    budget = Budget.parse("10pp")
    chosen = walk(path, tested, budget, 0.95)
    scored = ~np.isnan(tested.correct)
    lost = (replay(tested, chosen.rule).wrong > 0) & (tested.correct == 1)
    assert chosen.prompts == scored.sum()
    assert chosen.loss == pytest.approx(lost.sum() / scored.sum())
    assert chosen.p_value == pytest.approx(binomial_p(int(lost.sum()), int(scored.sum()), 0.1))
    assert chosen.p_value <= 0.05
    # Every candidate up to it holds, and the next one does not.
    place = path.index(chosen.rule)
    p_values = [budget.p_value(budget.losses(replay(tested, rule)), 0.05) for rule in path[: place + 2]]
    assert max(p_values[:-1]) <= 0.05 < p_values[-1]
    assert chosen.reason == f"{place + 1} of {len(path)} candidates hold; the next has p = {p_values[-1]:.2g}"


def test_texts_that_test_nothing_fix_the_path_first(population: ExitTraces) -> None:
    scored, solved = int((~np.isnan(population.correct)).sum()), int((population.correct == 1).sum())
    assert choose(population, Budget.parse("10pp")).prompts == scored  # a fifth of the texts has no score
    assert choose(population, Budget.parse("20%rel")).prompts == solved
    assert choose(population, Budget.parse("2%tokens")).prompts == 400
    assert choose(population, Budget.parse("2%tokens")) == choose(population, Budget.parse("2%tokens"))


def test_others_than_the_source_only_fix_the_path(population: ExitTraces) -> None:
    """Texts of another kind would hide what those of the source lose."""
    own = np.arange(len(population.lengths)) < 220
    found = choose(population, Budget.parse("2%tokens"), own=own)
    assert found.prompts == 220
    worse = dataclasses.replace(population, agrees=population.agrees & ~own[population.text][:, None])
    budget, source = Budget.parse("5%tokens"), worse.pick(np.flatnonzero(own))
    mixed, found = (choose(worse, budget, own=which).rule for which in (None, own))
    assert replay(source, mixed).wrong_share.mean() > budget.share > replay(source, found).wrong_share.mean()


def test_a_budget_that_cannot_be_met_says_so() -> None:
    traces = simulated(150, seed=2)
    found = choose(traces, Budget.parse("0.1pp"))
    assert found.rule == never(3) and not found.rule.exits
    assert (found.loss, found.saved, found.p_value) == (0, 0, 1)
    assert found.reason == (
        "0.1pp at 95% needs at least 2995 prompts with a score to test on, even without a single loss; there are 120"
    )
    assert "at least 299 prompts that the full model solves to" in choose(traces, Budget.parse("1%rel")).reason
    assert "at 99.5% needs at least 528 prompts to" in choose(traces, Budget.parse("1%tokens"), 0.995).reason
    # Enough prompts, but too many losses; and a predictor that names no exit.
    always = ExitRule((math.inf,) * 3, math.inf)
    reason = walk([always], traces, Budget.parse("10pp"), 0.95).reason
    assert reason.startswith("not even the safest of 1 candidates is shown to stay within 10pp at 95%: it loses ")
    traces.predicted[:] = 3
    assert "names no exit" in choose(traces, Budget.parse("10pp")).reason
    with pytest.raises(EexportError, match=r"^confidence 95: give "):
        choose(traces, Budget.parse("3pp"), 95)


@pytest.mark.parametrize(("text", "prompts"), [("2%tokens", 300), ("10pp", 150), ("20%rel", 200)])
def test_the_budget_holds_as_often_as_is_said(population: ExitTraces, text: str, prompts: int) -> None:
    budget = Budget.parse(text)
    found = resample(population, budget, runs=200, prompts=prompts)
    # At a true rate of 5%, more than 21 of 200 come once in a thousand times.
    assert found.broken <= 21 / 200
    assert found.exiting > 0.95
    assert found.left > 0.4 and found.saved > 0.3
    assert 0.2 * budget.share < found.loss < budget.share
    # To trust the losses that were seen breaks it again and again.
    generator, broken = np.random.default_rng(3), 0
    for _ in range(40):
        drawn = population.pick(generator.integers(0, 500, prompts))
        within = [rule for rule in exit_path(drawn) if budget.losses(replay(drawn, rule)).mean() <= budget.share]
        broken += budget.losses(replay(population, within[-1])).mean() > budget.share
    assert broken > 0.2 * 40
