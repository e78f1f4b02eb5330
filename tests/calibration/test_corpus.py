"""Texts in files: whole or not there, and nobody else's."""

import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from eexport.calibration import corpus as module
from eexport.calibration.corpus import SPLITS, TOP, Corpus, Text, TextInfo, bytes_per_token
from eexport.runtime.errors import EexportError

SETTINGS = {"checkpoint": "abc", "depths": (1, 2, 10), "seed": 0}


def made(number: int, length: int = 7) -> Text:
    random = np.random.default_rng(number)
    return Text(
        TextInfo(f"{number:016x}", "text", "made", SPLITS[number % 4], 1, 3, length),
        tokens=random.integers(0, 99, length).astype(np.int32),
        hidden={depth: random.integers(0, 2**16, (length, 8)).astype(np.uint16) for depth in (1, 2, 10)},
        top_ids=random.integers(0, 99, (length, TOP)).astype(np.int32),
        top_logprobs=random.standard_normal((length, TOP)).astype(np.float16),
        entropy=random.random(length, np.float32),
    )


def filled(folder: Path, shards: int = 3) -> list[Text]:
    texts = [made(number, 5 + number) for number in range(4 * shards)]
    corpus = Corpus(folder, SETTINGS)
    for shard in range(shards):
        corpus.append(texts[4 * shard : 4 * shard + 4])
    return texts


def check(corpus: Corpus, texts: list[Text]) -> None:
    assert len(corpus) == len(texts) and corpus.infos == [text.info for text in texts]
    for index, text in enumerate(texts):
        found = corpus[index]
        assert found.info == text.info and found.hidden.keys() == text.hidden.keys()
        for name in ("tokens", "top_ids", "top_logprobs", "entropy"):
            assert np.array_equal(getattr(found, name), getattr(text, name))
        for depth, states in text.hidden.items():
            assert np.array_equal(found.hidden[depth], states)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_what_is_appended_is_there_again(tmp_path: Path) -> None:
    texts = filled(tmp_path / "texts")
    corpus = Corpus(tmp_path / "texts", SETTINGS)
    check(corpus, texts)
    assert sum(info.length for info in corpus.infos) == sum(range(5, 17))
    assert corpus.of("predictor") == corpus.distinct("predictor") == [1, 5, 9]
    assert corpus[2].answer_rows == slice(2, 7)
    more = [made(number) for number in range(12, 14)]
    corpus.append(more)
    check(corpus, [*texts, *more])
    check(Corpus(tmp_path / "texts", SETTINGS), [*texts, *more])


def test_a_prompt_that_came_up_again(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path / "texts", SETTINGS)
    corpus.append([made(number) for number in (1, 2, 5, 1, 9, 5)])
    assert corpus.of("predictor") == [0, 2, 3, 4, 5] and corpus.distinct("predictor") == [0, 2, 4]


def test_the_size_is_known_beforehand(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path / "texts", SETTINGS)
    corpus.append([made(number, 2000) for number in range(4)])
    columns = sum(path.stat().st_size for path in (tmp_path / "texts").rglob("*.npy"))
    assert columns == pytest.approx(8000 * bytes_per_token(3, 8), rel=0.01)


def test_few_files_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAPPED", 2)
    texts = filled(tmp_path / "texts", shards=10)
    before = len(os.listdir("/proc/self/fd"))
    corpus = Corpus(tmp_path / "texts", SETTINGS)
    check(corpus, texts)
    assert len(os.listdir("/proc/self/fd")) - before <= 2 * 7


@pytest.mark.parametrize("change", [{"checkpoint": "abd"}, {"depths": (1, 2)}, {"more": 1}])
def test_texts_of_other_settings_are_left_alone(change: dict[str, object], tmp_path: Path) -> None:
    filled(tmp_path / "texts")
    before = files(tmp_path)
    with pytest.raises(EexportError, match=rf"^[^\n]*texts: holds texts [^\n]*\({next(iter(change))}\): [^\n]*--work"):
        Corpus(tmp_path / "texts", SETTINGS | change)
    assert files(tmp_path) == before


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"3"])
def test_settings_that_cannot_be_read(content: bytes, tmp_path: Path) -> None:
    filled(tmp_path / "texts")
    (tmp_path / "texts/settings.json").write_bytes(content)
    before = files(tmp_path)
    with pytest.raises(EexportError, match=r"^[^\n]*settings.json: cannot be used [^\n]*--work"):
        Corpus(tmp_path / "texts", SETTINGS)
    assert files(tmp_path) == before


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("tokens.npy", truncate),
        ("hidden.10.npy", truncate),
        ("entropy.npy", lambda path: path.write_bytes(b"")),
        ("top_ids.npy", Path.unlink),
        ("texts.json", Path.unlink),
        ("texts.json", truncate),
        ("texts.json", lambda path: path.write_text("[]")),
        ("texts.json", lambda path: path.write_text('[{"kind": "text"}]')),
        ("tokens.npy", lambda path: np.save(path, np.zeros(3, np.int32))),
    ],
)
def test_a_damaged_shard_is_named_and_made_again(name: str, damage: Callable[[Path], object], tmp_path: Path) -> None:
    texts = filled(tmp_path / "texts")
    before = files(tmp_path)
    shard = tmp_path / "texts/shard-0001"
    damage(shard / name)
    with pytest.raises(EexportError, match=r"^[^\n]*shard-0001: is damaged [^\n]*remove it"):
        Corpus(tmp_path / "texts", SETTINGS)
    shutil.rmtree(shard)
    corpus = Corpus(tmp_path / "texts", SETTINGS)
    check(corpus, texts[:4])
    corpus.append(texts[4:8])
    corpus.append(texts[8:])
    check(corpus, texts)
    assert files(tmp_path) == before


def test_half_a_shard_is_no_shard(tmp_path: Path) -> None:
    texts = filled(tmp_path / "texts")
    left = tmp_path / "texts/.shard-0003"
    shutil.copytree(tmp_path / "texts/shard-0000", left)
    check(Corpus(tmp_path / "texts", SETTINGS), texts)
    assert not left.exists()


@pytest.mark.parametrize("limit", [140, 1000, 1900])
def test_a_full_disk_is_one_line(limit: int, tmp_path: Path) -> None:
    """A limit on the size of files stands in for it: of a file's header, its middle, its last bytes."""
    texts = filled(tmp_path / "texts")
    corpus = Corpus(tmp_path / "texts", SETTINGS)
    before = files(tmp_path)
    allowed = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, allowed[1]))
    try:
        with pytest.raises(EexportError, match=r"^[^\n]*shard-0003: the texts cannot be written \(File too large\)$"):
            corpus.append([made(number, 28) for number in range(4)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, allowed)
    assert files(tmp_path) == before
    check(corpus, texts)
    corpus.append([made(12)])
    check(Corpus(tmp_path / "texts", SETTINGS), [*texts, made(12)])


def test_no_room_for_a_folder(tmp_path: Path) -> None:
    (tmp_path / "texts").write_text("mine")
    with pytest.raises(EexportError, match=r"^[^\n]*texts[^\n]*cannot be written \([^\n]*\)$"):
        Corpus(tmp_path / "texts", SETTINGS)
    assert (tmp_path / "texts").read_text() == "mine"
