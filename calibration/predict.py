"""Which policy would pay on a device: recorded continuations replayed against its cost table.

Parameters (exit, draft length, entropy) are chosen on one half of the prompts and judged on the other, both ways
round, so that a lucky choice does not flatter the figure.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eexport.calibration.drafts import LONGEST, Policy, Recorded, Replay, Tally
from eexport.calibration.verdict import ADDS, PAYS, Breakeven, Verdict, judge, needed_agreement
from eexport.runtime.costs import CostTable

LENGTHS = (1, 2, 3, 4, 5, 7)
LOOKUPS_WITH_EXIT = (2, 4, 7)
DRAFT_TAUS = (0.1, 0.3, 1.0, 2.0, math.inf)
EXIT_TAUS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
WRONG_AT_MOST = (0.005, 0.01, 0.05)
"""Shares of tokens that may be wrong where they leave, for exits that nobody verifies."""
ROW_COST = 0.02
"""What a further row costs where rows are nearly free, as on a GPU: this share of the first."""
_EXITS_TRIED_WITH_LOOKUP = 3
_LEAST_AGREEMENT = 0.02  # an exit that is right less often than this is not worth replaying
_LEAST_PROMPTS = 5  # of a kind, for an interval to mean something
_RESAMPLES = 1000
_FIELDS = tuple(field.name for field in dataclasses.fields(Tally))
_TOKENS, _MS = _FIELDS.index("tokens"), _FIELDS.index("ms")

Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class Forecast:
    """What a kind of policy would give.

    Attributes:
        name: "full", "lookup", "exit", "hybrid" or, for exits that nobody verifies, "budget 1.0%".
        policy: The parameters that are best on all prompts.
        speedup: By kind of text and, under "all", their geometric mean, against all layers for every token.
        low: Lower end of the 95% interval of the mean, from resampled prompts.
        high: Its upper end.
        accepted: Drafted tokens accepted a round, by kind and under "all".
        exited: Share of tokens that left early unverified.
        wrong: Share of all tokens that left early and are not the full model's at that place.
    """

    name: str
    policy: Policy
    speedup: dict[str, float]
    low: float
    high: float
    accepted: dict[str, float]
    exited: float
    wrong: float


@dataclass(frozen=True)
class Prediction:
    """All of a prediction for one device; ``apart``: whether choice and judgement had prompts of their own."""

    device: str
    forecasts: tuple[Forecast, ...]
    breakeven: tuple[Breakeven, ...]
    verdict: Verdict
    apart: bool


class _Bench:
    """Replays policies over N texts of several kinds, once each; a result is a table [N, fields of ``Tally``]."""

    def __init__(self, texts: Mapping[str, Sequence[Recorded]], costs: CostTable) -> None:
        self._kinds = list(texts)
        self._texts = [text for group in texts.values() for text in group]
        self._kind_of = np.repeat(np.arange(len(texts)), [len(group) for group in texts.values()])
        # Each kind begins in the other half than the one before it, so that kinds of one prompt fall in both.
        numbers = np.concatenate([number + np.arange(len(group)) for number, group in enumerate(texts.values())])
        self._halves = (numbers % 2 == 0, numbers % 2 == 1)
        self.apart = all(half.any() for half in self._halves)
        self._replay, self._step = Replay(costs), costs.step_ms(1)
        self._done: dict[Policy, Doubles] = {}
        self._weights = self._resampled()

    def table(self, policy: Policy) -> Doubles:
        if policy not in self._done:
            rows = [dataclasses.astuple(self._replay(policy, text)) for text in self._texts]
            self._done[policy] = np.array(rows, np.float64)
        return self._done[policy]

    def speedup(self, policy: Policy, part: NDArray[np.bool_] | None = None) -> float:
        """Geometric mean over the kinds, on the texts of ``part`` only; 1 where these are none."""
        weights = np.ones(len(self._texts)) if part is None else part.astype(np.float64)
        return float(np.exp(self._log_speedups(self.table(policy), weights[None])[0]))

    def forecast(self, name: str, policies: Sequence[Policy], wrong: float = 1.0) -> tuple[Forecast, Doubles]:
        """The policy chosen on each half, judged on the other; also the mean's speed-up in each resample."""
        whole = np.ones(len(self._texts), bool)
        judged = np.empty((len(self._texts), len(_FIELDS)))
        for chosen_on, judged_on in zip(self._halves, self._halves[::-1], strict=True):
            judged[judged_on] = self.table(self._best(policies, chosen_on if self.apart else whole, wrong))[judged_on]
        resampled = np.exp(self._log_speedups(judged, self._weights))
        low, high = np.quantile(resampled, [0.025, 0.975]).tolist()
        sums = {kind: judged[self._kind_of == number].sum(axis=0) for number, kind in enumerate(self._kinds)}
        speedup = {kind: float(row[_TOKENS] * self._step / row[_MS]) if row[_MS] else 1.0 for kind, row in sums.items()}
        total = Tally(*judged.sum(axis=0).tolist())
        by_kind = {kind: Tally(*row.tolist()) for kind, row in sums.items()}
        forecast = Forecast(
            name=name,
            policy=self._best(policies, whole, wrong),
            speedup={**speedup, "all": geometric_mean(list(speedup.values()))},
            low=low,
            high=high,
            accepted={kind: tally.accepted / max(1, tally.rounds) for kind, tally in {**by_kind, "all": total}.items()},
            exited=total.exited / max(1, total.tokens),
            wrong=total.wrong / max(1, total.tokens),
        )
        return forecast, resampled

    def few(self) -> str | None:
        """The kind with too few prompts for an interval, if there is one."""
        counts = np.bincount(self._kind_of)
        return self._kinds[int(counts.argmin())] if counts.min() < _LEAST_PROMPTS else None

    def _best(self, policies: Sequence[Policy], part: NDArray[np.bool_], wrong: float) -> Policy:
        def share_wrong(policy: Policy) -> float:
            total = Tally(*self.table(policy)[part].sum(axis=0).tolist())
            return total.wrong / max(1, total.tokens)

        fitting = [policy for policy in policies if share_wrong(policy) <= wrong]
        return max(fitting, key=lambda policy: self.speedup(policy, part), default=Policy("full"))

    def _log_speedups(self, table: Doubles, weights: Doubles) -> Doubles:
        """For each row of ``weights`` [B, N] the log of the geometric mean over the kinds that have weight: [B]."""
        total, count = np.zeros(len(weights)), np.zeros(len(weights))
        for number in range(len(self._kinds)):
            here = self._kind_of == number
            tokens, ms = (weights[:, here] @ table[here, column] for column in (_TOKENS, _MS))
            counts = ms > 0
            total += np.log(np.where(counts, tokens * self._step, 1) / np.where(counts, ms, 1))
            count += counts
        result: Doubles = total / np.maximum(count, 1)
        return result

    def _resampled(self) -> Doubles:
        """How often each text is drawn, kind by kind, in each of many resamples: [B, N]."""
        generator = np.random.default_rng(0)
        weights = np.zeros((_RESAMPLES, len(self._texts)))
        for number in range(len(self._kinds)):
            here = np.flatnonzero(self._kind_of == number)
            weights[:, here] = generator.multinomial(len(here), np.full(len(here), 1 / len(here)), _RESAMPLES)
        return weights


def predict(texts: Mapping[str, Sequence[Recorded]], depths: Sequence[int], costs: CostTable) -> Prediction:
    """Predict every kind of policy on one device.

    Args:
        texts: Continuations by kind of text; none of the kinds empty.
        depths: The P depths that they were recorded at, the last the full depth.
        costs: Of the device, for a model of the same number of layers.
    """
    bench = _Bench(texts, costs)
    agreement = _agreement(texts)
    exits = [place for place in range(len(depths) - 1) if agreement[place] >= _LEAST_AGREEMENT]
    drafting = {
        place: [
            Policy("exact", place=place, depth=depths[place], length=length, tau=tau)
            for length in LENGTHS
            for tau in DRAFT_TAUS
        ]
        for place in exits
    }
    promising = sorted(exits, key=lambda place: -max(map(bench.speedup, drafting[place])))[:_EXITS_TRIED_WITH_LOOKUP]
    searches = {
        "full": [Policy("full")],
        "lookup": [Policy("exact", lookup=length) for length in range(1, LONGEST + 1)],
        "exit": [policy for policies in drafting.values() for policy in policies],
        "hybrid": [
            dataclasses.replace(policy, lookup=length)
            for place in promising
            for policy in drafting[place]
            for length in LOOKUPS_WITH_EXIT
        ],
    }
    found = {name: bench.forecast(name, policies) for name, policies in searches.items()}
    leaving = [Policy("budget", place=place, depth=depths[place], tau=tau) for place in exits for tau in EXIT_TAUS]
    for wrong in WRONG_AT_MOST:
        found[f"budget {wrong:.1%}"] = bench.forecast(f"budget {wrong:.1%}", leaving, wrong)
    forecasts = tuple(forecast for forecast, _ in found.values())
    breakeven = tuple(
        Breakeven(depth, needed_agreement(costs, depth), float(agreement[place]))
        for place, depth in enumerate(depths[:-1])
    )
    verdict = judge(forecasts, breakeven, costs.num_layers)
    # The lead of the best policy with an exit over what it must reach to pay, in each resample.
    limit = np.maximum(PAYS, ADDS * found[verdict.without][1])
    lead = np.quantile(found[verdict.with_exit][1] / limit, [0.025, 0.975])
    verdict = dataclasses.replace(
        verdict, certain=bench.few() is None and bool((lead > 1).all() or (lead < 1).all()), few=bench.few()
    )
    where = f"{costs.device} ({costs.backend}, {costs.threads} threads)"
    return Prediction(where, forecasts, breakeven, verdict, bench.apart)


def nearly_free_rows(costs: CostTable) -> CostTable:
    """The same device if further rows cost next to nothing, as they do on a GPU: 2% of the first row each."""
    stages = tuple(
        dataclasses.replace(stage, ms=tuple(stage.ms[0] * (1 + ROW_COST * (rows - 1)) for rows in costs.rows))
        for stage in costs.stages
    )
    return dataclasses.replace(costs, device=f"{costs.device}, were further rows nearly free", stages=stages)


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive values."""
    return math.exp(sum(map(math.log, values)) / len(values))


def _agreement(texts: Mapping[str, Sequence[Recorded]]) -> list[float]:
    """For each depth the mean over kinds of the share of tokens on which it agrees with the last."""
    means = [np.concatenate([text.agrees for text in group]).mean(axis=0) for group in texts.values()]
    result: list[float] = np.mean(means, axis=0).tolist()
    return result
