"""What the heads are trained on: texts that the model wrote, with its hidden states, in memory-mapped files.

Texts come in shards, folders that are whole or not there, so that making them can be interrupted. Legend: N rows of a
shard, D hidden width, K likeliest tokens kept. Row t of a text is what the model computed after its token t.
"""

import bisect
import io
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from eexport.runtime.errors import EexportError
from eexport.runtime.files import write_whole

Split = Literal["train", "predictor", "tune", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)

TOP = 8
"""Likeliest tokens kept of each row."""

_TEXTS = "texts.json"
_COLUMNS = ("tokens", "top_ids", "top_logprobs", "entropy")  # fields of Text; hidden states are hidden.{depth}
_MAPPED = 32  # shards at a time: every mapped file keeps a descriptor, of which a process may have 1024


@dataclass(frozen=True)
class TextInfo:
    """What a text is.

    Attributes:
        key: Hash of its kind and prompt.
        kind: "json", "code", "text", "math", or the data's own word.
        source: Where the prompt is from: "written" by the model, "built-in", or a file's name.
        split: What it may be used for.
        first: Rows before it are the chat template's beginning, the same in every text.
        answer: Where the prompt ends: tokens from here on are the model's greedy answer.
        length: Tokens in all.
    """

    key: str
    kind: str
    source: str
    split: Split
    first: int
    answer: int
    length: int


@dataclass(frozen=True)
class Text:
    """One text of T tokens as it was recorded.

    Attributes:
        info: What it is.
        tokens: [T] int32.
        hidden: By depth [T, D]: bfloat16, as its bits in uint16 for want of a numpy dtype.
        top_ids: [T, K] int32, the likeliest next tokens, best first.
        top_logprobs: [T, K] float16, in nats.
        entropy: [T] float32 of the next token's distribution, in nats.
    """

    info: TextInfo
    tokens: NDArray[np.int32]
    hidden: dict[int, NDArray[np.uint16]]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float16]
    entropy: NDArray[np.float32]

    @property
    def answer_rows(self) -> slice:
        """The rows that say the answer's tokens: from the prompt's last on."""
        return slice(self.info.answer - 1, self.info.length)


def bytes_per_token(depths: int, width: int) -> int:
    """Disk that a token takes."""
    return 2 * depths * width + 4 + 6 * TOP + 4


class Corpus:
    """The texts of a folder, in their order."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        """Open or create ``folder``.

        Args:
            folder: Of the shards.
            settings: What the texts are made with.

        Raises:
            EexportError: It holds texts that were made with other ``settings``; they are left alone.
        """
        self._folder = folder
        meta = folder / "settings.json"
        wanted = json.loads(json.dumps(settings))
        if not meta.exists():
            write_whole(meta, (json.dumps(wanted, indent=1) + "\n").encode(), "the texts")
        try:
            found = json.loads(meta.read_text(encoding="utf-8"))
            differing = next((key for key in {**wanted, **found} if found.get(key) != wanted.get(key)), None)
        except (OSError, ValueError, TypeError) as error:
            raise EexportError(
                f"{meta}: cannot be used ({error}): give another --work, or remove {folder.parent}"
            ) from None
        if differing is not None:
            raise EexportError(
                f"{folder}: holds texts that were made with other settings ({differing}): give another --work, or "
                f"remove {folder.parent} to begin anew"
            )
        self._shards: list[_Shard] = []
        self._starts: list[int] = []
        self._columns = lru_cache(_MAPPED)(lambda shard: self._shards[shard].columns())
        self.infos: list[TextInfo] = []
        for partial in folder.glob(".shard-*"):
            shutil.rmtree(partial, ignore_errors=True)
        while (place := self._place(len(self._shards))).is_dir():
            self._open(place)

    def __len__(self) -> int:
        """Texts written so far."""
        return len(self.infos)

    def __getitem__(self, index: int) -> Text:
        """Text number ``index``; its arrays are views of the files."""
        shard = bisect.bisect_right(self._starts, index) - 1
        rows = self._shards[shard].rows(index - self._starts[shard])
        columns = {name: values[rows] for name, values in self._columns(shard).items()}
        hidden = {int(name.partition(".")[2]): values for name, values in columns.items() if name not in _COLUMNS}
        return Text(self.infos[index], hidden=hidden, **{name: columns[name] for name in _COLUMNS})

    def of(self, split: Split) -> list[int]:
        """Numbers of the texts of a split."""
        return [index for index, info in enumerate(self.infos) if info.split == split]

    def distinct(self, split: Split) -> list[int]:
        """The same, each prompt once: one that came up again says nothing new, and is no draw of its own."""
        first = {self.infos[number].key: number for number in reversed(self.of(split))}
        return sorted(first.values())

    def append(self, texts: Sequence[Text]) -> None:
        """Write one more shard. Raises EexportError where the disk does not take it; nothing of it is kept."""
        place = self._place(len(self._shards))
        partial = place.with_name(f".{place.name}")
        try:
            partial.mkdir()
            for name, arrays in _columns(texts).items():
                _save(partial / f"{name}.npy", np.concatenate(arrays))
            described = json.dumps([asdict(text.info) for text in texts])
            (partial / _TEXTS).write_text(described, encoding="utf-8")
            if place.exists():  # what follows on a shard that was removed
                shutil.rmtree(place)
            partial.rename(place)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise EexportError(f"{place}: the texts cannot be written ({error.strerror})") from None
        self._open(place)

    def _place(self, number: int) -> Path:
        return self._folder / f"shard-{number:04d}"

    def _open(self, place: Path) -> None:
        shard = _Shard(place)
        self._starts.append(len(self.infos))
        self._shards.append(shard)
        self.infos += shard.infos


class _Shard:
    """A folder of texts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            self.infos = [TextInfo(**row) for row in json.loads((folder / _TEXTS).read_text(encoding="utf-8"))]
            self._offsets = np.cumsum([0, *(info.length for info in self.infos)])
            lengths = {name: len(values) for name, values in self.columns().items()}
            if not lengths.keys() > set(_COLUMNS) or set(lengths.values()) != {self._offsets[-1]}:
                raise ValueError(f"expected {self._offsets[-1]} rows of every kind, found {lengths}")
        except (OSError, EOFError, ValueError, TypeError) as error:
            raise EexportError(f"{folder}: is damaged ({error}): remove it, and it is made again") from None

    def columns(self) -> dict[str, NDArray[Any]]:
        """The arrays of all its texts, by the names of their files."""
        return {path.stem: np.load(path, mmap_mode="r") for path in self._folder.glob("*.npy")}

    def rows(self, index: int) -> slice:
        """Where the text of this number stands in them."""
        return slice(self._offsets[index], self._offsets[index + 1])


def _save(path: Path, array: NDArray[Any]) -> None:
    """``np.save``, which does not notice when the disk is full at the end of a file."""
    content = io.BytesIO()
    np.save(content, array)
    path.write_bytes(content.getbuffer())


def _columns(texts: Sequence[Text]) -> dict[str, list[NDArray[Any]]]:
    columns: dict[str, list[NDArray[Any]]] = {name: [getattr(text, name) for text in texts] for name in _COLUMNS}
    for depth in texts[0].hidden:
        columns[f"hidden.{depth}"] = [text.hidden[depth] for text in texts]
    return columns
