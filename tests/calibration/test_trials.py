"""Which heads are tried, trained and kept."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from toys import toy_costs

from eexport.calibration.batches import make_batch
from eexport.calibration.corpus import Corpus
from eexport.calibration.heads import DraftVocabulary, HeadForm, Scores, draft_vocabulary, scores
from eexport.calibration.payoff import Payoff
from eexport.calibration.train import Course
from eexport.calibration.trials import (
    Trained,
    Trainer,
    by_kind,
    candidate_forms,
    choose_draft,
    mean_survival,
    trial_epochs,
    worth_it,
)
from eexport.models.checkpoint import Checkpoint
from eexport.models.exits import ExitHead

EXIT = HeadForm("exit_04", 4, ("hidden",))
LAST = HeadForm("last", 6, ("previous", "embedding"), passes=2)
COSTS = toy_costs(layers=6)

Train = Callable[..., Trained]


@pytest.fixture(scope="module")
def draft(corpus: Corpus) -> DraftVocabulary:
    return draft_vocabulary(corpus, range(60), 320, 320)


@pytest.fixture
def train(corpus: Corpus, opened: Checkpoint, draft: DraftVocabulary, tmp_path: Path) -> Train:
    def run(
        form: HeadForm = EXIT,
        epochs: float = 1,
        seed: int = 0,
        progress: Callable[[str, int, int], None] = lambda *_: None,
    ) -> Trained:
        return Trainer(opened, corpus, draft, COSTS, tmp_path, seed).train(form, epochs, progress)

    return run


def same(one: Trained, other: Trained) -> bool:
    return all(np.array_equal(one.head.tensors[name], other.head.tensors[name]) for name in one.head.tensors)


class TestTrainer:
    @pytest.mark.parametrize(("form", "epochs"), [(EXIT, 12), (LAST, 24)])
    def test_a_head_learns_what_the_model_says(
        self, form: HeadForm, epochs: int, corpus: Corpus, opened: Checkpoint, draft: DraftVocabulary, tmp_path: Path
    ) -> None:
        trainer = Trainer(opened, corpus, draft, COSTS, tmp_path, 0)
        trained = trainer.train(form, epochs, lambda *_: None)
        assert (trained.head.name, trained.head.depth, trained.head.features) == (form.name, form.depth, form.features)
        assert trained.losses[-1] < 0.8 * trained.losses[0]
        numbers, task = corpus.of("train"), trainer.task(form)
        first = task.first_values(opened, 0)
        with torch.inference_mode():
            before = task.loss(first, make_batch(corpus, numbers))
            after = task.loss(
                {name: torch.from_numpy(value) for name, value in trained.head.tensors.items()},
                make_batch(corpus, numbers),
            )
        assert after < 0.8 * before
        # Passes over the rows of all train texts, but for where the last step ends.
        rows = sum(corpus.infos[number].length - corpus.infos[number].first for number in numbers)
        assert trained.tokens == pytest.approx(epochs * rows, rel=0.05)
        assert set(trained.payoff) == {corpus.infos[number].kind for number in corpus.of("tune")}
        assert trained.speedup == pytest.approx(
            np.exp(np.mean([np.log(one.speedup) for one in trained.payoff.values()]))
        )

    def test_interrupted_and_gone_on_with(self, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("eexport.calibration.trials.Course", partial(Course, save_every=3))
        whole = train(LAST, 3)
        (state,) = tmp_path.glob("last-*.pt")
        state.unlink()
        for step in (2, 8, 14):

            def stop(_: str, done: int, total: int, at: int = step) -> None:
                if done == at:
                    raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                train(LAST, 3, progress=stop)
            assert state.exists() == (step > 3)
        again = train(LAST, 3)
        assert same(again, whole)
        assert (again.losses, again.tokens, again.payoff) == (whole.losses, whole.tokens, whole.payoff)

    def test_states_are_of_one_course_only(self, train: Train, tmp_path: Path) -> None:
        one = train(EXIT, 1)
        others = [train(EXIT, 2), train(EXIT, 1, seed=1), train(LAST, 1)]
        assert len(list(tmp_path.glob("*.pt"))) == 4
        assert not any(same(one, other) for other in others[:2])
        assert same(train(EXIT, 1), one)

    def test_a_course_has_a_step_at_least(self, train: Train) -> None:
        told = list[tuple[str, int, int]]()
        train(EXIT, 0.001, progress=lambda *at: told.append(at))
        assert told == [("training exit_04", 1, 1)]


def trained(form: HeadForm, *speedups: float) -> Trained:
    payoff = {str(kind): Payoff(speedup, 1, 1.0, 1.0, 1.0) for kind, speedup in enumerate(speedups)}
    return Trained(ExitHead(form.name, form.depth, form.features, {}), form, [], 0, payoff)


class TestChoice:
    def test_every_boundary_is_tried_and_the_last_state(self) -> None:
        forms = candidate_forms((4, 8), 30)
        assert [(form.name, form.depth, form.features) for form in forms] == [
            ("exit_04", 4, ("hidden",)),
            ("exit_08", 8, ("hidden",)),
            ("last", 30, ("previous", "embedding")),
        ]
        assert [form.passes for form in forms] == [1, 1, 2]

    def test_what_pays_is_kept(self) -> None:
        four, eight, last = candidate_forms((4, 8), 30)

        def kept(*gains: float) -> list[HeadForm]:
            trials = [trained(form, gain) for form, gain in zip((four, eight, last), gains, strict=True)]
            return worth_it(trials, 30)

        assert kept(1.1, 1.2, 1.3) == [four, eight, last]
        assert kept(1.1, 1.0, 1.3) == [four, last]
        assert kept(1.0, 1.0, 1.3) == [four, last], "an exit in any case, the shallowest of equals"
        assert kept(0.9, 1.0, 1.0) == [eight]

    def test_a_speedup_is_a_mean_over_kinds(self) -> None:
        assert trained(EXIT, 1.0, 1.44).speedup == pytest.approx(1.2)

    def test_a_trial_is_short(self) -> None:
        assert trial_epochs(5) == pytest.approx(0.5)


class TestDraft:
    def test_the_size_follows_cost_and_coverage(self, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("eexport.calibration.trials._DRAFT_SIZES", (20, 100, 320, 640))
        counted, coverage = choose_draft(corpus, COSTS, 2, 320)
        assert list(coverage) == [20, 100, 320] and coverage[320] == 1.0
        said = [int(t) for n in corpus.of("predictor") for t in corpus[n].top_ids[corpus[n].answer_rows, 0]]
        for size, share in coverage.items():
            ids = draft_vocabulary(corpus, corpus.of("train"), size, 320).ids
            assert share == pytest.approx(np.isin(said, ids).mean())
        assert coverage[20] < coverage[100] < 1
        gains = {size: share / (3 + 2 * size / 320) for size, share in coverage.items()}
        assert len(counted.ids) == max(size for size in gains if gains[size] >= 0.99 * max(gains.values()))
        assert np.array_equal(counted.ids, draft_vocabulary(corpus, corpus.of("train"), len(counted.ids), 320).ids)
        heavy, _ = choose_draft(corpus, toy_costs(layers=6, layer=0.01, head=50), 2, 320)
        assert len(heavy.ids) == 20

    def test_a_small_vocabulary_is_drafted_whole(self, corpus: Corpus) -> None:
        found, coverage = choose_draft(corpus, COSTS, 2, 320)
        assert coverage == {320: 1.0} and found.ids.tolist() == list(range(320))


class TestScores:
    def test_long_texts_count_more(self) -> None:
        def scored(*marks: bool) -> Scores:
            return Scores(np.array([marks]), np.zeros(len(marks), np.float32))

        shares = mean_survival([scored(True, True, True), scored(False)])
        assert shares[:4].tolist() == pytest.approx([3 / 4, 2 / 4, 1 / 4, 0])

    def test_by_kind(self, corpus: Corpus, opened: Checkpoint, draft: DraftVocabulary, tmp_path: Path) -> None:
        task = Trainer(opened, corpus, draft, COSTS, tmp_path, 0).task(EXIT)
        head = ExitHead(
            "exit_04", 4, ("hidden",), {name: value.numpy() for name, value in task.first_values(opened, 0).items()}
        )
        numbers = [9, 2, 5, 13]
        found = scores(task, head, corpus, numbers)
        groups = by_kind(corpus, numbers, found)
        assert list(groups) == ["json", "math"]
        assert groups["math"] == [found[1]] and groups["json"] == [found[0], found[2], found[3]]
