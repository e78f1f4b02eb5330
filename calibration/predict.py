"""Which policy would pay on a device: recorded continuations replayed against its cost table.

Parameters (exit, draft length, entropy) are chosen on one half of the prompts and judged on the other, both ways
round, so that a lucky choice does not flatter the figure.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from eexport.calibration.drafts import LONGEST, Policy, Recorded, Tally, replay
from eexport.runtime.costs import CostTable

LENGTHS = (1, 2, 3, 4, 6, 8)
DRAFT_TAUS = (0.1, 0.3, 1.0, 2.0, math.inf)
EXIT_TAUS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
BUDGETS = (0.005, 0.01, 0.05)
"""Shares of tokens that may differ from the full model's, for exits that nobody verifies."""
PAYS, ADDS = 1.05, 1.02
"""Early exit pays if it is this much faster than all layers, and than the best policy without it."""
ROW_COST = 0.02
"""What a further row costs where rows are nearly free, as on a GPU: this share of the first."""
_EXITS_TRIED_WITH_LOOKUP = 4
_LEAST_AGREEMENT = 0.02  # an exit that is right less often than this is not worth replaying


@dataclass(frozen=True)
class Forecast:
    """What a kind of policy would give.

    Attributes:
        name: "full", "lookup", "exit", "hybrid" or "budget 1%".
        policy: The parameters that are best on all prompts.
        speedup: By kind of text and, under "all", their geometric mean, against all layers for every token.
        accepted: Drafted tokens accepted a round, by kind.
        exited: Share of tokens that left early unverified.
        wrong: Share of all tokens that differ from the full model's because of it.
    """

    name: str
    policy: Policy
    speedup: dict[str, float]
    accepted: dict[str, float]
    exited: float
    wrong: float


@dataclass(frozen=True)
class Breakeven:
    """What an exit must reach to pay by itself: ``needed`` agreement (None: it cannot), beside the measured one."""

    depth: int
    needed: float | None
    measured: float


@dataclass(frozen=True)
class Verdict:
    """Whether early exit pays here, the best policy's name, and why."""

    pays: bool
    best: str
    headline: str
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Prediction:
    """All of a prediction for one device."""

    device: str
    forecasts: tuple[Forecast, ...]
    breakeven: tuple[Breakeven, ...]
    verdict: Verdict


_Halves = dict[str, tuple[Tally, Tally]]
_Allowed = Callable[[Policy, tuple[int, ...]], bool]


class _Bench:
    """Replays policies over every kind of text, in two halves, once each."""

    def __init__(self, texts: Mapping[str, Sequence[Recorded]], costs: CostTable) -> None:
        self._texts, self._costs = texts, costs
        self._done: dict[Policy, _Halves] = {}
        self._step = costs.step_ms(1)

    def halves(self, policy: Policy) -> _Halves:
        if policy not in self._done:
            result: _Halves = {}
            for kind, texts in self._texts.items():
                pair = result[kind] = (Tally(), Tally())
                for index, text in enumerate(texts):
                    pair[index % 2].add(replay(policy, text, self._costs))
            self._done[policy] = result
        return self._done[policy]

    def speedup(self, halves: _Halves, *parts: int) -> float:
        """Geometric mean over kinds of the speed-up on these halves."""
        return geometric_mean([self.kind_speedup([pair[part] for part in parts]) for pair in halves.values()])

    def kind_speedup(self, tallies: Sequence[Tally]) -> float:
        ms = sum(tally.ms for tally in tallies)
        return sum(tally.tokens for tally in tallies) * self._step / ms if ms else 1.0

    def best(
        self, policies: Sequence[Policy], allowed: Callable[[Policy, tuple[int, ...]], bool], *parts: int
    ) -> Policy:
        fitting = [policy for policy in policies if allowed(policy, parts)]
        return max(fitting, key=lambda policy: self.speedup(self.halves(policy), *parts), default=Policy("full"))

    def wrong(self, policy: Policy, *parts: int) -> float:
        tallies = [pair[part] for pair in self.halves(policy).values() for part in parts]
        return sum(t.wrong for t in tallies) / max(1, sum(t.tokens for t in tallies))

    def forecast(self, name: str, policies: Sequence[Policy], most_wrong: float = 0.0) -> Forecast:
        """The policy chosen on each half, judged on the other."""

        def allowed(policy: Policy, parts: tuple[int, ...]) -> bool:
            return policy.mode != "budget" or self.wrong(policy, *parts) <= most_wrong

        judged: dict[str, list[Tally]] = {kind: [] for kind in self._texts}
        for chosen_on, judged_on in ((0, 1), (1, 0)):
            halves = self.halves(self.best(policies, allowed, chosen_on))
            for kind, pair in halves.items():
                judged[kind].append(pair[judged_on])
        speedup = {kind: self.kind_speedup(tallies) for kind, tallies in judged.items()}
        everything = Tally()
        for tallies in judged.values():
            for tally in tallies:
                everything.add(tally)
        tokens = max(1, everything.tokens)
        accepted = {
            kind: sum(t.accepted for t in tallies) / max(1, sum(t.rounds for t in tallies))
            for kind, tallies in judged.items()
        }
        return Forecast(
            name=name,
            policy=self.best(policies, allowed, 0, 1),
            speedup={**speedup, "all": geometric_mean(list(speedup.values()))},
            accepted={**accepted, "all": everything.accepted / max(1, everything.rounds)},
            exited=everything.exited / tokens,
            wrong=everything.wrong / tokens,
        )


def predict(texts: Mapping[str, Sequence[Recorded]], depths: Sequence[int], costs: CostTable) -> Prediction:
    """Predict every kind of policy on one device.

    Args:
        texts: Continuations by kind of text; none of the kinds empty.
        depths: The P depths that they were recorded at, the last the full depth.
        costs: Of the device, for a model of the same number of layers.
    """
    bench = _Bench(texts, costs)
    agreement = _agreement(texts, len(depths))
    exits = [place for place in range(len(depths) - 1) if agreement[place] >= _LEAST_AGREEMENT]
    full = Policy("full")
    lookups = [Policy("exact", lookup=length) for length in range(1, LONGEST + 1)]
    drafting = [
        Policy("exact", place=place, depth=depths[place], length=length, tau=tau)
        for place in exits
        for length in LENGTHS
        for tau in DRAFT_TAUS
    ]
    drafting.sort(key=lambda policy: bench.speedup(bench.halves(policy), 0, 1), reverse=True)
    hybrids = [
        dataclasses.replace(policy, lookup=length)
        for policy in drafting[:_EXITS_TRIED_WITH_LOOKUP]
        for length in range(1, LONGEST + 1)
    ]
    leaving = [Policy("budget", place=place, depth=depths[place], tau=tau) for place in exits for tau in EXIT_TAUS]
    forecasts = [
        bench.forecast("full", [full]),
        bench.forecast("lookup", lookups),
        bench.forecast("exit", drafting),
        bench.forecast("hybrid", hybrids),
        *(bench.forecast(f"budget {budget:.1%}", leaving, budget) for budget in BUDGETS),
    ]
    breakeven = tuple(
        Breakeven(depths[place], needed_agreement(costs, depths[place]), float(agreement[place]))
        for place in range(len(depths) - 1)
    )
    where = f"{costs.device} ({costs.backend}, {costs.threads} threads)"
    return Prediction(where, tuple(forecasts), breakeven, judge(forecasts, breakeven, costs.num_layers))


def judge(forecasts: Sequence[Forecast], breakeven: Sequence[Breakeven], num_layers: int) -> Verdict:
    """Say whether early exit pays, and why or why not, from the lossless policies."""
    speed = {forecast.name: forecast.speedup["all"] for forecast in forecasts}
    with_exit = max(("exit", "hybrid"), key=lambda name: speed[name])
    without = max(("full", "lookup"), key=lambda name: speed[name])
    pays = speed[with_exit] >= max(PAYS, ADDS * speed[without])
    best = with_exit if pays else without if speed[without] >= PAYS else "full"
    chosen = next(forecast for forecast in forecasts if forecast.name == with_exit)
    reasons = [f"n-gram lookup alone, which needs no exit, predicts {speed['lookup']:.2f}x"]
    depth = chosen.policy.depth
    if pays:
        headline = f"Early exit pays: {speed[best]:.2f}x predicted with nothing lost, {_plain(chosen.policy)}"
    else:
        headline = "Early exit does not pay here: " + (
            f"use n-gram lookup, {speed['lookup']:.2f}x predicted with nothing lost"
            if best == "lookup"
            else "run every layer for every token"
        )
    if depth is None:
        reasons.append("no layer before the last agrees with it on enough tokens to draft from")
    else:
        reasons.append(
            f"the best exit, after layer {depth} of {num_layers}, predicts {speed['exit']:.2f}x alone and "
            f"{speed['hybrid']:.2f}x with lookup"
        )
    reachable = [(row, row.needed) for row in breakeven if row.needed is not None]
    if reachable:
        nearest, needed = max(reachable, key=lambda pair: pair[0].measured / max(pair[1], 1e-9))
        reasons.append(
            f"of all exits the one after layer {nearest.depth} is nearest to break-even: it agrees with the last layer "
            f"on {nearest.measured:.0%} of tokens and would have to on {needed:.0%}"
        )
    else:
        reasons.append("on this device no exit can break even, however good: a draft costs too much there")
    budgets = [forecast for forecast in forecasts if forecast.name.startswith("budget")]
    if budgets and (top := max(budgets, key=lambda forecast: forecast.speedup["all"])).speedup["all"] > 1:
        reasons.append(
            f"exits that nobody verifies predict {top.speedup['all']:.2f}x with {top.wrong:.1%} of tokens changed"
        )
    else:
        reasons.append("exits that nobody verifies are no faster within 5% of changed tokens")
    return Verdict(pays, best, headline, tuple(reasons))


def needed_agreement(costs: CostTable, depth: int) -> float | None:
    """The least share of right tokens with which drafting at ``depth`` is no slower than all layers.

    Each drafted token is taken to be right independently with this probability; the draft length is the best one.
    None where even a perfect exit is slower.
    """
    rounds = [
        replay(Policy("exact", place=0, depth=depth, length=length), _perfect(length + 1), costs).ms
        for length in range(1, LONGEST + 1)
    ]

    def speedup(p: float) -> float:
        made = [sum(p**token for token in range(length + 1)) for length in range(1, LONGEST + 1)]
        return max(tokens * costs.step_ms(1) / ms for tokens, ms in zip(made, rounds, strict=True))

    if speedup(1.0) < 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if speedup(middle) >= 1 else (middle, high)
    return high


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


def _perfect(tokens: int) -> Recorded:
    """A text of one round after its first token, on which an exit is always right and sure."""
    shape = (tokens + 1, 1)
    return Recorded((), tuple(range(tokens + 1)), np.ones(shape, bool), np.zeros(shape, np.float32))


def _agreement(texts: Mapping[str, Sequence[Recorded]], count: int) -> list[float]:
    """Mean over kinds of the share of tokens on which each of ``count`` depths agrees with the last."""
    means = [np.concatenate([text.agrees for text in group]).mean(axis=0) for group in texts.values()]
    result: list[float] = np.mean(means, axis=0).tolist()
    assert len(result) == count
    return result


def _plain(policy: Policy) -> str:
    text = f"drafting up to {policy.length} tokens after layer {policy.depth}"
    return f"{text}, and up to {policy.lookup} by lookup" if policy.lookup else text
