"""Exits on texts whose tokens are given: what thresholds are chosen on, and what a draft would be worth.

Legend: P texts, N rows of all of them, H heads, E of them exits (those short of the full depth), K drafted tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eexport.calibration.corpus import Corpus, Text
from eexport.calibration.exit_slots import ExitRows, ExitSlots, run_exits
from eexport.calibration.exit_traces import ExitTraces
from eexport.runtime.errors import EexportError

DRAFTED = 3
"""Tokens of a draft whose acceptance is reported."""

_MOST_DIFFERING = 0.02  # of the rows: more than another precision makes of one model
_FEW_ROWS = 500  # a share of fewer says little

Counts = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ExitRecord:
    """What exits and full model say on the rows of P texts.

    Attributes:
        depths: [H] layers run before each head.
        num_layers: Of the model.
        lengths: [P] rows of each text, at least one.
        kinds: P kinds of text.
        rows: N rows, text by text.
    """

    depths: tuple[int, ...]
    num_layers: int
    lengths: Counts
    kinds: tuple[str, ...]
    rows: ExitRows

    @classmethod
    def of(cls, slots: ExitSlots, texts: Sequence[ExitRows], kinds: Sequence[str]) -> "ExitRecord":
        """From the rows of texts, one or more, that ``slots`` ran."""
        lengths = np.array([len(rows) for rows in texts], np.int64)
        return cls(slots.depths, slots.manifest.model.num_layers, lengths, tuple(kinds), ExitRows.join(texts))

    def pick(self, texts: Sequence[int]) -> "ExitRecord":
        """These texts, one or more, in this order."""
        starts = np.cumsum(self.lengths) - self.lengths
        parts = [self.rows[starts[text] : starts[text] + self.lengths[text]] for text in texts]
        kinds = tuple(self.kinds[text] for text in texts)
        return ExitRecord(self.depths, self.num_layers, self.lengths[list(texts)], kinds, ExitRows.join(parts))

    def traces(self, correct: NDArray[np.floating]) -> ExitTraces:
        """What thresholds are chosen on; ``correct`` as there. Raises ValueError where no head is an exit."""
        exits = sum(depth < self.num_layers for depth in self.depths)
        return ExitTraces(
            self.depths[:exits],
            self.num_layers,
            self.lengths,
            self.rows.predicted,
            self.rows.entropy[:, :exits],
            self.rows.agrees[:, :exits],
            self.rows.final_entropy,
            correct,
            self.kinds,
        )

    def accepted(self, drafted: int = DRAFTED) -> dict[str, list[float]]:
        """Tokens accepted of a draft of ``drafted``, mean over all rows for each head [H]: "all", and each kind.

        With 1 drafted it is the share of rows on which a head agrees with the full model. See ``accepted_lengths``.
        """
        accepted = accepted_lengths(self.rows.agrees, self.lengths, drafted)
        of_row = np.repeat(self.kinds, self.lengths)
        groups = {kind: accepted[of_row == kind] for kind in sorted(set(self.kinds))}
        return {name: values.mean(axis=0).tolist() for name, values in {"all": accepted, **groups}.items()}


def accepted_lengths(agrees: NDArray[np.bool_], lengths: Counts, drafted: int = DRAFTED) -> Counts:
    """[N, H] how many of ``drafted`` tokens from each row on are the full model's, up to the first that is not.

    A draft ends where its text does. That each row saw the text's own tokens changes nothing for a head that reads its
    own depth and those before it, as a draft goes on only from right tokens. For a head that reads the last layer's
    hidden states it counts too many beyond the first: a draft does not have them yet.

    Args:
        agrees: [N, H] of P texts, text by text.
        lengths: [P] rows of each.
        drafted: K, at least 1.
    """
    left = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(agrees))  # [N] rows from here to the text's end
    padded = np.pad(agrees, ((0, drafted - 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, drafted, axis=0)  # [N, H, K]
    inside = np.arange(drafted) < left[:, None, None]
    return np.asarray(np.logical_and.accumulate(windows & inside, axis=2).sum(axis=2), np.int64)


def record_exits(
    slots: ExitSlots, corpus: Corpus, numbers: Sequence[int], progress: Callable[[int, int], None]
) -> tuple[ExitRecord, Counts]:
    """Run recorded texts through a bundle with exits, and keep what is said on the rows of their answers.

    Args:
        slots: Of the same checkpoint as the corpus, long enough for its texts.
        corpus: The texts.
        numbers: Of those to run, one or more.
        progress: Called with (done, total) texts.

    Returns:
        The record, with the texts in the order of ``numbers``, and for each [P] on how many rows the full model's token
        is not the recorded one: none, where the bundle has the precision of the one that wrote them.

    Raises:
        EexportError: More than 2% of these rows differ: the texts are of another model.
    """
    texts = [_Recorded(number, corpus[number]) for number in numbers]
    finished, rows, differing = 0, 0, 0

    def done(text: _Recorded) -> None:
        nonlocal finished, rows, differing
        finished, rows, differing = finished + 1, rows + len(text.rows), differing + text.differing
        if differing > _MOST_DIFFERING * max(rows, _FEW_ROWS):
            raise EexportError(
                f"text {text.number} of the recorded ones: the model says other tokens on {text.differing} of "
                f"{len(text.rows)} rows, and on {differing} of {rows} so far: they are of another model, write them "
                "again"
            )
        progress(finished, len(texts))

    # The longest first, so that few slots are left with work when the others have none.
    run_exits(slots, sorted(texts, key=lambda text: -text.length), done)
    kinds = [text.info.kind for text in texts]
    record = ExitRecord.of(slots, [text.rows for text in texts], kinds)
    return record, np.array([text.differing for text in texts], np.int64)


class _Recorded:
    """A recorded text being run again. When it is done: the ``rows`` of its answer, and how many are ``differing``."""

    def __init__(self, number: int, text: Text) -> None:
        self.number, self.info, self.length = number, text.info, text.info.length
        # Copies, as a view keeps the files of its shard open.
        self._tokens: list[int] = text.tokens.tolist()
        self._said = text.top_ids[text.answer_rows, 0].copy()
        self._rows: list[ExitRows] = []
        self._given = 0

    @property
    def asks(self) -> bool:
        return self._given >= self.info.answer

    def take(self) -> int:
        self._given += 1
        return self._tokens[self._given - 1]

    def put(self, row: ExitRows) -> bool:
        self._rows.append(row)
        if self._given < self.length:
            return False
        self.rows = ExitRows.join(self._rows)
        self._rows.clear()
        self.differing = int((self.rows.final_tokens != self._said).sum())
        return True
