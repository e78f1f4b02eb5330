"""What exits do on texts that they were not trained on, computed by a bundle's own stages.

Texts of the tune split choose the thresholds; those of the test split are only reported, by where their prompts come
from and by kind.
"""

import time
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from eexport.calibration.accuracy import Marker
from eexport.calibration.corpus import Corpus
from eexport.calibration.exit_records import DRAFTED, ExitRecord, record_exits
from eexport.calibration.exit_slots import ExitSlots
from eexport.calibration.exit_traces import ExitTraces, report
from eexport.calibration.heads import scores
from eexport.calibration.jobs import WRITTEN
from eexport.calibration.predictor import predictor_scores, required_exits
from eexport.calibration.texts import Opened, Request, slot_count
from eexport.calibration.trials import Trained, Trainer, by_kind, mean_survival
from eexport.models.exit_decoder import predictor_logits
from eexport.models.exits import ExitPredictor
from eexport.models.spec import ModelSpec
from eexport.runtime.console import Progress
from eexport.runtime.device import open_backend
from eexport.runtime.exits import ExitRule
from eexport.runtime.manifest import read_manifest

_TIMED = 200  # steps


@dataclass(frozen=True, eq=False)
class Part:
    """Recorded texts of one source: their numbers in the corpus, what the stages said, and which are right."""

    numbers: list[int]
    record: ExitRecord
    correct: NDArray[np.float64]

    @cached_property
    def traces(self) -> ExitTraces:
        """For rules."""
        return self.record.traces(self.correct)


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Everything measured with the built exits.

    Attributes:
        tune: Texts to choose thresholds on.
        own: [P] of these, whether the promise is about such: where there is data, its prompts, else all.
        test: Texts to report on, by source.
        differing: Rows on which the full model did not say what is recorded; 0 if all is well.
        exit_ms: Milliseconds of each head for one row, then of the predictor.
        step_ms: Of the chain without them.
    """

    tune: ExitTraces
    own: NDArray[np.bool_]
    test: dict[str, Part]
    differing: int
    exit_ms: list[float]
    step_ms: float


def measure(
    opened: Opened, corpus: Corpus, bundle: Path, request: Request, run_code: bool, progress: Progress
) -> HeldOut:
    """Run the tune and test texts through ``bundle``. Raises EexportError where they are of another model."""
    manifest, backend = read_manifest(bundle), open_backend("cpu", request.threads)
    tune, test = corpus.distinct("tune"), corpus.distinct("test")
    capacity = max(corpus.infos[number].length for number in (*tune, *test))
    exit_ms, step_ms = _times(ExitSlots(bundle, manifest, backend, 1, capacity))
    slots = ExitSlots(bundle, manifest, backend, slot_count(manifest, capacity), capacity)
    record, differing = record_exits(slots, corpus, [*tune, *test], lambda n, of: progress("running exits", n, of))
    mark = Marker(opened.codec.decode, run_code)
    correct = np.array([_correct(opened, corpus, number, mark) for number in (*tune, *test)])
    sources = [corpus.infos[number].source for number in test]
    parts = {}
    for source in sorted(set(sources)):
        places = [len(tune) + place for place, other in enumerate(sources) if other == source]
        numbers = [test[place - len(tune)] for place in places]
        parts[source] = Part(numbers, record.pick(places), correct[places])
    tuned = record.pick(range(len(tune))).traces(correct[: len(tune)])
    own = np.array([not request.data or corpus.infos[number].source != WRITTEN for number in tune])
    return HeldOut(tuned, own, parts, int(differing.sum()), exit_ms, step_ms)


def head_report(trainer: Trainer, trained: Trained, place: int, corpus: Corpus, held: HeldOut) -> dict[str, Any]:
    """What head number ``place`` does on the test texts, by source and kind."""
    agreement, accepted = {}, {}
    for source, part in held.test.items():
        agreement[source] = {kind: of_head[place] for kind, of_head in part.record.accepted(1).items()}
        if "previous" in trained.form.features:  # its later tokens rest on its own hidden states
            texts = scores(trainer.task(trained.form), trained.head, corpus, part.numbers)
            groups = {"all": texts, **by_kind(corpus, part.numbers, texts)}
            accepted[source] = {kind: float(mean_survival(found)[:DRAFTED].sum()) for kind, found in groups.items()}
        else:
            accepted[source] = {kind: of_head[place] for kind, of_head in part.record.accepted(DRAFTED).items()}
    return {
        "agreement": agreement,
        f"accepted_of_{DRAFTED}": accepted,
        "ms": held.exit_ms[place],
    }


def predictor_report(
    spec: ModelSpec, predictor: ExitPredictor, corpus: Corpus, held: HeldOut, common: int
) -> dict[str, Any]:
    """How well required exits are predicted on the test texts, by source, and what it costs."""
    tensors = {name: torch.from_numpy(value) for name, value in predictor.tensors.items()}
    found = {}
    for source, part in held.test.items():
        states = [
            np.concatenate([corpus[number].hidden[layer][corpus[number].answer_rows] for number in part.numbers])
            for layer in predictor.layers
        ]
        read = [torch.from_numpy(state.view(np.int16)).view(torch.bfloat16).float()[None] for state in states]
        traces = part.traces
        logits = predictor_logits(spec, tensors, read)[0].numpy()
        depths = (*traces.depths, spec.num_layers)
        found[source] = asdict(predictor_scores(logits, required_exits(traces.agrees), depths, common))
    ms = held.exit_ms[-1]
    return {"layers": list(predictor.layers), "ms": ms, "share_of_step": ms / held.step_ms, "test": found}


def rule_report(held: HeldOut, rule: ExitRule) -> dict[str, Any]:
    """What a rule does to the test texts, by source and kind."""
    return {
        source: {kind: asdict(use) for kind, use in report(part.traces, rule).items()}
        for source, part in held.test.items()
    }


def _correct(opened: Opened, corpus: Corpus, number: int, mark: Marker) -> float:
    """1 or 0: whether the answer solves its task; NaN where there is none."""
    text = corpus[number]
    encoded = opened.prompts.get(text.info.key)
    if encoded is None:
        return float("nan")
    return mark(encoded, text.tokens[text.info.answer :].tolist())  # without the end-of-text token, if there was one


def _times(slots: ExitSlots) -> tuple[list[float], float]:
    """Median milliseconds of every exit stage and of the chain, one row after ``_TIMED`` others and more."""
    exits: list[list[float]] = []
    steps: list[float] = []
    for _ in range(min(_TIMED, slots.capacity)):
        began = time.perf_counter()
        slots.step([0])
        steps.append(time.perf_counter() - began)
        exits.append(slots.exit_seconds())
    per_exit = [1000 * median(column) for column in zip(*exits, strict=True)]
    return per_exit, 1000 * median(steps) - sum(per_exit)
