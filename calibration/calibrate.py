"""A calibration from end to end: texts, heads, the exit predictor, thresholds.

Every stage keeps what it has made in a work folder, so that an interrupted calibration goes on and comes out the same.
What is reported of exits and thresholds was computed by the built stages, as a device runs them.
"""

import json
import platform
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eexport.calibration.corpus import SPLITS, Corpus
from eexport.calibration.heads import scores
from eexport.calibration.held_out import HeldOut, head_report, measure, predictor_report, rule_report
from eexport.calibration.predictor import train_predictor
from eexport.calibration.texts import BuildBundle, Opened, Request, built_bundle, open_corpus, write_texts
from eexport.calibration.thresholds import ASSUMED, Budget, Chosen, choose
from eexport.calibration.trials import Trained, Trainer, candidate_forms, choose_draft, trial_epochs, worth_it
from eexport.models.exits import Calibration, ExitPredictor, Thresholds
from eexport.models.exits_file import read_calibration, write_calibration
from eexport.runtime.console import Progress
from eexport.runtime.costs import CostTable, measure_costs
from eexport.runtime.device import default_threads
from eexport.runtime.engine import Engine
from eexport.runtime.errors import EexportError
from eexport.runtime.files import write_whole
from eexport.runtime.manifest import read_manifest

REPORTED = ("0.1pp", "0.5pp", "2pp", "0.5%tokens", "1%tokens", "2%tokens", "5%tokens")
"""Budgets whose thresholds are reported beside the one that was asked for."""


@dataclass(frozen=True)
class Settings:
    """How to calibrate.

    Attributes:
        epochs: Passes over the texts that a head is trained for.
        exits: Depths of exits to train; None tries every block boundary and keeps what pays.
        budget: What the thresholds may lose.
        confidence: That they do not lose more.
        run_code: Whether to run code that the model wrote, to score it.
        seed: Of everything that is random.
    """

    epochs: float = 4.0
    exits: tuple[int, ...] | None = None
    budget: Budget = Budget.parse("2%tokens")
    confidence: float = 0.95
    run_code: bool = False
    seed: int = 0


def calibrate(
    opened: Opened, request: Request, settings: Settings, work: Path, build: BuildBundle, progress: Progress
) -> Calibration:
    """Calibrate a checkpoint; what was done before in ``work`` is not done again.

    Raises:
        EexportError: There is too little to train on, the disk is full, or a loss is not finite.
    """
    torch.set_num_threads(request.threads or default_threads())
    clock = _Clock(work / "seconds.json")
    corpus = open_corpus(opened, request, work / "texts")  # first, as it knows what the rest of the folder is of
    with clock.stage("build"):
        bundle = built_bundle(opened, work / "bundle", build, None, progress)
    with clock.stage("texts"):
        write_texts(opened, request, corpus, bundle, progress)
    _check_splits(corpus)
    with clock.stage("costs"):
        costs = _costs(bundle, work / "costs.json", request.threads, progress)
    spec = opened.checkpoint.spec
    boundaries = request.boundaries
    draft, coverage = choose_draft(corpus, costs, boundaries[len(boundaries) // 2], spec.vocab_size)
    trainer = Trainer(opened.checkpoint, corpus, draft, costs, work, settings.seed)
    forms, trials = candidate_forms(boundaries, spec.num_layers), list[Trained]()
    if settings.exits is None:
        with clock.stage("trials"):
            trials = [trainer.train(form, trial_epochs(settings.epochs), progress) for form in forms]
            forms = worth_it(trials, spec.num_layers)
    with clock.stage("heads"):
        trained = [trainer.train(form, settings.epochs, progress) for form in forms]
    with clock.stage("predictor"):
        predictor, common = _predictor(opened, corpus, trainer, trained, work, settings.seed, progress)
    plain = Calibration(
        opened.checkpoint.source["name"],
        opened.identity,
        tuple(head.head for head in trained),
        draft.ids,
        predictor,
        None,
        {},
    )
    name = _name(plain)
    with clock.stage("build with exits"):
        write_calibration(plain, work / f"heads-{name}", force=True)
        plain = read_calibration(work / f"heads-{name}")  # as it is stored, in 8 bits
        exits_bundle = built_bundle(opened, work / f"bundle-{name}", build, work / f"heads-{name}", progress)
    with clock.stage("thresholds"):
        held = measure(opened, corpus, exits_bundle, request, settings.run_code, progress)
        chosen = _chosen(held, settings)
    numerics = read_manifest(exits_bundle).numerics
    record = {
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "settings": _settings(request, settings),
        "data": _data(corpus, opened),
        "draft_vocabulary": {"size": len(draft.ids), "coverage": {str(k): v for k, v in coverage.items()}},
        "trials": [_trained(trial) for trial in trials],
        "heads": [
            {**_trained(head), **head_report(trainer, replace(head, head=stored), place, corpus, held)}
            for place, (head, stored) in enumerate(zip(trained, plain.heads, strict=True))
        ],
        "predictor": predictor_report(spec, plain.predictor or predictor, corpus, held, common),
        "thresholds": {
            "chosen": _rule(chosen[str(settings.budget)]),
            "numerics": numerics,
            "assumed": ASSUMED,
            "differing_rows": held.differing,
            "budgets": [{**_rule(found), "held_out": rule_report(held, found.rule)} for found in chosen.values()],
        },
        "costs": asdict(costs),
        "stages": {"seconds": clock.seconds, "peak_rss_mb": _peak_mb(), "disk_mb": _disk_mb(work)},
        "versions": {
            "eexport": version("eexport"),
            "torch": version("torch"),
            "python": platform.python_version(),
            "platform": f"{platform.system()} {platform.machine()}",
        },
    }
    rule = chosen[str(settings.budget)].rule
    return replace(plain, thresholds=Thresholds(rule.entropy, rule.previous, numerics), record=record)


class _Clock:
    """Seconds of each stage over all runs in a work folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self.seconds: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self.seconds = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began, before = time.monotonic(), self.seconds.get(name, 0.0)
        try:
            yield
        finally:
            self.seconds[name] = round(before + time.monotonic() - began, 1)
            if self._path.parent.is_dir():
                write_whole(self._path, json.dumps(self.seconds).encode(), "the times")


def _check_splits(corpus: Corpus) -> None:
    for split in SPLITS:
        if not corpus.of(split):
            what = "train the predictor" if split == "predictor" else split
            raise EexportError(
                f"no text is left to {what} with: {len(corpus)} are too few, give more --prompts or --data"
            )


def _costs(bundle: Path, path: Path, threads: int | None, progress: Progress) -> CostTable:
    """What this device takes for each stage; measured once."""
    if path.is_file() and (kept := CostTable.read(path)).threads == (threads or default_threads()):
        return kept
    table = measure_costs(Engine.load(bundle, "cpu", threads, check_hashes=False), progress=progress)
    table.write(path)
    return table


def _predictor(
    opened: Opened,
    corpus: Corpus,
    trainer: Trainer,
    trained: Sequence[Trained],
    work: Path,
    seed: int,
    progress: Progress,
) -> tuple[ExitPredictor, int]:
    """The predictor of the exits among the heads, and the most common required exit."""
    spec = opened.checkpoint.spec
    numbers = corpus.of("predictor")
    exits = [head for head in trained if head.form.depth < spec.num_layers]
    found = [scores(trainer.task(head.form), head.head, corpus, numbers) for head in exits]
    agrees = [np.stack([text.agrees[0] for text in texts], axis=1) for texts in zip(*found, strict=True)]
    labels = sha256(b"".join(text.tobytes() for text in agrees)).hexdigest()[:12]
    state = work / f"predictor-{labels}.pt"
    return train_predictor(spec, corpus, numbers, agrees, exits[0].form.depth, state, seed, progress)


def _chosen(held: HeldOut, settings: Settings) -> dict[str, Chosen]:
    """Thresholds for every budget, the one that was asked for among them."""
    budgets = {str(budget): budget for budget in (*map(Budget.parse, REPORTED), settings.budget)}
    return {name: choose(held.tune, one, settings.confidence, settings.seed, held.own) for name, one in budgets.items()}


def _name(calibration: Calibration) -> str:
    """A hash of everything that was trained."""
    digest = sha256(calibration.draft_ids.tobytes())
    owners = [head.tensors for head in calibration.heads]
    if calibration.predictor is not None:
        owners.append(calibration.predictor.tensors)
    for tensors in owners:
        for name in sorted(tensors):
            digest.update(np.ascontiguousarray(tensors[name]).data)
    return digest.hexdigest()[:12]


def _settings(request: Request, settings: Settings) -> dict[str, Any]:
    """Everything that was asked for; of files the names, as ``_data`` has hashes of what is in them."""
    files = {"data": [path.name for path in request.data], "test_data": [path.name for path in request.test_data]}
    return {**asdict(request), **files, **asdict(settings), "budget": str(settings.budget)}


def _data(corpus: Corpus, opened: Opened) -> dict[str, Any]:
    splits = {}
    for split in SPLITS:
        infos = [corpus.infos[number] for number in corpus.of(split)]
        splits[split] = {
            "texts": len(infos),
            "tokens": sum(info.length - info.first for info in infos),
            "sources": {source: sum(i.source == source for i in infos) for source in sorted({i.source for i in infos})},
            "prompts_sha256": sha256("".join(sorted(info.key for info in infos)).encode()).hexdigest(),
        }
    skipped = [asdict(row) for row in opened.skipped]
    return {"splits": splits, "skipped": skipped, "notes": list(opened.notes)}


def _trained(trained: Trained) -> dict[str, Any]:
    return {
        "name": trained.form.name,
        "depth": trained.form.depth,
        "features": list(trained.form.features),
        "passes": trained.form.passes,
        "trained_tokens": trained.tokens,
        "losses": [round(loss, 4) for loss in trained.losses],
        "speedup": trained.speedup,
        "payoff": {kind: asdict(found) for kind, found in trained.payoff.items()},
    }


def _rule(chosen: Chosen) -> dict[str, Any]:
    rule = chosen.rule
    return {
        "budget": str(chosen.budget),
        "confidence": chosen.confidence,
        "prompts": chosen.prompts,
        "p_value": chosen.p_value,
        "loss": chosen.loss,
        "saved": chosen.saved,
        "reason": chosen.reason,
        "entropy": list(rule.entropy),
        "previous": rule.previous if np.isfinite(rule.previous) else None,
        "exits": rule.exits,
    }


def _peak_mb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def _disk_mb(work: Path) -> int:
    return sum(path.stat().st_size for path in work.rglob("*") if path.is_file()) >> 20
