import numpy as np
import pytest
from toys import toy_costs

from eexport.calibration.drafts import Policy, Recorded, Replay
from eexport.calibration.predict import Forecast, Prediction, geometric_mean, nearly_free_rows, predict
from eexport.calibration.verdict import needed_agreement

LAYERS = 8
DEPTHS = (2, 4, 6, 8)


def _texts(
    agreement: tuple[float, float, float], *, sure: float = 0.1, count: int = 10, repeat: bool = False, seed: int = 0
) -> list[Recorded]:
    """Random texts without repetitions (or of nothing else), whose three exits are right as often as ``agreement``.

    Where an exit is right it is sure (entropy 0.1), else it is not (2.0).
    """
    generator = np.random.default_rng(seed)
    texts = []
    for _ in range(count):
        agrees = np.concatenate((generator.random((100, 3)) < agreement, np.ones((100, 1), bool)), axis=1)
        tokens = np.tile([1, 2, 3, 4], 25) if repeat else generator.permutation(100_000)[:100]
        entropy = np.where(agrees, sure, 2.0).astype(np.float32)
        texts.append(Recorded((), tuple(tokens.tolist()), agrees, entropy))
    return texts


def _by_name(prediction: Prediction) -> dict[str, Forecast]:
    return {forecast.name: forecast for forecast in prediction.forecasts}


def test_exits_that_are_right_pay() -> None:
    costs = toy_costs(layers=LAYERS, head=0.5, host=0.0, row=0.02)
    prediction = predict({"text": _texts((0.9, 0.9, 0.9))}, DEPTHS, costs)
    found = _by_name(prediction)
    assert prediction.verdict.pays and prediction.verdict.best == "exit"
    assert prediction.verdict.headline.startswith("Early exit pays: ")
    assert found["exit"].policy.depth == 2  # the others are no more right and cost more
    assert found["exit"].speedup["all"] > 1.5
    assert found["lookup"].speedup["all"] == pytest.approx(1.0, abs=0.02)
    assert found["hybrid"].speedup["all"] == pytest.approx(found["exit"].speedup["all"], abs=0.02)


def test_exits_that_are_wrong_do_not_pay() -> None:
    costs = toy_costs(layers=LAYERS, head=2.0, row=0.2)
    verdict = predict({"text": _texts((0.03, 0.04, 0.3))}, DEPTHS, costs).verdict
    assert not verdict.pays and verdict.best == "full"
    assert verdict.headline == "Early exit does not pay here: run every layer for every token"
    assert any("an exit breaks even at" in reason and "after layer 2 with" in reason for reason in verdict.reasons)


def test_where_lookup_does_it_all_early_exit_adds_nothing() -> None:
    costs = toy_costs(layers=LAYERS, row=0.05)
    prediction = predict({"json": _texts((0.5, 0.5, 0.5), repeat=True)}, DEPTHS, costs)
    assert not prediction.verdict.pays and prediction.verdict.best == "lookup"
    assert _by_name(prediction)["lookup"].speedup["all"] > 2


def test_no_exit_that_agrees_at_all() -> None:
    prediction = predict({"text": _texts((0.0, 0.0, 0.0))}, DEPTHS, toy_costs(layers=LAYERS))
    assert not prediction.verdict.pays
    assert any("no layer before the last agrees" in reason for reason in prediction.verdict.reasons)
    assert _by_name(prediction)["exit"].policy == Policy("full")


def test_unverified_exits_stay_within_their_budget() -> None:
    texts = {"json": _texts((0.6, 0.7, 0.8)), "code": _texts((0.3, 0.4, 0.5), seed=1)}
    found = _by_name(predict(texts, DEPTHS, toy_costs(layers=LAYERS, head=0.2, host=0.0)))
    # Sure exactly where it is right: nothing changes, and as many leave as the buffer lets.
    for name in ("budget 0.5%", "budget 1.0%", "budget 5.0%"):
        assert found[name].wrong == 0 and found[name].exited > 0.4 and found[name].speedup["all"] > 1
    assert found["budget 1.0%"].speedup["json"] > found["budget 1.0%"].speedup["code"]


def test_the_figure_is_not_from_the_prompts_that_chose_the_parameters() -> None:
    # Every other text favours the first exit, the others the third: what either half chooses is bad for the other.
    even, odd = _texts((0.95, 0.0, 0.0), count=5), _texts((0.0, 0.0, 0.95), count=5, seed=1)
    texts = {"text": [text for pair in zip(even, odd, strict=True) for text in pair]}
    costs = toy_costs(layers=LAYERS, head=0.5, host=0.0, row=0.02)
    assert _by_name(predict(texts, DEPTHS, costs))["exit"].speedup["all"] < 1
    assert _by_name(predict({"text": even + even}, DEPTHS, costs))["exit"].speedup["all"] > 1.5


def test_a_single_prompt_is_judged_on_itself_and_says_so() -> None:
    costs = toy_costs(layers=LAYERS, head=0.5, host=0.0, row=0.02)
    prediction = predict({"text": _texts((0.9, 0.9, 0.9), count=1)}, DEPTHS, costs)
    assert not prediction.apart and not prediction.verdict.certain and prediction.verdict.few == "text"
    assert _by_name(prediction)["exit"].speedup["all"] > 1.5


def test_kinds_of_one_prompt_each_fall_in_both_halves() -> None:
    texts = {kind: _texts((0.9, 0.9, 0.9), count=1, seed=seed) for seed, kind in enumerate("ab")}
    assert predict(texts, DEPTHS, toy_costs(layers=LAYERS)).apart


def test_an_interval_covers_the_mean_and_shrinks_with_prompts() -> None:
    costs = toy_costs(layers=LAYERS, head=0.5, host=0.0, row=0.02)

    def width(count: int) -> float:
        found = _by_name(predict({"text": _texts((0.6, 0.7, 0.8), count=count)}, DEPTHS, costs))["exit"]
        assert found.low < found.speedup["all"] < found.high
        return found.high - found.low

    assert width(80) < 0.5 * width(8)


def test_a_verdict_near_the_limit_is_not_certain() -> None:
    clear = predict({"text": _texts((0.9, 0.9, 0.9))}, DEPTHS, toy_costs(layers=LAYERS, head=0.5, host=0.0, row=0.02))
    assert clear.verdict.certain
    speed = {}
    for head in np.geomspace(0.5, 60, 24):  # ever dearer looks, until drafting no longer pays
        found = predict({"text": _texts((0.7, 0.8, 0.9))}, DEPTHS, toy_costs(layers=LAYERS, head=head, row=0.05))
        speed[found.verdict.certain, found.verdict.pays] = found
    assert {pays for certain, pays in speed if certain} == {True, False}
    assert any(not certain for certain, _ in speed)


@pytest.mark.parametrize("rows", [1, 3, 12])
def test_tables_of_other_row_counts(rows: int) -> None:
    costs = toy_costs(layers=LAYERS, head=0.5, host=0.0, row=0.02, rows=rows)
    assert predict({"text": _texts((0.9, 0.9, 0.9))}, DEPTHS, costs).breakeven[0].depth == 2


def test_a_model_of_one_depth_has_no_exit() -> None:
    texts = [Recorded((), text.tokens, text.agrees[:, -1:], text.entropy[:, -1:]) for text in _texts((0.9, 0.9, 0.9))]
    verdict = predict({"text": texts}, (LAYERS,), toy_costs(layers=LAYERS)).verdict
    assert not verdict.pays and "the model shows no layer before its last" in verdict.reasons


def test_break_even_is_where_a_replay_breaks_even() -> None:
    costs = toy_costs(layers=LAYERS, head=0.5, row=0.05)
    needed = needed_agreement(costs, 2)
    assert needed is not None and 0.1 < needed < 0.9
    texts = [text for seed in range(20) for text in _texts((needed, needed, needed), sure=0.0, count=10, seed=seed)]
    replay = Replay(costs)

    def speedup(length: int) -> float:
        tallies = [replay(Policy("exact", place=0, depth=2, length=length), text) for text in texts]
        return sum(t.tokens for t in tallies) * costs.step_ms(1) / sum(t.ms for t in tallies)

    best = max(speedup(length) for length in range(1, 8))
    assert best == pytest.approx(1.0, abs=0.02)


def test_an_exit_that_costs_more_than_it_saves_cannot_break_even() -> None:
    assert needed_agreement(toy_costs(layers=LAYERS, head=100.0, row=1.0), 6) is None


def test_nearly_free_rows() -> None:
    costs = nearly_free_rows(toy_costs(row=0.5))
    assert costs.step_ms(1) == toy_costs().step_ms(1)
    assert costs.layers_ms(0, 4, 8) == pytest.approx(4 * 1.14)


def test_geometric_mean() -> None:
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
