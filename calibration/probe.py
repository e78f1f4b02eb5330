"""The probe: is there room for early exit in this model, on this text, on this device?

Prompts are continued by the model itself and measured at every depth as they grow (``decode``), kept on disk
(``store``), and turned into a report's numbers (``analysis``) with a device's costs.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any

from eexport.calibration.analysis import Sample, Subject, analyse
from eexport.calibration.data import Encoded, Skipped
from eexport.calibration.decode import Continuation, continue_prompts
from eexport.calibration.sandbox import isolation
from eexport.calibration.store import TraceStore
from eexport.calibration.tasks import score
from eexport.calibration.traced import TracedModel
from eexport.runtime.console import Progress
from eexport.runtime.costs import CostTable
from eexport.runtime.errors import EexportError

SCHEMA_VERSION = 1
THRESHOLDS = (0.8, 0.85, 0.9, 0.95, 0.98)

# Prompts at a time. Their oracles branch off into as many sequences again or more, which fill a model's width; what a
# group has measured is lost when it is interrupted.
_GROUP = 8


@dataclass(frozen=True)
class Settings:
    """What a probe is asked.

    Attributes:
        tokens: Longest continuation of a prompt.
        max_tokens: Tokens of the full model over all prompts; no further prompts are begun after that many.
        minutes: Time from the start after which no further prompts are begun; None is no limit.
        thresholds: The oracles' δ.
        alpha: Weight of similarity in the score, 0 to 1.
        tau: Entropy in nats under which a depth counts as sure.
        seed: Of the prompts' order.
        run_code: Whether to run code that the model wrote, to score it.
    """

    tokens: int = 192
    max_tokens: int = 20000
    minutes: float | None = None
    thresholds: tuple[float, ...] = THRESHOLDS
    alpha: float = 0.5
    tau: float = 0.5
    seed: int = 0
    run_code: bool = False


@dataclass(frozen=True)
class Inputs:
    """What is probed.

    Attributes:
        model: The model.
        decode: Token ids to text.
        prompts: In the order in which they are to be used; one or more.
        skipped: Rows of the data that could not be used.
        costs: Of the device to predict for.
        store: What was recorded before and is recorded now.
        started: ``time.monotonic()`` when the work began, for ``Settings.minutes``.
    """

    model: TracedModel
    decode: Callable[[Sequence[int]], str]
    prompts: Sequence[Encoded]
    skipped: Sequence[Skipped]
    costs: CostTable
    store: TraceStore
    started: float


def run_probe(inputs: Inputs, settings: Settings, progress: Progress = lambda *_: None) -> dict[str, Any]:
    """Measure and predict; the report's content as plain JSON values.

    Called again with the same store, it goes on from what is recorded there.

    Raises:
        EexportError: The activations are not finite, or time allowed no prompt.
    """
    model, decode = inputs.model, inputs.decode
    found, seconds, stopped = _record(inputs, settings, progress)
    if not found:
        raise EexportError("no prompt was measured in the time given: raise --minutes")
    samples = []
    for index, (encoded, continuation) in enumerate(found):
        progress("scoring", index, len(found))
        samples.append(Sample(encoded, continuation, _score(encoded, continuation, decode, settings.run_code)))
    progress("predicting", 0, 1)
    subject = Subject(
        model.num_layers, model.depths, model.eos_token_ids, settings.thresholds, settings.alpha, settings.tau
    )
    results = analyse(samples, subject, inputs.costs, decode)
    if settings.run_code and (missing := isolation()):
        results["caveats"].append(f"code was run, but {missing}")
    if inputs.costs.model != model.name:
        results["caveats"].append(f"the cost table was measured with another model, {inputs.costs.model}")
    return {
        "schema_version": SCHEMA_VERSION,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "eexport": version("eexport"),
        "model": {"name": model.name, "form": model.form, "num_layers": model.num_layers, "sha256": model.identity},
        "settings": asdict(settings),
        "data": {
            "used": len(found),
            "cut": sum(encoded.cut for encoded, _ in found),
            "left_out": len(inputs.prompts) - len(found),
            "stopped_by": stopped,
            "skipped": [asdict(row) for row in inputs.skipped],
        },
        "timing": {
            "seconds": round(time.monotonic() - inputs.started, 1),
            "tokens": sum(len(c.measures.argmax) for _, c in found),
            "seconds_per_1000_tokens": seconds,
        },
        **results,
    }


def _record(
    inputs: Inputs, settings: Settings, progress: Progress
) -> tuple[list[tuple[Encoded, Continuation]], float | None, str | None]:
    """Records of as many prompts as the budgets allow; seconds per 1000 tokens measured now; what stopped it."""
    found: list[tuple[Encoded, Continuation]] = []
    tokens = new_tokens = 0
    new_seconds = 0.0
    total = min(settings.max_tokens, len(inputs.prompts) * settings.tokens)

    def on_token() -> None:
        nonlocal tokens, new_tokens
        tokens, new_tokens = tokens + 1, new_tokens + 1
        progress("measuring", min(tokens, total), total)

    stopped = None
    size = min(_GROUP, inputs.model.width)
    for start in range(0, len(inputs.prompts), size):
        if tokens >= settings.max_tokens:
            stopped = "max-tokens"
            break
        group = inputs.prompts[start : start + size]
        records = [inputs.store.load(encoded.hash) for encoded in group]
        tokens += sum(len(record.measures.argmax) for record in records if record is not None)
        missing = [index for index, record in enumerate(records) if record is None]
        began = time.monotonic()
        if missing and settings.minutes is not None and began - inputs.started > 60 * settings.minutes:
            stopped, missing = "minutes", []  # what is recorded already is still used
        if missing:
            ids = [group[index].ids for index in missing]
            made = continue_prompts(inputs.model, ids, settings.thresholds, settings.tokens, on_token)
            for index, continuation in zip(missing, made, strict=True):
                inputs.store.save(group[index].hash, continuation)
                records[index] = continuation
            new_seconds += time.monotonic() - began
        found += [(encoded, record) for encoded, record in zip(group, records, strict=True) if record is not None]
    return found, round(1000 * new_seconds / new_tokens, 1) if new_tokens else None, stopped


def _score(
    encoded: Encoded, continuation: Continuation, decode: Callable[[Sequence[int]], str], run_code: bool
) -> dict[int, bool | None]:
    """Whether each policy's answer is right; equal answers are judged once, as running code takes time."""
    if encoded.cut:  # the question may have lost what its answer needs
        return dict.fromkeys(continuation.paths)
    judged: dict[str, bool | None] = {}
    result = {}
    for policy, path in continuation.paths.items():
        answer = decode(path.tokens)
        if answer not in judged:
            judged[answer] = score(encoded.prompt, answer, run_code)
        result[policy] = judged[answer]
    return result
