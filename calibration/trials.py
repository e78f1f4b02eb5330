"""Training the heads: which are worth it is tried with short courses, then those are trained in full."""

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from eexport.calibration.batches import in_turn, make_batch
from eexport.calibration.corpus import Corpus
from eexport.calibration.heads import (
    DraftVocabulary,
    HeadForm,
    HeadTask,
    Scores,
    draft_vocabulary,
    fast_matmuls,
    ranked_tokens,
    scores,
)
from eexport.calibration.payoff import LONGEST, Payoff, draft_size, payoff, survival
from eexport.calibration.predict import geometric_mean
from eexport.calibration.train import Course, Tensors, muon, train
from eexport.models.checkpoint import Checkpoint
from eexport.models.exits import ExitHead
from eexport.runtime.console import Progress
from eexport.runtime.costs import CostTable

_TEXTS_A_STEP = 8
_TRIAL = 0.1  # of the full course
_TRIAL_TEXTS = 160  # of the predictor split, that a head is judged on: those that test thresholds choose nothing else
_DRAFT_SIZES = (2048, 4096, 8192, 16384, 32768, 65536)


@dataclass(frozen=True)
class Trained:
    """A head with how it was trained and what it does on texts that it was not trained on.

    Attributes:
        head: It.
        form: What it reads.
        losses: Mean loss of every tenth of the course, in nats.
        tokens: Rows that it was trained on, each pass over the texts counted.
        payoff: By kind of text of the predictor split, what drafting with it alone would give.
    """

    head: ExitHead
    form: HeadForm
    losses: list[float]
    tokens: int
    payoff: dict[str, Payoff]

    @property
    def speedup(self) -> float:
        """Geometric mean over the kinds."""
        return geometric_mean([found.speedup for found in self.payoff.values()])


class Trainer:
    """Trains heads of one checkpoint on one corpus."""

    def __init__(
        self, checkpoint: Checkpoint, corpus: Corpus, draft: DraftVocabulary, costs: CostTable, work: Path, seed: int
    ) -> None:
        """States are kept in ``work``."""
        self._checkpoint, self._corpus, self._draft, self._costs = checkpoint, corpus, draft, costs
        self._work, self._seed = work, seed
        self._train, self._judged = corpus.of("train"), corpus.of("predictor")[:_TRIAL_TEXTS]
        keys = "".join(corpus.infos[number].key for number in self._train)
        self._data = hashlib.sha256(keys.encode() + draft.ids.tobytes()).hexdigest()

    def task(self, form: HeadForm) -> HeadTask:
        """What a head of this form is asked."""
        return HeadTask(self._checkpoint, form, self._draft)

    def train(self, form: HeadForm, epochs: float, progress: Progress) -> Trained:
        """A head after ``epochs`` passes over the train texts."""
        task = self.task(form)
        steps = max(1, math.ceil(epochs * len(self._train) / _TEXTS_A_STEP))
        batches = in_turn(self._corpus, self._train, _TEXTS_A_STEP, self._seed)

        def loss_of(values: Tensors, numbers: list[int]) -> Tensor:
            with fast_matmuls():
                return task.loss(values, make_batch(self._corpus, numbers))

        name = hashlib.sha256(repr((self._data, form, steps, self._seed)).encode()).hexdigest()[:12]
        first = task.first_values(self._checkpoint, self._seed)
        state = self._work / f"{form.name}-{name}.pt"
        values, losses = train(form.name, first, muon, batches, loss_of, Course(steps), state, progress)
        head = ExitHead(form.name, form.depth, form.features, {key: value.numpy() for key, value in values.items()})
        taken = itertools.islice(in_turn(self._corpus, self._train, _TEXTS_A_STEP, self._seed), steps)
        infos = [self._corpus.infos[number] for numbers in taken for number in numbers]
        return Trained(head, form, losses, sum(info.length - info.first for info in infos), self._payoff(task, head))

    def _payoff(self, task: HeadTask, head: ExitHead) -> dict[str, Payoff]:
        found = by_kind(self._corpus, self._judged, scores(task, head, self._corpus, self._judged))
        share = len(self._draft.ids) / self._checkpoint.spec.vocab_size
        return {
            kind: payoff(mean_survival(texts).tolist(), self._costs, head.depth, share) for kind, texts in found.items()
        }


def by_kind(corpus: Corpus, numbers: Sequence[int], texts: Sequence[Scores]) -> dict[str, list[Scores]]:
    """Scores grouped by kind of text."""
    groups: dict[str, list[Scores]] = {}
    for number, text in zip(numbers, texts, strict=True):
        groups.setdefault(corpus.infos[number].kind, []).append(text)
    return dict(sorted(groups.items()))


def mean_survival(texts: Sequence[Scores]) -> NDArray[np.float64]:
    """``payoff.survival`` over all rows of several texts."""
    rows = np.array([text.agrees.shape[1] for text in texts], np.float64)
    shares = np.array([survival(text.agrees, LONGEST) for text in texts])
    result: NDArray[np.float64] = (shares * rows[:, None]).sum(axis=0) / rows.sum()
    return result


def choose_draft(
    corpus: Corpus, costs: CostTable, depth: int, vocab_size: int
) -> tuple[DraftVocabulary, dict[int, float]]:
    """The draft vocabulary of the best size, and the coverage of every size that was looked at."""
    train = corpus.of("train")
    said = np.concatenate([corpus[n].top_ids[corpus[n].answer_rows, 0] for n in corpus.of("predictor")])
    ranked = ranked_tokens(corpus, train, vocab_size)
    sizes = (*(size for size in _DRAFT_SIZES if size < vocab_size), vocab_size)
    coverage = {size: float(np.isin(said, ranked[:size]).mean()) for size in sizes}
    best = draft_size(coverage, costs, depth, vocab_size)
    return draft_vocabulary(corpus, train, best, vocab_size), coverage


def candidate_forms(boundaries: Sequence[int], num_layers: int) -> list[HeadForm]:
    """A head at every block boundary, and one on the last hidden state that drafts as EAGLE and MTP heads do."""
    exits = [HeadForm(f"exit_{depth:02d}", depth, ("hidden",)) for depth in boundaries]
    return [*exits, HeadForm("last", num_layers, ("previous", "embedding"), passes=2)]


def worth_it(trials: Sequence[Trained], num_layers: int) -> list[HeadForm]:
    """The forms to train in full: every head that pays by its trial, and in any case the exit that comes closest."""
    exits = [trial for trial in trials if trial.form.depth < num_layers]
    best = max(exits, key=lambda trial: (trial.speedup, -trial.form.depth))
    return [trial.form for trial in trials if trial.speedup > 1 or trial is best]


def trial_epochs(epochs: float) -> float:
    """Passes of a trial."""
    return _TRIAL * epochs
