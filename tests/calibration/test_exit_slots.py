"""Exits in many slots: against torch, one text at a time, and against themselves in other company."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from exit_reference import ExitReference, entropy, lens
from numpy.typing import NDArray
from tiny_exits import make_calibration

from eexport.calibration.corpus import Corpus
from eexport.calibration.exit_records import ExitRecord, accepted_lengths, record_exits
from eexport.calibration.exit_slots import ExitRows, ExitSlots, run_exits
from eexport.calibration.generate import Job, Lengths, generate
from eexport.calibration.slots import Slots
from eexport.models.exits_file import read_calibration, write_calibration
from eexport.runtime.backend_ort import OrtBackend
from eexport.runtime.errors import EexportError
from eexport.runtime.manifest import read_manifest

Make = Callable[..., Path]

LAYERS, ANSWER, CAPACITY = 6, 12, 40
HEADS: dict[int, tuple[str, ...]] = {
    2: ("hidden", "hidden.2"),
    4: ("hidden", "embedding", "hidden.1"),
    5: ("hidden.4", "previous", "hidden.3"),
    6: ("embedding", "previous"),
}
KINDS = ("code", "math", "text")


def prompts(count: int) -> list[tuple[int, ...]]:
    random = np.random.default_rng(0)
    return [tuple(random.integers(3, 300, random.integers(1, 12)).tolist()) for _ in range(count)]


def open_slots(bundle: Path, backend: OrtBackend, slots: int) -> ExitSlots:
    return ExitSlots(bundle, read_manifest(bundle), backend, slots, CAPACITY)


class Forced:
    """A text whose tokens are given, which asks about every row."""

    asks = True

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens, self.rows = tokens, list[ExitRows]()

    def take(self) -> int:
        return self.tokens[len(self.rows)]

    def put(self, row: ExitRows) -> bool:
        self.rows.append(row)
        return len(self.rows) == len(self.tokens)


def rows_of(slots: ExitSlots, texts: Sequence[Sequence[int]]) -> list[ExitRows]:
    running = [Forced(text) for text in texts]
    run_exits(slots, running, lambda _: None)
    return [ExitRows.join(text.rows) for text in running]


class TestSlots:
    # Depth 4 is the end of a block, or within one that gives it out.
    @pytest.mark.parametrize(("heads", "blocks"), [(HEADS, "auto"), ({5: HEADS[5], 6: HEADS[6]}, "5")])
    @pytest.mark.parametrize("arch", ["llama", "qwen3"])
    def test_each_text_is_as_torch_has_it(
        self,
        arch: str,
        heads: dict[int, tuple[str, ...]],
        blocks: str,
        backend: OrtBackend,
        tiny_checkpoint: Make,
        tiny_calibration: Make,
        tiny_bundle: Make,
    ) -> None:
        checkpoint = tiny_checkpoint(arch, layers=LAYERS)
        place = tiny_calibration(checkpoint, heads=heads, predictor=(1, 2, 4))
        slots = open_slots(tiny_bundle(checkpoint, calibration=place, blocks=blocks), backend, 3)
        assert slots.depths == tuple(heads) and slots.exits == len(heads) - 1
        texts = [np.random.default_rng(seed).integers(3, 300, 14).tolist() for seed in range(3)]
        expected = [ExitReference(checkpoint, read_calibration(place))(text) for text in texts]
        for row in range(14):
            if row == 9:  # a slot is emptied, and begins anew while the others go on
                slots.lengths[1] = 0
            at = [row, row if row < 9 else row - 9, row]
            final = slots.step([text[place] for text, place in zip(texts, at, strict=True)])
            assert slots.predictor_logits is not None
            for slot, (by_head, predicted, full) in enumerate(expected):
                here = at[slot]
                assert final[slot] == pytest.approx(full[here], abs=1e-4)
                assert slots.predictor_logits[slot] == pytest.approx(predicted[here], abs=1e-4)
                for found, logits in zip(slots.head_logits, by_head, strict=True):
                    assert found[slot] == pytest.approx(logits[here], abs=1e-4)
                    assert logits.std() > 0.3, "the head has nothing to say"

    def test_read(self, backend: OrtBackend, tiny_checkpoint: Make, tiny_calibration: Make, tiny_bundle: Make) -> None:
        checkpoint = tiny_checkpoint(layers=LAYERS)
        place = tiny_calibration(checkpoint, heads=HEADS, predictor=(1, 2, 4))
        slots = open_slots(tiny_bundle(checkpoint, calibration=place), backend, 2)
        texts = prompts(5)
        reference, draft = ExitReference(checkpoint, read_calibration(place)), read_calibration(place).draft_ids
        for text, rows in zip(texts, rows_of(slots, texts), strict=True):
            by_head, predicted, full = reference(text)
            assert rows.predicted.tolist() == predicted.argmax(1).tolist()
            assert rows.final_tokens.tolist() == full.argmax(1).tolist()
            assert rows.final_entropy == pytest.approx([entropy(row) for row in full], abs=1e-4)
            for index, logits in enumerate(by_head):
                assert rows.tokens[:, index].tolist() == draft[logits.argmax(1)].tolist()
                assert rows.entropy[:, index] == pytest.approx([entropy(row) for row in logits], abs=1e-4)

    @pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
    def test_bits_do_not_depend_on_company(
        self, precision: str, backend: OrtBackend, tiny_checkpoint: Make, tiny_calibration: Make, tiny_bundle: Make
    ) -> None:
        checkpoint = tiny_checkpoint(layers=LAYERS, soft=True)
        place = tiny_calibration(checkpoint, heads=HEADS, predictor=(1, 2, 4))
        bundle = tiny_bundle(checkpoint, calibration=place, precision=precision)
        texts = prompts(9)
        alone = rows_of(open_slots(bundle, backend, 1), texts)
        for count in (2, 5, 16):
            slots = open_slots(bundle, backend, count)
            # Twice in the same slots: what was in them before is forgotten.
            for together in (rows_of(slots, texts), rows_of(slots, texts[::-1])[::-1]):
                for one, other in zip(alone, together, strict=True):
                    for field in dataclasses.fields(ExitRows):
                        assert np.array_equal(getattr(one, field.name), getattr(other, field.name)), field.name

    def test_timing_leaves_everything_as_it_is(
        self, backend: OrtBackend, tiny_checkpoint: Make, tiny_calibration: Make, tiny_bundle: Make
    ) -> None:
        checkpoint = tiny_checkpoint(layers=LAYERS)
        place = tiny_calibration(checkpoint, heads=HEADS, predictor=(1, 2, 4))
        bundle = tiny_bundle(checkpoint, calibration=place)
        plain, timed = (open_slots(bundle, backend, 2) for _ in range(2))
        for token in range(5, 12):
            for slots in (plain, timed):
                slots.step([token, token + 50])
            seconds = timed.exit_seconds()
            assert len(seconds) == len(HEADS) + 1 and min(seconds) > 0
            for one, other in zip(plain.head_logits, timed.head_logits, strict=True):
                assert np.array_equal(one, other)

    def test_without_a_predictor_no_exit_is_named(
        self, backend: OrtBackend, tiny_checkpoint: Make, tiny_calibration: Make, tiny_bundle: Make
    ) -> None:
        checkpoint = tiny_checkpoint()
        slots = open_slots(
            tiny_bundle(checkpoint, calibration=tiny_calibration(checkpoint, predictor=None)), backend, 2
        )
        slots.step([5, 6])
        assert slots.read([1, 0]).predicted.tolist() == [2, 2]

    def test_a_bundle_without_exits_is_refused(
        self, backend: OrtBackend, tiny_checkpoint: Make, tiny_bundle: Make
    ) -> None:
        with pytest.raises(EexportError, match="has no trained exits: build it with a calibration$"):
            open_slots(tiny_bundle(tiny_checkpoint()), backend, 2)


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Make) -> Path:
    return tiny_checkpoint(layers=LAYERS)


@pytest.fixture(scope="module")
def calibrated(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads that agree with the full model now and then; the last, at full depth, always."""
    heads = {depth: ("hidden",) for depth in HEADS}
    place = tmp_path_factory.mktemp("calibration") / "tiny"
    write_calibration(lens(make_calibration(checkpoint, heads, draft=320, predictor=(1, 2, 4)), checkpoint), place)
    return place


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, calibrated: Path, tiny_bundle: Make) -> Path:
    return tiny_bundle(checkpoint, calibration=calibrated)


def write_corpus(folder: Path, bundle: Path, backend: OrtBackend) -> Corpus:
    """Eleven texts in three kinds, written without the exits."""
    jobs = [Job(KINDS[i % 3], "made", ids, 0, split="tune") for i, ids in enumerate(prompts(11))]
    corpus = Corpus(folder, {})
    slots = Slots(bundle, read_manifest(bundle), backend, 4, CAPACITY)
    generate(slots, jobs, corpus, Lengths(ANSWER), lambda *_: None)
    return corpus


@pytest.fixture(scope="module")
def corpus(bundle: Path, backend: OrtBackend, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts", bundle, backend)


class TestRecords:
    def test_against_torch(
        self, bundle: Path, corpus: Corpus, checkpoint: Path, calibrated: Path, backend: OrtBackend
    ) -> None:
        numbers, told = [7, 2, 10, 3, 0], list[tuple[int, int]]()
        record, differing = record_exits(open_slots(bundle, backend, 2), corpus, numbers, lambda *at: told.append(at))
        assert told == [(done, 5) for done in (1, 2, 3, 4, 5)]
        assert differing.tolist() == [0] * 5  # bit for bit what was recorded
        assert record.kinds == tuple(KINDS[number % 3] for number in numbers)
        correct = np.array([1.0, 0.0, np.nan, 1.0, 1.0])
        traces, start = record.traces(correct), 0
        assert (traces.depths, traces.num_layers) == ((2, 4, 5), LAYERS)
        assert traces.correct is correct
        reference = ExitReference(checkpoint, read_calibration(calibrated))
        for number, length in zip(numbers, traces.lengths, strict=True):
            text, rows = corpus[number], slice(start, start + int(length))
            by_head, predicted, full = reference(text.tokens.tolist())
            assert length == text.info.length - text.info.answer + 1
            assert np.array_equal(record.rows.final_tokens[rows], text.top_ids[text.answer_rows, 0])
            assert traces.final_entropy[rows] == pytest.approx(text.entropy[text.answer_rows], abs=1e-6)
            assert traces.predicted[rows].tolist() == predicted[text.answer_rows].argmax(1).tolist()
            target = full[text.answer_rows].argmax(1)
            for index, logits in enumerate(by_head[:3]):
                own = logits[text.answer_rows]
                assert traces.agrees[rows, index].tolist() == (own.argmax(1) == target).tolist()
                assert traces.entropy[rows, index] == pytest.approx([entropy(row) for row in own], abs=1e-4)
            start += int(length)
        assert 0.05 < traces.agrees.mean() < 0.95, "the heads are all right or all wrong"
        # Full depth, no layer of its own: a drafting head's row says what the full model's row says.
        assert record.rows.agrees[:, 3].all()
        assert record.rows.entropy[:, 3] == pytest.approx(record.rows.final_entropy, abs=1e-3)

    def test_slots_and_order_change_nothing(self, bundle: Path, corpus: Corpus, backend: OrtBackend) -> None:
        numbers = list(range(len(corpus)))
        one, _ = record_exits(open_slots(bundle, backend, 1), corpus, numbers, lambda *_: None)
        other, _ = record_exits(open_slots(bundle, backend, 16), corpus, numbers[::-1], lambda *_: None)
        back = other.traces(np.full(len(numbers), np.nan)).pick(numbers[::-1])
        assert other.pick(numbers[::-1]).accepted() == one.accepted()
        for name in ("lengths", "predicted", "entropy", "agrees", "final_entropy"):
            assert np.array_equal(getattr(one.traces(back.correct), name), getattr(back, name))

    def test_texts_of_another_model(
        self,
        bundle: Path,
        corpus: Corpus,
        backend: OrtBackend,
        tmp_path: Path,
        tiny_checkpoint: Make,
        tiny_calibration: Make,
        tiny_bundle: Make,
    ) -> None:
        other = tiny_checkpoint(layers=LAYERS, seed=1)
        strange = tiny_bundle(other, calibration=tiny_calibration(other, heads=HEADS))
        with pytest.raises(EexportError, match=r"^text \d+ of the recorded ones: .*of another model") as caught:
            record_exits(open_slots(strange, backend, 4), corpus, range(11), lambda *_: None)
        assert "\n" not in str(caught.value)
        # A row here and there, as another precision makes them, is counted.
        texts = [corpus[number] for number in range(3)]
        top_ids = texts[1].top_ids.copy()
        top_ids[[0, -1], 0] += 1  # the first is a prompt's, or the answer's only one
        altered = Corpus(tmp_path / "texts", {})
        altered.append([texts[0], dataclasses.replace(texts[1], top_ids=top_ids), texts[2]])
        _, differing = record_exits(open_slots(bundle, backend, 4), altered, [2, 1], lambda *_: None)
        assert differing.tolist() == [0, 1 if texts[1].info.answer > 1 else 2]


def made_rows(agrees: Sequence[Sequence[int]]) -> ExitRows:
    right = np.array(agrees)
    rows, heads = right.shape
    zeros: NDArray[np.float32] = np.zeros(rows, np.float32)
    return ExitRows(
        np.zeros(rows, np.int64), 1 - right, np.zeros((rows, heads), np.float32), np.zeros(rows, int), zeros
    )


class TestAccepted:
    def test_by_hand(self) -> None:
        first, second = [1, 1, 1, 1, 0, 1], [1, 0, 1]  # two texts
        agrees = np.array([first + second, [0] * 9, [1] * 9], bool).T
        found = accepted_lengths(agrees, np.array([6, 3]))
        assert found[:, 0].tolist() == [3, 3, 2, 1, 0, 1, 1, 0, 1]
        assert not found[:, 1].any()
        assert found[:, 2].tolist() == [3, 3, 3, 3, 2, 1, 3, 2, 1]
        assert accepted_lengths(agrees, np.array([6, 3]), 1).tolist() == agrees.astype(int).tolist()
        assert accepted_lengths(agrees, np.array([9]), 9)[:, 2].tolist() == [9, 8, 7, 6, 5, 4, 3, 2, 1]

    def test_against_a_loop(self) -> None:
        random = np.random.default_rng(0)
        lengths = random.integers(1, 9, 40)
        agrees = random.random((int(lengths.sum()), 2)) < 0.7
        expected, start = [], 0
        for length in lengths.tolist():
            for at in range(start, start + length):
                runs = []
                for head in range(2):
                    run = 0
                    while run < 4 and at + run < start + length and agrees[at + run, head]:
                        run += 1
                    runs.append(run)
                expected.append(runs)
            start += length
        assert accepted_lengths(agrees, lengths, 4).tolist() == expected

    def test_means_by_kind(self) -> None:
        rows = made_rows([[1, 0], [1, 0], [0, 0], [1, 1], [1, 1]])
        record = ExitRecord((2, 4), 4, np.array([2, 1, 2]), ("code", "math", "code"), rows)
        assert record.accepted() == {
            "all": pytest.approx([(2 + 1 + 0 + 2 + 1) / 5, (2 + 1) / 5]),
            "code": pytest.approx([6 / 4, 3 / 4]),
            "math": [0, 0],
        }
        assert record.accepted(1)["code"] == [1, 0.5]
        picked = record.pick([2, 1])
        assert picked.kinds == ("code", "math") and picked.lengths.tolist() == [2, 1]
        assert picked.rows.agrees.tolist() == [[True, True], [True, True], [False, False]]
        assert record.traces(np.ones(3)).agrees[:, 0].tolist() == [True, True, False, True, True]
