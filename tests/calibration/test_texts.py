"""What texts are written for a calibration: planned, refused, capped, gone on with."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny import make_checkpoint

from eexport.calibration import generate, texts
from eexport.calibration.corpus import SPLITS, Corpus
from eexport.calibration.data import builtin_prompts
from eexport.calibration.generate import Lengths
from eexport.calibration.jobs import WRITTEN
from eexport.calibration.synthesis import Beginnings
from eexport.calibration.texts import Opened, Request, open_corpus, open_texts, slot_count, write_texts
from eexport.models.checkpoint import Checkpoint, open_checkpoint
from eexport.runtime.errors import EexportError
from eexport.runtime.manifest import read_manifest

Make = Callable[..., Path]
WriteData = Callable[..., Path]

REQUEST = Request(prompts=20, lengths=Lengths(6, 5), precision="fp32", boundaries=(2, 4))


@pytest.fixture
def data(tmp_path: Path) -> WriteData:
    """A file of prompts, by kind where they are pairs."""

    def write(name: str, *prompts: str | tuple[str, str]) -> Path:
        rows = [{"prompt": one} if isinstance(one, str) else {"kind": one[0], "prompt": one[1]} for one in prompts]
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


@pytest.fixture(scope="session")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A model without chat template whose tokenizer begins a text with <s>."""
    folder = make_checkpoint(tmp_path_factory.mktemp("raw") / "tiny", layers=6, bos=True)
    (folder / "chat_template.jinja").unlink()
    return open_checkpoint(folder)


def written(opened: Opened, request: Request, folder: Path, bundle: Path) -> Corpus:
    corpus = open_corpus(opened, request, folder)
    write_texts(opened, request, corpus, bundle, lambda *_: None)
    return corpus


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


class TestPlan:
    def test_held_out_prompts_come_first_and_are_left_out_elsewhere(self, opened: Checkpoint, data: WriteData) -> None:
        given = data("own.jsonl", "a shared one", "one", ("math", "two"), ("code", "two"), "three")
        held = data("held.jsonl", "held", ("math", "a shared one"))
        request = dataclasses.replace(REQUEST, data=[given], test_data=[held], prompts=3)
        plan = open_texts(opened, request)
        assert [(job.source, job.split) for job in plan.jobs] == [
            *[("held.jsonl", "test")] * 2,
            *[("own.jsonl", None)] * 3,
            *[(WRITTEN, None)] * 3,
        ]
        assert len({job.ids for job in plan.jobs}) == 8, "no prompt twice, whatever its kind"
        assert plan.depths == [1, 2, 3, 4, 6]
        assert set(plan.prompts) == {encoded.hash for encoded in plan.prompts.values()} and len(plan.prompts) == 7

    def test_the_built_in_prompts_are_only_tested_on(self, opened: Checkpoint, two_exits: Path, tmp_path: Path) -> None:
        plan = open_texts(opened, dataclasses.replace(REQUEST, prompts=24))
        assert sum(job.split == "test" for job in plan.jobs) == len(builtin_prompts().prompts) == 128
        corpus = written(plan, REQUEST, tmp_path / "texts", two_exits)
        assert len(corpus) == 152 and {info.split for info in corpus.infos[:128]} == {"test"}
        keys = {split: {corpus.infos[number].key for number in corpus.of(split)} for split in SPLITS}
        assert sum(map(len, keys.values())) == len(set().union(*keys.values())) == 152
        assert len(keys["train"]) > 8 and keys["test"] > set(plan.prompts)

    def test_begun_prompts_stand_in_the_template(self, opened: Checkpoint, two_exits: Path, tmp_path: Path) -> None:
        plan = open_texts(opened, dataclasses.replace(REQUEST, prompts=8, seed=3))
        corpus = written(plan, REQUEST, tmp_path / "texts", two_exits)
        for index in range(8):
            beginning, text = Beginnings(3)[index], corpus[128 + index]
            assert (text.info.kind, text.info.source) == (beginning.kind, WRITTEN)
            ids = text.tokens[: text.info.answer].tolist()
            special = [token for token in ids if token < 3]
            assert special == [1, 2, 1]
            spelled = plan.codec.decode(ids)
            assert spelled.startswith(f"user\n{beginning.text}") and spelled.endswith("assistant")
            assert plan.codec.decode(ids[: text.info.first]) == "user\n"
        # Of a given prompt, too, the rows of the template's beginning are known.
        given = corpus[0]
        assert given.info.first == corpus[128].info.first
        assert plan.codec.decode(given.tokens[: given.info.first].tolist()) == "user\n"

    def test_without_a_chat_template(self, raw: Checkpoint, two_exits: Path, data: WriteData, tmp_path: Path) -> None:
        """A raw text goes on from its beginning, after what its tokenizer begins a text with."""
        request = dataclasses.replace(REQUEST, prompts=4, test_data=[data("held.jsonl", "held")])
        plan = open_texts(raw, request)
        corpus = written(plan, request, tmp_path / "texts", two_exits)
        held = corpus[0].tokens[: corpus.infos[0].answer].tolist()
        assert held[0] == 0 and plan.codec.decode(held) == "held"
        for index in range(4):
            text = corpus[1 + index]
            ids = text.tokens[: text.info.answer].tolist()
            assert ids[0] == 0 and plan.codec.decode(ids) == Beginnings(0)[index].text
            assert text.info.first == 1 and text.info.length > text.info.answer
        more = dataclasses.replace(request, prompts=6)
        assert len(written(open_texts(raw, more), more, tmp_path / "texts", two_exits)) == 7

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"prompts": 0}, "nothing to train on: give --prompts, --data"),
            ({"lengths": Lengths(512, 5)}, "--tokens: an answer of 512 does not fit in 512"),
            ({"lengths": Lengths(490, 5)}, "--prompts: .* take up to [0-9]+ tokens, the context is 512: lower"),
            ({"max_disk": 0}, "--max-disk: 0.0 GB hold 0 of 148 texts"),
            ({"max_disk": 10_000_000}, r"--max-disk: 0.0 GB hold [0-9]+ of 148 texts, too few"),
            ({"prompt_tokens": 1, "prompts": 0}, "nothing to train on"),
        ],
    )
    def test_what_cannot_be_is_one_line(self, change: dict[str, object], says: str, opened: Checkpoint) -> None:
        with pytest.raises(EexportError, match=rf"^[^\n]*{says}[^\n]*$"):
            open_texts(opened, dataclasses.replace(REQUEST, **change))  # type: ignore[arg-type]

    def test_rows_that_cannot_be_used_are_named(self, opened: Checkpoint, data: WriteData, tmp_path: Path) -> None:
        path = data("own.jsonl", "one", "two", "one")
        path.write_text(path.read_text() + "{}\n")
        plan = open_texts(opened, dataclasses.replace(REQUEST, data=[path]))
        assert [row.source for row in plan.skipped] == ["own.jsonl:4", "own.jsonl:3"]
        for missing in (tmp_path / "nowhere.jsonl", data("empty.jsonl")):
            for request in (
                dataclasses.replace(REQUEST, data=[missing]),
                dataclasses.replace(REQUEST, test_data=[missing]),
            ):
                with pytest.raises(EexportError, match=rf"^[^\n]*{missing.name}[^\n]*$"):
                    open_texts(opened, request)


class TestRoom:
    def test_texts_are_capped_by_disk(
        self, opened: Checkpoint, two_exits: Path, data: WriteData, tmp_path: Path
    ) -> None:
        request = dataclasses.replace(REQUEST, test_data=[data("held.jsonl", "held")], max_disk=600_000)
        plan = open_texts(opened, request)
        assert 8 <= len(plan.jobs) < 21
        assert plan.notes == [f"{len(plan.jobs)} of 21 texts are used, as the others would exceed --max-disk"]
        corpus = written(plan, request, tmp_path / "texts", two_exits)
        assert len(corpus) == len(plan.jobs)
        assert 100_000 < sum(map(len, files(tmp_path / "texts").values())) < 600_000 + 20_000  # what describes them
        assert not open_texts(opened, dataclasses.replace(request, max_disk=10**9)).notes

    def test_no_room_on_the_disk(self, opened: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        plan = open_texts(opened, REQUEST)
        free = 2**30 + 5_000_000  # a GB is left alone
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
        with pytest.raises(EexportError, match=r"^[^\n]*take up to [0-9.]+ GB and 0.0 GB are free: [^\n]*--work$"):
            open_corpus(plan, REQUEST, tmp_path / "texts")
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2 * free))
        assert not len(open_corpus(plan, REQUEST, tmp_path / "texts"))

    def test_no_room_in_memory(self, two_exits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        manifest = read_manifest(two_exits)
        text = manifest.kv_bytes_per_token() * 100
        for free, slots in ((None, 64), (10**12, 64), (12 * text, 3)):
            monkeypatch.setattr(texts, "available_memory", lambda free=free: free)
            assert slot_count(manifest, 100) == slots
        monkeypatch.setattr(texts, "available_memory", lambda: 3 * text)
        with pytest.raises(EexportError, match=r"^a text of 100 tokens does not fit [^\n]*--tokens$"):
            slot_count(manifest, 100)


class TestGoingOn:
    @pytest.mark.parametrize(
        ("change", "differing"),
        [
            ({"precision": "int8"}, "precision"),
            ({"boundaries": (2, 5)}, "depths"),
            ({"lengths": Lengths(7, 5)}, "answer_tokens"),
            ({"lengths": Lengths(6, 4)}, "message_tokens"),
            ({"seed": 1}, "seed"),
            ({"prompt_tokens": 24}, "prompts"),
        ],
    )
    def test_other_settings_are_refused(
        self, change: dict[str, object], differing: str, opened: Checkpoint, tmp_path: Path
    ) -> None:
        """Before anything else is done, as the rest of the folder is of these settings as well."""
        open_corpus(open_texts(opened, REQUEST), REQUEST, tmp_path / "texts")
        before = files(tmp_path)
        other = dataclasses.replace(REQUEST, **change)  # type: ignore[arg-type]
        with pytest.raises(EexportError, match=rf"^[^\n]*other settings \({differing}\): [^\n]*--work[^\n]*$"):
            open_corpus(open_texts(opened, other), other, tmp_path / "texts")
        assert files(tmp_path) == before

    def test_other_models_are_refused(self, opened: Checkpoint, tiny_checkpoint: Make, tmp_path: Path) -> None:
        open_corpus(open_texts(opened, REQUEST), REQUEST, tmp_path / "texts")
        other = open_checkpoint(tiny_checkpoint(layers=6, seed=1))
        with pytest.raises(EexportError, match=r"other settings \(checkpoint\)"):
            open_corpus(open_texts(other, REQUEST), REQUEST, tmp_path / "texts")

    def test_more_prompts_go_on_from_what_is_there(
        self, opened: Checkpoint, two_exits: Path, data: WriteData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(generate, "SHARD", 4)
        held, own = data("held.jsonl", "held", "out"), data("own.jsonl", "one", "two", "three")
        request = dataclasses.replace(REQUEST, data=[own], test_data=[held], prompts=9)
        written(open_texts(opened, request), request, tmp_path / "texts", two_exits)
        before = files(tmp_path / "texts")
        more = dataclasses.replace(request, prompts=15)
        again = written(open_texts(opened, more), more, tmp_path / "texts", two_exits)
        assert before.items() < files(tmp_path / "texts").items() and len(again) == 20
        once = written(open_texts(opened, more), more, tmp_path / "once", two_exits)
        assert again.infos == once.infos
        assert all(again[i].tokens.tolist() == once[i].tokens.tolist() for i in range(20))

        def never(*_: Sequence[object]) -> None:
            raise AssertionError("nothing is left to write")

        monkeypatch.setattr(texts, "Slots", never)
        assert len(written(open_texts(opened, more), more, tmp_path / "once", two_exits)) == 20
