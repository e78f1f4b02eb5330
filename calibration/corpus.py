"""What the heads are trained on: texts that the model wrote, with its hidden states, in memory-mapped files.

Texts come in shards, folders that are whole or not there, so that making them can be interrupted. Legend: N rows of a
shard, D hidden width, K likeliest tokens kept. Row t of a text is what the model computed after its token t.
"""

import bisect
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from eexport.runtime.errors import EexportError

Split = Literal["train", "predictor", "tune", "test"]

TOP = 8
"""Likeliest tokens kept of each row."""

_TEXTS = "texts.json"


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
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not meta.exists():
                meta.write_text(json.dumps(wanted, indent=1) + "\n", encoding="utf-8")
            found = json.loads(meta.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise EexportError(f"{meta}: cannot be used ({error}): give another -o, or --force") from None
        if found != wanted:
            differing = next(key for key in {**wanted, **found} if found.get(key) != wanted.get(key))
            raise EexportError(
                f"{folder}: holds texts made with another {differing}: give another -o, or --force to make them again"
            )
        self._shards: list[_Shard] = []
        self._starts: list[int] = []
        self.infos: list[TextInfo] = []
        for partial in folder.glob(".shard-*"):
            shutil.rmtree(partial)
        while (place := self._place(len(self._shards))).is_dir():
            self._open(place)

    def __len__(self) -> int:
        return len(self.infos)

    def __getitem__(self, index: int) -> Text:
        """Text number ``index``; its arrays are views of the files."""
        shard = bisect.bisect_right(self._starts, index) - 1
        return self._shards[shard].text(self.infos[index], index - self._starts[shard])

    @property
    def tokens(self) -> int:
        """Tokens of all texts."""
        return sum(info.length for info in self.infos)

    def of(self, split: Split) -> list[int]:
        """Numbers of the texts of a split."""
        return [index for index, info in enumerate(self.infos) if info.split == split]

    def append(self, texts: Sequence[Text]) -> None:
        """Write one more shard. Raises EexportError where the disk does not take it; nothing of it is kept."""
        place = self._place(len(self._shards))
        partial = place.with_name(f".{place.name}")
        try:
            partial.mkdir()
            for name, arrays in _columns(texts).items():
                np.save(partial / f"{name}.npy", np.concatenate(arrays))
            described = json.dumps([asdict(text.info) for text in texts])
            (partial / _TEXTS).write_text(described, encoding="utf-8")
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
    def __init__(self, folder: Path) -> None:
        try:
            rows = json.loads((folder / _TEXTS).read_text(encoding="utf-8"))
            self.infos = [TextInfo(**row) for row in rows]
            self._columns = {path.stem: np.load(path, mmap_mode="r") for path in folder.glob("*.npy")}
        except (OSError, ValueError, TypeError) as error:
            raise EexportError(f"{folder}: is damaged ({error}): remove it, and it is made again") from None
        self._offsets = np.cumsum([0, *(info.length for info in self.infos)])

    def text(self, info: TextInfo, index: int) -> Text:
        rows = slice(self._offsets[index], self._offsets[index + 1])
        column = {name: values[rows] for name, values in self._columns.items()}
        hidden = {int(name.removeprefix("hidden.")): column.pop(name) for name in list(column) if "." in name}
        return Text(info, hidden=hidden, **column)


def _columns(texts: Sequence[Text]) -> dict[str, list[NDArray[Any]]]:
    columns: dict[str, list[NDArray[Any]]] = {
        name: [getattr(text, name) for text in texts] for name in ("tokens", "top_ids", "top_logprobs", "entropy")
    }
    for depth in texts[0].hidden:
        columns[f"hidden.{depth}"] = [text.hidden[depth] for text in texts]
    return columns
