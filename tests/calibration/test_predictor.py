"""The exit predictor: what it learns, and how it is scored."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from eexport.calibration.corpus import TOP, Corpus, Text, TextInfo
from eexport.calibration.predictor import predictor_scores, required_exits, train_predictor
from eexport.models.checkpoint import Checkpoint
from eexport.models.exit_decoder import predictor_logits
from eexport.models.exits import predictor_shapes

WIDTH, EXITS = 64, 2


def test_required_exits_by_hand() -> None:
    agrees = [
        [1, 1, 1],  # the first, as all agree
        [1, 0, 1],  # the third: what the first says does not last
        [0, 1, 1],
        [0, 0, 1],
        [1, 1, 0],  # full depth: not even the deepest agrees
        [0, 0, 0],
    ]
    assert required_exits(np.array(agrees, bool)).tolist() == [0, 2, 1, 2, 3, 3]
    assert required_exits(np.array([[True], [False]])).tolist() == [0, 1]


class TestTraining:
    """A toy rule: a state's first two numbers say which exit agrees."""

    @pytest.fixture
    def texts(self, tmp_path: Path) -> tuple[Corpus, list[NDArray[np.bool_]]]:
        random, corpus = np.random.default_rng(0), Corpus(tmp_path / "texts", {})
        made, agrees = [], []
        for number in range(60):
            states = {depth: random.standard_normal((80, WIDTH)).astype(np.float32) for depth in (1, 2, 3, 4, 6)}
            answer = 80 - 72 + 1  # the prompt's rows say nothing
            kept = states[2][answer - 1 :]
            kept[:, :2] *= 10
            agrees.append(np.stack([kept[:, 0] > 0, kept[:, 1] > 0], axis=1))
            bits = {
                depth: torch.tensor(state).bfloat16().view(torch.int16).numpy().view(np.uint16)
                for depth, state in states.items()
            }
            made.append(
                Text(
                    TextInfo(str(number), "text", "made", "predictor", 1, answer, 80),
                    np.zeros(80, np.int32),
                    bits,
                    np.zeros((80, TOP), np.int32),
                    np.zeros((80, TOP), np.float16),
                    np.zeros(80, np.float32),
                )
            )
        corpus.append(made)
        return corpus, agrees

    def test_it_learns(self, texts: tuple[Corpus, list[NDArray[np.bool_]]], opened: Checkpoint, tmp_path: Path) -> None:
        corpus, agrees = texts
        told = list[tuple[str, int, int]]()
        predictor, common = train_predictor(
            opened.spec, corpus, range(50), agrees[:50], 4, tmp_path / "p.pt", 0, lambda *at: told.append(at)
        )
        assert predictor.layers == (1, 2, 3, 4)
        shapes = {name: value.shape for name, value in predictor.tensors.items()}
        assert shapes == predictor_shapes(opened.spec, (1, 2, 3, 4), EXITS)
        assert told[-1] == ("training predictor", 8 * 50 * 72 // 512, 8 * 50 * 72 // 512)
        classes = np.concatenate([required_exits(one) for one in agrees[:50]])
        assert common == np.bincount(classes).argmax() == EXITS
        # On texts that it has not seen.
        tensors = {name: torch.from_numpy(value) for name, value in predictor.tensors.items()}
        right: list[bool] = []
        for number in range(50, 60):
            text = corpus[number]
            logits = predictor_logits(
                opened.spec, tensors, [_states(text, layer)[None, text.answer_rows] for layer in predictor.layers]
            )
            right += (logits[0].argmax(-1).numpy() == required_exits(agrees[number])).tolist()
        trivial = np.mean(np.concatenate([required_exits(one) for one in agrees[50:]]) == common)
        assert np.mean(right) > 0.85 > 0.6 > trivial

    def test_it_depends_on_the_seed_alone_and_can_be_interrupted(
        self, texts: tuple[Corpus, list[NDArray[np.bool_]]], opened: Checkpoint, tmp_path: Path
    ) -> None:
        corpus, agrees = texts

        def run(name: str, seed: int, stop_at: int = -1) -> dict[str, NDArray[np.float32]]:
            def progress(_: str, done: int, total: int) -> None:
                if done == stop_at:
                    raise KeyboardInterrupt

            state = tmp_path / f"{name}.pt"
            found, _ = train_predictor(opened.spec, corpus, range(60), agrees, 5, state, seed, progress)
            return dict(found.tensors)

        def equal(one: dict[str, NDArray[np.float32]], other: dict[str, NDArray[np.float32]]) -> bool:
            return all(np.array_equal(one[name], other[name]) for name in one)

        whole = run("whole", 0)
        assert equal(run("again", 0), whole) and not equal(run("other", 1), whole)
        for step in (3, 40):
            with pytest.raises(KeyboardInterrupt):
                run("parts", 0, stop_at=step)
        assert equal(run("parts", 0), whole)

    def test_few_rows_are_one_step(
        self, texts: tuple[Corpus, list[NDArray[np.bool_]]], opened: Checkpoint, tmp_path: Path
    ) -> None:
        corpus, agrees = texts
        told = list[tuple[str, int, int]]()
        predictor, _ = train_predictor(
            opened.spec, corpus, [3], agrees[3:4], 2, tmp_path / "p.pt", 0, lambda *at: told.append(at)
        )
        assert predictor.layers == (1, 2), "deeper ones have not run where a token may leave"
        assert told == [("training predictor", 1, 1)]

    def test_few_files_stay_open(
        self,
        texts: tuple[Corpus, list[NDArray[np.bool_]]],
        opened: Checkpoint,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("eexport.calibration.corpus._MAPPED", 2)
        corpus = Corpus(tmp_path / "parted", {})
        for start in range(0, 60, 4):
            corpus.append([texts[0][number] for number in range(start, start + 4)])
        before, most = len(os.listdir("/proc/self/fd")), 0

        def look(*_: object) -> None:
            nonlocal most
            most = max(most, len(os.listdir("/proc/self/fd")) - before)

        train_predictor(opened.spec, corpus, range(60), texts[1], 4, tmp_path / "p.pt", 0, look)
        assert most <= 2 * 9 + 1, "of two shards, and the state being written"


def _states(text: Text, layer: int) -> Tensor:
    return torch.tensor(text.hidden[layer].view(np.int16)).view(torch.bfloat16).float()


class TestScores:
    def test_by_hand(self) -> None:
        depths, sure = (2, 4, 10), np.log(np.array([0.9, 0.62, 0.62, 0.62, 0.5]))
        named, required = [0, 1, 1, 2, 0], [0, 1, 2, 0, 1]
        logits = np.full((5, 3), -np.inf)
        for row, (place, logprob) in enumerate(zip(named, sure, strict=True)):
            rest = np.log((1 - np.exp(logprob)) / 2)
            logits[row] = rest
            logits[row, place] = logprob
        found = predictor_scores(logits + 7.0, np.array(required), depths, trivial=1)
        assert found.tokens == 5
        assert found.exact == 2 / 5
        # Off by 0, 0, 6, 8 and 2 layers; by 0, 0, 1, 2 and 1 classes.
        assert (found.within_two_layers, found.within_one_exit) == (3 / 5, 4 / 5)
        # Always after layer 4: off by 2, 0, 6, 2 and 0 layers; by 1, 0, 1, 1 and 0 classes.
        assert found.trivial_class == 1
        assert (found.trivial_exact, found.trivial_within_two_layers, found.trivial_within_one_exit) == (0.4, 0.8, 1)
        assert found.too_shallow == 2 / 5
        assert found.confusion == [[1, 0, 1], [1, 1, 0], [0, 1, 0]]
        bins = [(0.5, 0.0, 1), (0.62, 1 / 3, 3), (0.9, 1.0, 1)]
        assert [pytest.approx(row) for row in bins] == found.reliability
        expected = (0.5 * 1 + abs(0.62 - 1 / 3) * 3 + 0.1 * 1) / 5
        assert found.calibration_error == pytest.approx(expected)

    def test_a_perfect_one(self) -> None:
        required = np.array([0, 1, 2, 1])
        found = predictor_scores(100.0 * np.eye(3)[required], required, (4, 8, 30), trivial=1)
        assert (found.exact, found.within_two_layers, found.within_one_exit, found.too_shallow) == (1, 1, 1, 0)
        assert found.calibration_error == 0 and found.reliability == [(1.0, 1.0, 4)]
        assert found.trivial_exact == 0.5
        assert found.confusion == [[1, 0, 0], [0, 2, 0], [0, 0, 1]]
