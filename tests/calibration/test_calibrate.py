"""A calibration's stages, and that what it says of exits is what torch computes from the exits it gives."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exit_reference import ExitReference, entropy
from numpy.typing import NDArray

from eexport.calibration import accuracy, held_out
from eexport.calibration import calibrate as module
from eexport.calibration.calibrate import REPORTED, Settings, calibrate
from eexport.calibration.corpus import SPLITS, Corpus
from eexport.calibration.data import Prompt
from eexport.calibration.exit_traces import ExitTraces
from eexport.calibration.generate import Lengths
from eexport.calibration.heads import HeadTask
from eexport.calibration.predictor import required_exits
from eexport.calibration.texts import Opened, Request, open_corpus, open_texts
from eexport.calibration.thresholds import Budget, Chosen, choose
from eexport.export.build import BuildOptions, build
from eexport.models.checkpoint import Checkpoint, open_checkpoint
from eexport.models.exits import Calibration, check_fits
from eexport.models.exits_file import read_calibration, write_calibration
from eexport.runtime.console import Progress
from eexport.runtime.errors import EexportError
from eexport.runtime.manifest import Manifest

ANSWER = 6


def build_bundle(checkpoint: Checkpoint, folder: Path, calibration: Path | None, progress: Progress) -> Manifest:
    blocks = "2,4" if calibration is None else "auto"
    return build(checkpoint, folder, BuildOptions("fp32", blocks=blocks, calibration=calibration), progress)


@dataclass
class Run:
    """A calibration, and what it was made from."""

    opened: Opened
    request: Request
    work: Path
    result: Calibration
    tuned: list[ExitTraces]

    @property
    def corpus(self) -> Corpus:
        return open_corpus(self.opened, self.request, self.work / "texts")

    @property
    def record(self) -> dict[str, Any]:
        return self.result.record


@pytest.fixture(scope="module")
def run(opened: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("calibrate")
    rows = [{"kind": ("math", "text")[n % 2], "prompt": f"{n} and so on"} for n in range(6)]
    (folder / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    request = Request(
        test_data=[folder / "held.jsonl"],
        prompts=60,
        lengths=Lengths(ANSWER, 6),
        precision="fp32",
        boundaries=(2, 4),
        seed=1,
    )
    texts, settings = open_texts(opened, request), Settings(epochs=1, exits=(2, 4), seed=1)
    tuned = list[ExitTraces]()

    def watched(traces: ExitTraces, budget: Budget, confidence: float, seed: int, own: Any) -> Chosen:
        tuned.append(traces)
        return choose(traces, budget, confidence, seed, own)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "choose", watched)
        result = calibrate(texts, request, settings, folder / "work", build_bundle, lambda *_: None)
    return Run(texts, request, folder / "work", result, tuned)


@pytest.fixture(scope="module")
def reference(run: Run, six_layers: Path, tmp_path_factory: pytest.TempPathFactory) -> ExitReference:
    """The exits as they are read back from the disk, in torch."""
    place = tmp_path_factory.mktemp("stored") / "exits"
    write_calibration(run.result, place)
    return ExitReference(six_layers, read_calibration(place))


def numbers_of(corpus: Corpus, source: str) -> list[int]:
    return [number for number in corpus.of("test") if corpus.infos[number].source == source]


class TestRecord:
    def test_the_result_fits_the_checkpoint(self, run: Run, opened: Checkpoint) -> None:
        check_fits(run.result, opened, "made")
        assert [(head.name, head.depth) for head in run.result.heads] == [("exit_02", 2), ("exit_04", 4), ("last", 6)]
        assert run.result.predictor is not None and run.result.predictor.layers == (1, 2), "up to the first exit"
        assert json.loads(json.dumps(run.record, allow_nan=False)) == json.loads(json.dumps(run.record))

    def test_agreement_is_that_of_the_stored_heads(self, run: Run, reference: ExitReference) -> None:
        corpus, draft = run.corpus, run.result.draft_ids
        for source in ("held.jsonl", "written"):
            agreed: dict[str, list[list[bool]]] = {}
            for number in numbers_of(corpus, source):
                text = corpus[number]
                by_head, _, _ = reference(text.tokens.tolist())
                right = [draft[logits.argmax(1)] == text.top_ids[:, 0] for logits in by_head]
                for kind in ("all", text.info.kind):
                    agreed.setdefault(kind, []).extend(np.stack(right, axis=1)[text.answer_rows].tolist())
            for place, head in enumerate(run.record["heads"]):
                expected = {kind: np.mean([row[place] for row in rows]) for kind, rows in agreed.items()}
                assert head["agreement"][source] == pytest.approx(expected)
                if head["name"] != "last":
                    assert 1 < head["accepted_of_3"][source]["all"] / head["agreement"][source]["all"] < 3
        assert 0.05 < run.record["heads"][1]["agreement"]["written"]["all"] < 0.95

    def test_the_predictor_is_scored_on_what_the_exits_say(self, run: Run, reference: ExitReference) -> None:
        corpus, draft = run.corpus, run.result.draft_ids
        for source, found in run.record["predictor"]["test"].items():
            confusion = np.zeros((3, 3), int)
            for number in numbers_of(corpus, source):
                text = corpus[number]
                by_head, predicted, _ = reference(text.tokens.tolist())
                right = [draft[logits.argmax(1)] == text.top_ids[:, 0] for logits in by_head[:2]]
                required = required_exits(np.stack(right, axis=1)[text.answer_rows])
                np.add.at(confusion, (required, predicted.argmax(1)[text.answer_rows]), 1)
            assert found["confusion"] == confusion.tolist()
            assert found["tokens"] == confusion.sum()

    def test_thresholds_see_tune_texts_only(self, run: Run, reference: ExitReference) -> None:
        corpus = run.corpus
        assert len(run.tuned) == len({*REPORTED, "2%tokens"}) and all(one is run.tuned[0] for one in run.tuned)
        traces, tune = run.tuned[0], corpus.of("tune")
        assert traces.lengths.tolist() == [len(corpus[number].entropy[corpus[number].answer_rows]) for number in tune]
        assert traces.kinds == tuple(corpus.infos[number].kind for number in tune)
        assert (traces.depths, traces.num_layers) == ((2, 4), 6)
        text = corpus[tune[0]]
        by_head, _, final = reference(text.tokens.tolist())
        own = [[entropy(row) for row in logits[text.answer_rows]] for logits in by_head[:2]]
        rows = slice(0, int(traces.lengths[0]))
        assert traces.entropy[rows] == pytest.approx(np.array(own).T, abs=1e-3)
        assert traces.final_entropy[rows] == pytest.approx([entropy(row) for row in final[text.answer_rows]], abs=1e-3)

    def test_the_splits_share_no_prompt(self, run: Run) -> None:
        corpus = run.corpus
        prompts = {
            split: {tuple(corpus[n].tokens[: corpus.infos[n].answer].tolist()) for n in corpus.of(split)}
            for split in SPLITS
        }
        assert sum(map(len, prompts.values())) == len(set().union(*prompts.values()))
        assert {split: found["texts"] for split, found in run.record["data"]["splits"].items()} == {
            split: len(found) for split, found in prompts.items()
        }
        assert run.record["thresholds"]["differing_rows"] == 0

    def test_what_it_took(self, run: Run) -> None:
        stages = run.record["stages"]
        assert all(seconds >= 0 for seconds in stages["seconds"].values())
        assert stages["peak_rss_mb"] > 100 and stages["disk_mb"] >= 1
        for head in run.record["heads"]:
            assert head["ms"] > 0 and len(head["losses"]) >= 1 and head["trained_tokens"] > 1000
        assert not run.record["trials"]  # as the exits were asked for


class TestScoring:
    @pytest.mark.parametrize("run_code", [False, True])
    def test_answers_that_have_a_task_are_scored(
        self, run_code: bool, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = list[tuple[str, str, bool]]()

        def score(prompt: Prompt, answer: str, run_code: bool) -> bool | None:
            asked.append((str(prompt.content), answer, run_code))
            return None if prompt.kind == "text" else prompt.content != "2 and so on"

        monkeypatch.setattr(accuracy, "score", score)
        (place,) = run.work.glob("bundle-*")
        held = held_out.measure(run.opened, run.corpus, place, run.request, run_code, lambda *_: None)
        corpus, part = run.corpus, held.test["held.jsonl"]
        assert {content for content, _, _ in asked} == {f"{n} and so on" for n in range(6)}
        assert {flag for _, _, flag in asked} == {run_code}
        by_content = {content: answer for content, answer, _ in asked}
        for number, correct in zip(part.numbers, part.correct, strict=True):
            text = corpus[number]
            content = str(run.opened.prompts[text.info.key].prompt.content)
            assert by_content[content] == run.opened.codec.decode(text.tokens[text.info.answer :].tolist())
            assert np.array_equal(
                correct, np.nan if int(content[0]) % 2 else float(content != "2 and so on"), equal_nan=True
            )
        assert np.isnan(held.test["written"].correct).all() and np.isnan(held.tune.correct).all()
        assert held.own.all()
        given = dataclasses.replace(run.request, data=run.request.test_data)
        held = held_out.measure(run.opened, run.corpus, place, given, run_code, lambda *_: None)
        assert not held.own.any(), "all texts to tune on were written by the model"

    def test_a_prompt_that_was_cut_has_no_score(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        cut = {key: dataclasses.replace(one, cut=True) for key, one in run.opened.prompts.items()}
        monkeypatch.setattr(accuracy, "score", lambda *_: True)
        (place,) = run.work.glob("bundle-*")
        opened = dataclasses.replace(run.opened, prompts=cut)
        held = held_out.measure(opened, run.corpus, place, run.request, False, lambda *_: None)
        assert np.isnan(held.test["held.jsonl"].correct).all()


class TestStages:
    def test_done_work_is_not_done_again(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        def never(*_: object) -> Manifest:
            raise AssertionError("it is there")

        told = set[str]()
        settings = Settings(epochs=1, exits=(2, 4), seed=1)
        again = calibrate(run.opened, run.request, settings, run.work, never, lambda what, *_: told.add(what))
        assert told == {"running exits"}
        for one, other in zip(again.heads, run.result.heads, strict=True):
            assert all(np.array_equal(one.tensors[name], other.tensors[name]) for name in one.tensors)
        assert again.thresholds == run.result.thresholds

    def test_a_loss_that_is_no_number(self, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        loss, calls = HeadTask.loss, 0

        def breaks(self: HeadTask, *arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            return loss(self, *arguments) * (np.nan if calls == 2 else 1)

        monkeypatch.setattr(HeadTask, "loss", breaks)
        settings = Settings(epochs=2, exits=(2, 4), seed=1)
        with pytest.raises(EexportError, match=r"^exit_02: the loss of step 2 is nan; [^\n]*exit_02-\w+\.pt: [^\n]*$"):
            calibrate(run.opened, run.request, settings, run.work, build_bundle, lambda *_: None)

    def test_a_damaged_cost_table(self, run: Run) -> None:
        path = run.work / "costs.json"
        before = path.read_text()
        path.write_text(before[:-40])
        with pytest.raises(EexportError, match=r"^[^\n]*costs.json: not a cost table [^\n]*$"):
            calibrate(run.opened, run.request, Settings(exits=(2, 4)), run.work, build_bundle, lambda *_: None)
        path.write_text(before)

    def test_too_few_texts(self, six_layers: Path, tmp_path: Path) -> None:
        request = Request(prompts=2, lengths=Lengths(ANSWER, 6), precision="fp32", boundaries=(2, 4))
        opened = open_texts(open_checkpoint(six_layers), request)
        with pytest.raises(
            EexportError, match=r"^no text is left to [a-z ]+ with: 130 are too few, give more --prompts"
        ):
            calibrate(opened, request, Settings(), tmp_path / "work", build_bundle, lambda *_: None)


def test_a_median_is_not_moved_by_a_slow_step(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Timed:
        capacity, calls = 9, 0

        def step(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
            self.calls += 1
            clock.append(clock[-1] + (5.0 if self.calls == 3 else 0.01))
            return np.zeros((1, 1), np.float32)

        def exit_seconds(self) -> list[float]:
            return [0.002, 0.001, 0.0001]

    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[-1])
    times: Callable[[Any], tuple[list[float], float]] = held_out._times
    timed = Timed()
    assert times(timed) == (pytest.approx([2, 1, 0.1]), pytest.approx(10 - 3.1))
    assert timed.calls == 9
