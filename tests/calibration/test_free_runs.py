"""Texts that run freely under an exit rule, and what that does to accuracy."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from exit_reference import ExitReference, lens
from tiny_exits import make_calibration

from eexport.calibration.accuracy import Answers, Marker, compare, full_record, measure_rules
from eexport.calibration.corpus import Corpus
from eexport.calibration.data import Encoded, Prompt
from eexport.calibration.exit_records import record_exits
from eexport.calibration.exit_slots import ExitRows, ExitSlots
from eexport.calibration.exit_traces import replay
from eexport.calibration.free_runs import FreeRun, run_again, run_freely
from eexport.calibration.generate import Job, Lengths, generate
from eexport.calibration.intervals import paired_loss
from eexport.calibration.slots import Slots
from eexport.models.exits_file import read_calibration, write_calibration
from eexport.runtime.backend_ort import OrtBackend
from eexport.runtime.exits import ExitRule
from eexport.runtime.manifest import read_manifest

Make = Callable[..., Path]

LAYERS, ANSWER, CAPACITY = 6, 14, 30
NEVER, ALWAYS = ExitRule((0.0,) * 3, math.inf), ExitRule((100.0,) * 3, math.inf)
# Of a vocabulary of 320, so at most ln 320 = 5.77 nats. Seldom exits where they are right.
SOMETIMES, SELDOM = ExitRule((5.2, 5.2, 5.2), 5.3), ExitRule((5.0, 5.0, 5.1), 5.2)
AFTER_SURE = ExitRule((5.5, 5.5, 5.5), 5.2)


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Make) -> Path:
    return tiny_checkpoint(layers=LAYERS)


@pytest.fixture(scope="module")
def calibrated(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exits that agree with the full model now and then."""
    heads = {2: ("hidden",), 4: ("hidden",), 5: ("hidden",), 6: ("hidden",)}
    place = tmp_path_factory.mktemp("calibration") / "tiny"
    write_calibration(
        lens(make_calibration(checkpoint, heads, draft=310, predictor=(1, 2, 4), seed=2), checkpoint), place
    )
    return place


@pytest.fixture(scope="module")
def reference(checkpoint: Path, calibrated: Path) -> ExitReference:
    return ExitReference(checkpoint, read_calibration(calibrated))


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, calibrated: Path, tiny_bundle: Make) -> Path:
    return tiny_bundle(checkpoint, calibration=calibrated)


@pytest.fixture(scope="module")
def slots(bundle: Path, backend: OrtBackend) -> ExitSlots:
    return ExitSlots(bundle, read_manifest(bundle), backend, 4, CAPACITY)


def prompts(count: int) -> list[tuple[int, ...]]:
    random = np.random.default_rng(2)
    return [tuple(random.integers(3, 300, random.integers(1, 12)).tolist()) for _ in range(count)]


def run(slots: ExitSlots, rule: ExitRule | None, count: int = 10) -> list[FreeRun]:
    return run_freely(slots, prompts(count), rule, ANSWER, lambda *_: None)


class TestFreeRuns:
    @pytest.mark.parametrize("rule", [NEVER, ALWAYS, SOMETIMES, SELDOM, AFTER_SURE])
    def test_against_torch(self, rule: ExitRule, slots: ExitSlots, reference: ExitReference) -> None:
        told = list[tuple[int, int]]()
        found = run_freely(slots, prompts(10), rule, ANSWER, lambda *at: told.append(at))
        assert told == [(done, 10) for done in range(1, 11)]
        for prompt, one in zip(prompts(10), found, strict=True):
            expected = reference.answer(prompt, rule, ANSWER)
            assert list(one.tokens) == expected.tokens
            assert list(one.depths) == expected.depths
            assert one.tried == expected.tried
            assert len(one.rows) == len(one.tokens)

    def test_the_rule_matters(self, slots: ExitSlots) -> None:
        """What the test above compares is not all the same."""
        full, ruled, early = (run(slots, rule) for rule in (NEVER, SOMETIMES, ALWAYS))
        assert {depth for one in full for depth in one.depths} == {LAYERS}
        assert {depth for one in early for depth in one.depths} == {2, 4, 5, LAYERS}
        left, tried, tokens = (
            sum(depth < LAYERS for one in ruled for depth in one.depths),
            sum(one.tried for one in ruled),
            sum(len(one.tokens) for one in ruled),
        )
        assert 0.1 * tokens < left < tried < 0.9 * tokens
        changed = [one.tokens != other.tokens for one, other in zip(full, ruled, strict=True)]
        assert any(changed)

    def test_never_is_what_was_recorded(
        self, slots: ExitSlots, bundle: Path, backend: OrtBackend, tmp_path: Path
    ) -> None:
        """An end-of-text token ends both, and is part of a run."""
        manifest = slots.manifest
        ending = run(slots, None)[3].tokens[2]
        model = dataclasses.replace(manifest.model, eos_token_ids=(ending,))
        manifest = dataclasses.replace(manifest, model=model)
        corpus = Corpus(tmp_path / "texts", {})
        jobs = [Job("text", "made", ids, 0, split="test") for ids in prompts(10)]
        generate(Slots(bundle, manifest, backend, 3, CAPACITY), jobs, corpus, Lengths(ANSWER), lambda *_: None)
        ended = 0
        own = ExitSlots(bundle, manifest, backend, 4, CAPACITY)
        for number, one in enumerate(run(own, None)):
            text = corpus[number]
            answer = text.tokens[text.info.answer :].tolist()
            stopped = one.tokens[-1] == ending
            ended += stopped
            assert list(one.tokens) == ([*answer, ending] if stopped else answer)
            assert ending not in one.tokens[:-1]
            assert stopped or len(one.tokens) == ANSWER
        assert 0 < ended < 10
        # What was said on the way is what a record of these texts holds.
        record, _ = record_exits(own, corpus, range(10), lambda *_: None)
        for start, one in zip(record.traces(np.ones(10)).starts, run(own, None), strict=True):
            rows = record.rows[start : start + len(one.tokens)]
            for field in dataclasses.fields(ExitRows):
                assert np.array_equal(getattr(rows, field.name), getattr(one.rows, field.name))

    def test_an_exit_may_end_a_text(self, slots: ExitSlots, bundle: Path, backend: OrtBackend) -> None:
        place, at = next(
            (i, at) for i, one in enumerate(run(slots, ALWAYS)) for at, d in enumerate(one.depths) if at and d < LAYERS
        )
        before = run(slots, ALWAYS)[place]
        model = dataclasses.replace(slots.manifest.model, eos_token_ids=(before.tokens[at],))
        own = ExitSlots(bundle, dataclasses.replace(slots.manifest, model=model), backend, 2, CAPACITY)
        end = before.tokens.index(before.tokens[at])
        after = run(own, ALWAYS)[place]
        assert (after.tokens, after.depths) == (before.tokens[: end + 1], before.depths[: end + 1])

    @pytest.mark.parametrize("rule", [NEVER, ALWAYS, SOMETIMES, SELDOM, AFTER_SURE, None])
    def test_again_is_the_same_but_faster(
        self, rule: ExitRule | None, slots: ExitSlots, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        full, expected, steps = run(slots, None), run(slots, rule), 0
        step = ExitSlots.step

        def counted(self: ExitSlots, token_ids: Sequence[int]) -> object:
            nonlocal steps
            steps += 1
            return step(self, token_ids)

        monkeypatch.setattr(ExitSlots, "step", counted)
        found = run_again(slots, prompts(10), full, rule, ANSWER, lambda *_: None)
        assert [(one.tokens, one.depths, one.tried) for one in found] == [
            (one.tokens, one.depths, one.tried) for one in expected
        ]
        changed = any(one.tokens != other.tokens for one, other in zip(full, found, strict=True))
        assert (steps > 0) == changed == (rule in (ALWAYS, SOMETIMES, AFTER_SURE))
        assert rule != SELDOM or any(depth < LAYERS for one in found for depth in one.depths)

    def test_a_rule_for_other_exits(self, slots: ExitSlots) -> None:
        with pytest.raises(ValueError, match="2 exits, where there are 3"):
            run(slots, ExitRule((0.5, 0.5), 1.0))

    def test_replay_bounds_what_runs(self, slots: ExitSlots) -> None:
        """Up to its first wrong token a run is the recorded text, so replaying finds every changed answer."""
        full = run(slots, None)
        found = [encoded(prompt) for prompt in prompts(10)]
        record = full_record(slots, found, Answers(full, np.ones(10)))
        changed = replay(record.traces(np.ones(10)), SOMETIMES).changed
        ruled = run(slots, SOMETIMES)
        assert [one.tokens != other.tokens for one, other in zip(full, ruled, strict=True)] == changed.tolist()


def encoded(ids: Sequence[int], kind: str = "math", answer: str = "1", **fields: object) -> Encoded:
    prompt = Prompt(kind, "?", "exact_match", answer, None, None, "", "made.jsonl:1")
    return Encoded(dataclasses.replace(prompt, **fields), tuple(ids), cut=False)  # type: ignore[arg-type]


def answer(tokens: Sequence[int], depths: Sequence[int], tried: int = 0) -> FreeRun:
    none, nothing = np.zeros(0, np.int64), np.zeros(0, np.float32)
    return FreeRun(tuple(tokens), tuple(depths), tried, ExitRows(none, none, nothing, none, nothing))


class TestAccuracy:
    def test_by_hand(self) -> None:
        prompts = [
            encoded([5], "math", source="gsm8k.jsonl:1"),
            encoded([6], "code", source="gsm8k.jsonl:2"),
            encoded([7], "math", source="own.jsonl:1"),
        ]
        full = Answers([answer([1, 2], [8, 8]), answer([3], [8]), answer([4], [8])], np.array([1.0, 0.0, np.nan]))
        ruled = Answers(
            [answer([1, 9, 9], [2, 8, 4], tried=3), answer([3], [4], tried=1), answer([4], [8])],
            np.array([0.0, 0.0, np.nan]),
        )
        found = compare(prompts, full, ruled, (2, 4))
        assert list(found.kinds) == ["code", "math"] and list(found.sources) == ["gsm8k.jsonl", "own.jsonl"]
        every = found.all
        assert (every.prompts, every.tokens, every.scored) == (3, 5, 2)
        assert (every.tried, every.left, every.layers) == pytest.approx((4 / 5, 3 / 5, (2 + 8 + 4 + 4 + 8) / 5))
        assert every.by_exit == pytest.approx((1 / 5, 2 / 5))
        assert every.same == pytest.approx(2 / 3)
        assert (every.before, every.after) == (0.5, 0.0)
        loss = paired_loss(np.array([True, False]), np.array([False, False]))
        assert every.accuracy is not None
        assert (every.accuracy.value, every.accuracy.low, every.accuracy.high) == pytest.approx(
            (-50, -100 * loss.high, -100 * loss.low)
        )
        own = found.sources["own.jsonl"]
        assert (own.scored, own.before, own.after, own.accuracy) == (0, None, None, None)
        assert found.kinds["code"].accuracy is not None and found.kinds["code"].accuracy.value == 0
        won = compare(prompts, ruled, full, (2, 4)).all.accuracy
        assert won is not None and won.value == 50

    def test_marks(self) -> None:
        mark = Marker(lambda tokens: " ".join(map(str, tokens)), run_code=False)
        assert (mark(encoded([5], answer="7"), [3, 7]), mark(encoded([5], answer="7"), [7, 3])) == (1, 0)
        assert math.isnan(mark(encoded([5], task=None), [7]))
        assert math.isnan(mark(dataclasses.replace(encoded([5], answer="7"), cut=True), [3, 7]))
        code = encoded([6], "code", task="pass_at_1", entry_point="f", test="assert f() == 1")
        assert math.isnan(mark(code, [1]))

    def test_equal_answers_are_judged_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = []

        def score(prompt: Prompt, text: str, run_code: bool) -> bool:
            asked.append(text)
            return True

        monkeypatch.setattr("eexport.calibration.accuracy.score", score)
        mark = Marker(lambda tokens: str(list(tokens)), run_code=True)
        for prompt, tokens in ((5, [1]), (5, [1]), (5, [2]), (6, [1])):
            assert mark(encoded([prompt]), tokens) == 1
        assert asked == ["[1]", "[2]", "[1]"]

    def test_rules_are_measured(self, slots: ExitSlots) -> None:
        """The right answer is made the full model's own, so that whatever differs is lost."""
        ids, full = prompts(10), run(slots, None)
        asked = [
            encoded(prompt, ("math", "code")[i % 2], answer="/".join(map(str, one.tokens)), source=f"{i % 3}.jsonl:4")
            for i, (prompt, one) in enumerate(zip(ids, full, strict=True))
        ]
        told = list[str]()
        mark = Marker(lambda tokens: "/".join(map(str, tokens)), run_code=False)
        rules = {"0.1pp": NEVER, "2pp": SOMETIMES}
        found, changes = measure_rules(slots, asked, rules, ANSWER, mark, lambda what, *_: told.append(what))
        assert [one.tokens for one in found.runs] == [one.tokens for one in full] and (found.correct == 1).all()
        never, sometimes = changes["0.1pp"].all, changes["2pp"].all
        assert (never.left, never.tried, never.layers, never.same) == (0, 0, LAYERS, 1)
        assert never.accuracy is not None and never.accuracy.value == 0 and never.accuracy.low < 0 < never.accuracy.high
        assert sometimes.accuracy is not None and 0 < sometimes.same < 1
        assert sometimes.accuracy.value == pytest.approx(-100 * (1 - sometimes.same))
        assert sometimes.after == pytest.approx(sometimes.same)
        ruled = run(slots, SOMETIMES)
        assert sometimes.layers == pytest.approx(np.mean([depth for one in ruled for depth in one.depths]))
        assert changes["2pp"].kinds["math"].tokens == sum(len(one.tokens) for one in ruled[::2])
        assert changes["2pp"].sources["1.jsonl"].tokens == sum(len(one.tokens) for one in ruled[1::3])
        assert set(told) == {"answering in full", "answering at 2pp"}  # at the other, nothing had to be run
