"""From recorded continuations to the report's numbers. Everything here is arithmetic on records: no model runs."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eexport.calibration import depth, eas
from eexport.calibration.data import Encoded
from eexport.calibration.decode import FULL, Continuation
from eexport.calibration.drafts import LONGEST, Recorded, expected_accepted, looping_share
from eexport.calibration.frontier import Scored, frontier
from eexport.calibration.intervals import prompts_needed
from eexport.calibration.measures import TOP, Measures
from eexport.calibration.predict import nearly_free_rows, predict
from eexport.runtime.costs import CostTable

ALL = "all"
SAMPLE_TOKENS = 48


@dataclass(frozen=True)
class Sample:
    """A prompt, what came after it, and how a policy's answer was judged (None: not scored)."""

    encoded: Encoded
    continuation: Continuation
    correct: dict[int, bool | None]

    @property
    def kind(self) -> str:
        """The prompt's kind of text."""
        return self.encoded.prompt.kind


@dataclass(frozen=True)
class Subject:
    """What was probed, as far as the arithmetic needs it.

    ``depths`` are the P depths of the records, ``end_tokens`` those that end a continuation of the model's own accord.
    """

    num_layers: int
    depths: tuple[int, ...]
    end_tokens: frozenset[int]
    thresholds: tuple[float, ...]
    alpha: float
    tau: float


def analyse(
    samples: Sequence[Sample], subject: Subject, costs: CostTable, decode: Callable[[Sequence[int]], str]
) -> dict[str, Any]:
    """All results of the report as plain JSON values, from one sample or more."""
    kinds: dict[str, list[Sample]] = {}
    for sample in samples:
        kinds.setdefault(sample.kind, []).append(sample)
    kinds = dict(sorted(kinds.items()))
    groups = {ALL: list(samples), **kinds}
    measures = {kind: Measures.join([s.continuation.measures for s in group]) for kind, group in groups.items()}
    # Each text once, whatever groups it is in: it keeps what was looked up in it.
    texts = {kind: [_recorded(sample) for sample in group] for kind, group in kinds.items()}
    recorded = {ALL: [text for group in texts.values() for text in group], **texts}
    result: dict[str, Any] = {
        "depths": list(subject.depths),
        "kinds": {kind: _counts(group, recorded[kind], subject) for kind, group in groups.items()},
        "curves": {kind: _curves(found) for kind, found in measures.items()},
        "eas": {kind: _eas(found, subject) for kind, found in measures.items()},
        "oracle": {kind: _frontier(group, subject) for kind, group in kinds.items()},
        "depth": {kind: _depth(group, measures[kind], subject) for kind, group in groups.items()},
        "drafts": {kind: _drafts(texts_, subject) for kind, texts_ in recorded.items()},
        "heatmaps": [_heatmap(group[0], decode) for group in kinds.values()],
        "costs": dataclasses.asdict(costs),
        "predictions": [
            dataclasses.asdict(predict(texts, subject.depths, table)) for table in (costs, nearly_free_rows(costs))
        ],
    }
    result["caveats"] = _caveats(result, kinds)
    rounded: dict[str, Any] = _plain(result)
    return rounded


def _recorded(sample: Sample) -> Recorded:
    measures = sample.continuation.measures
    tokens = sample.continuation.paths[FULL].tokens
    return Recorded(sample.encoded.ids, tuple(tokens), measures.agrees, measures.entropy)


def _counts(group: Sequence[Sample], recorded: Sequence[Recorded], subject: Subject) -> dict[str, Any]:
    return {
        "prompts": len(group),
        "cut": sum(sample.encoded.cut for sample in group),
        "prompt_tokens": sum(len(sample.encoded.ids) for sample in group),
        "tokens": sum(len(text.tokens) for text in recorded),
        "unfinished": float(np.mean([text.tokens[-1] not in subject.end_tokens for text in recorded])),
        "looping": looping_share(recorded),
        "task": next((sample.encoded.prompt.task for sample in group if sample.encoded.prompt.task), None),
    }


def _curves(measures: Measures) -> dict[str, Any]:
    means: dict[str, NDArray[Any]] = {
        "hidden_cosine": measures.hidden_cosine,
        "logit_cosine": measures.logit_cosine,
        "top_overlap": measures.top_overlap / TOP,
        "top_order": measures.top_order / TOP,
        "agreement": measures.agrees,
        "entropy": measures.entropy,
        "probability": measures.probability,
    }
    return {name: values.mean(axis=0, dtype=np.float64) for name, values in means.items()}


def _eas(measures: Measures, subject: Subject) -> dict[str, Any]:
    similarity = {
        "logits": eas.from_cosine(measures.logit_cosine.mean(axis=0, dtype=np.float64)),
        "hidden": eas.from_cosine(measures.hidden_cosine.mean(axis=0, dtype=np.float64)),
        "top": measures.top_overlap.mean(axis=0, dtype=np.float64) / TOP,
    }
    where = subject.depths, subject.num_layers
    every = subject.depths == tuple(range(1, subject.num_layers + 1)) and subject.num_layers > 1
    return {
        # The mean over a few depths that a bundle shows would be another figure of the same name.
        "score": {name: eas.eas(values, *where, subject.alpha) for name, values in similarity.items()}
        if every
        else None,
        "by_depth": {name: eas.layer_scores(values, *where, subject.alpha) for name, values in similarity.items()},
        "by_alpha": {
            name: [eas.eas(values, *where, alpha) for alpha in eas.ALPHAS] for name, values in similarity.items()
        }
        if every
        else None,
    }


def _frontier(group: Sequence[Sample], subject: Subject) -> dict[str, Any]:
    scored = [Scored(sample.correct, sample.continuation.paths) for sample in group]
    return dataclasses.asdict(frontier(scored, subject.thresholds, subject.depths, subject.num_layers))


def _depth(group: Sequence[Sample], measures: Measures, subject: Subject) -> dict[str, Any]:
    count, where = len(subject.depths), (subject.depths, subject.num_layers)
    confident = depth.confident_at(measures.entropy, subject.tau)
    decided = depth.decided_at(measures.argmax)
    entropies = [sample.continuation.measures.entropy for sample in group]
    right = measures.agrees[np.arange(len(confident)), np.minimum(confident, count - 1)]
    early = confident < count - 1
    return {
        "confident": {
            "histogram": depth.histogram(confident, count),
            "never": float((confident == count).mean()),
            "skip": depth.skip_share(confident, *where),
            "right_when_early": float(right[early].mean()) if early.any() else None,
            "layer_use": depth.layer_use(confident, *where),
        },
        "decided": {
            "histogram": depth.histogram(decided, count),
            "skip": depth.skip_share(decided, *where),
            "layer_use": depth.layer_use(decided, *where),
        },
        "layer_ranges": depth.layer_ranges(subject.num_layers),
        "boilerplate": dataclasses.asdict(depth.boilerplate(entropies, *where, subject.tau)),
    }


def _drafts(recorded: Sequence[Recorded], subject: Subject) -> dict[str, Any]:
    lengths = range(1, LONGEST + 1)
    return {
        "lengths": list(lengths),
        "lookup": [expected_accepted(recorded, None, length) for length in lengths],
        "exits": {
            at: [expected_accepted(recorded, place, length) for length in lengths]
            for place, at in enumerate(subject.depths[:-1])
        },
    }


def _heatmap(sample: Sample, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """One text, token by token; ``shown`` is what each depth would have said."""
    measures = sample.continuation.measures
    tokens = sample.continuation.paths[FULL].tokens[:SAMPLE_TOKENS]
    words = {token: decode([token]) for token in {*tokens, *measures.argmax[: len(tokens)].ravel().tolist()}}
    return {
        "kind": sample.kind,
        "prompt": decode(sample.encoded.ids),
        "tokens": [words[token] for token in tokens],
        "shown": [[words[token] for token in row] for row in measures.argmax[: len(tokens)].tolist()],
        "agrees": measures.agrees[: len(tokens)].astype(int),
        "entropy": measures.entropy[: len(tokens)],
        "logit_cosine": measures.logit_cosine[: len(tokens)],
    }


def _caveats(result: Mapping[str, Any], kinds: Mapping[str, Sequence[Sample]]) -> list[str]:
    lines = []
    here = result["predictions"][0]
    if not here["apart"]:
        lines.append("all prompts are one: the predictions' parameters are judged on the text that chose them")
    if here["verdict"]["few"] is not None:
        lines.append(
            f"{here['verdict']['few']}: too few prompts to say how certain the predictions and the verdict are"
        )
    elif not here["verdict"]["certain"]:
        lines.append("other prompts of the same kinds could well turn the verdict: give more of them")
    for kind, group in kinds.items():
        lines += [f"{kind}: {text}" for text in _kind_caveats(result["oracle"][kind], result["kinds"][kind], group)]
    if not result["eas"][ALL]["score"]:
        lines.append(
            "a bundle shows only the depths at which its blocks end and the first four, so there is no score over all "
            "layers, and tokens seem to be decided later than they are: probe the checkpoint for every layer"
        )
    return lines


def _kind_caveats(found: Mapping[str, Any], counts: Mapping[str, Any], group: Sequence[Sample]) -> list[str]:
    lines = []
    if scored := found["scored"]:
        if counts["unfinished"] > 0.2:
            lines.append(
                f"{counts['unfinished']:.0%} of the answers were cut off and so can hardly be right: raise --tokens"
            )
        if found["accuracy"]["value"] < 0.1:
            lines.append("the full model solves so few of these that their loss says little")
        strictest = min(found["budgets"], key=lambda row: row["allowed"])
        text = f"{scored} scored prompts, so one changed answer is {100 / scored:.1f} points"
        if strictest["allowed"] <= 0:
            lines.append(text)
        elif scored < (needed := prompts_needed(strictest["allowed"])):
            lines.append(f"{text}; confirming a loss within {strictest['budget']} takes {needed} or more")
    elif any(sample.encoded.prompt.task is not None for sample in group):
        lines.append(
            "none of the answers could be scored: code is only run with --run-code, and cut prompts are left out"
        )
    if (looping := counts["looping"]) >= 0.1:
        lines.append(
            f"{looping:.0%} of the tokens are endless repetition, as greedy decoding of a small model ends in; lookup "
            "and agreement look better on them than on useful text"
        )
    return lines


def _plain(value: Any) -> Any:
    """Plain JSON values, with six significant digits; what JSON cannot say (infinity) becomes null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
