"""Whether early exit pays, in words that the figures bear out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eexport.calibration.drafts import LONGEST, Policy, Replay
from eexport.runtime.costs import CostTable

if TYPE_CHECKING:
    from eexport.calibration.predict import Forecast

PAYS, ADDS = 1.05, 1.02
"""Early exit pays if it is this much faster than all layers, and than the best policy without it."""


@dataclass(frozen=True)
class Breakeven:
    """What an exit must reach to pay by itself, drafting always and erring at random, beside what it reaches.

    ``needed`` and ``measured`` are shares of tokens on which it agrees with the last layer; None: no share is enough.
    """

    depth: int
    needed: float | None
    measured: float


@dataclass(frozen=True)
class Verdict:
    """Whether early exit pays here, and why.

    Attributes:
        pays: Whether it does.
        best: Name of the best policy.
        with_exit: Name of the best that has an exit and loses nothing.
        without: Name of the best that has none.
        headline: The verdict in a line.
        reasons: What it rests on.
        certain: Whether other prompts of the same kinds would very likely give the same verdict.
        few: A kind with too few prompts to say so.
    """

    pays: bool
    best: str
    with_exit: str
    without: str
    headline: str
    reasons: tuple[str, ...]
    certain: bool = False
    few: str | None = None


def judge(forecasts: "Sequence[Forecast]", breakeven: Sequence[Breakeven], num_layers: int) -> Verdict:
    """Say whether early exit pays, and why or why not, from the policies that lose nothing."""
    found = {forecast.name: forecast for forecast in forecasts}
    speed = {name: forecast.speedup["all"] for name, forecast in found.items()}
    with_exit = max(("exit", "hybrid"), key=lambda name: speed[name])
    without = max(("full", "lookup"), key=lambda name: speed[name])
    pays = speed[with_exit] >= max(PAYS, ADDS * speed[without])
    best = with_exit if pays else without if speed[without] >= PAYS else "full"
    if pays:
        how = _plain(found[best].policy)
        headline = f"Early exit pays: {speed[best]:.2f}x predicted with nothing lost, {how}"
    elif best == "lookup":
        headline = (
            f"Early exit does not pay here: use n-gram lookup, {speed['lookup']:.2f}x predicted with nothing lost"
        )
    else:
        headline = "Early exit does not pay here: run every layer for every token"
    reasons = [f"n-gram lookup alone, which needs no exit, predicts {speed['lookup']:.2f}x"]
    reasons += [
        *_exit_reasons(found, num_layers),
        *_breakeven_reasons(breakeven, num_layers),
        _unverified_reason(forecasts),
    ]
    return Verdict(pays, best, with_exit, without, headline, tuple(reasons))


def needed_agreement(costs: CostTable, depth: int) -> float | None:
    """The least share of right tokens with which drafting at ``depth`` is no slower than all layers.

    Each drafted token is taken to be right independently with this probability, and none is held back; the draft
    length is the best one. None where even a perfect exit is slower.
    """
    rounds = Replay(costs).rounds(depth)

    def speedup(p: float) -> float:
        made = [sum(p**token for token in range(length + 1)) for length in range(1, LONGEST + 1)]
        return max(tokens * costs.step_ms(1) / ms for tokens, ms in zip(made, rounds[1:], strict=True))

    if speedup(1.0) < 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if speedup(middle) >= 1 else (middle, high)
    return high


def _exit_reasons(found: "dict[str, Forecast]", num_layers: int) -> list[str]:
    alone, both = found["exit"], found["hybrid"]
    if alone.policy.depth is None or both.policy.depth is None:
        return ["no layer before the last agrees with it on enough tokens to draft from"]
    return [
        f"the best exit, after layer {alone.policy.depth} of {num_layers}, predicts {alone.speedup['all']:.2f}x; the "
        f"best one beside lookup, after layer {both.policy.depth}, {both.speedup['all']:.2f}x for both together"
    ]


def _breakeven_reasons(breakeven: Sequence[Breakeven], num_layers: int) -> list[str]:
    if not breakeven:
        return ["the model shows no layer before its last"]
    if all(row.needed is None for row in breakeven):
        return ["on this device no exit can break even, however good: a draft costs too much there"]
    shown = [min(breakeven, key=lambda row: abs(row.depth - part * num_layers)) for part in (0.25, 0.75)]
    parts = [
        f"after layer {row.depth} "
        + ("with none" if row.needed is None else f"with {row.needed:.0%} (it gets {row.measured:.0%} right)")
        for row in dict.fromkeys(shown)
    ]
    return [
        "drafting for every token and erring at random, an exit breaks even at this share of right tokens: "
        + ", ".join(parts)
    ]


def _unverified_reason(forecasts: "Sequence[Forecast]") -> str:
    budgets = [forecast for forecast in forecasts if forecast.name.startswith("budget")]
    top = max(budgets, key=lambda forecast: forecast.speedup["all"])
    if top.speedup["all"] <= 1:
        return "exits that nobody verifies are no faster, even with 5% of the tokens wrong"
    return (
        f"exits that nobody verifies predict {top.speedup['all']:.2f}x, with {top.wrong:.1%} of the tokens wrong where "
        "they leave"
    )


def _plain(policy: Policy) -> str:
    text = f"drafting up to {policy.length} tokens after layer {policy.depth}"
    return f"{text}, and up to {policy.lookup} by lookup" if policy.lookup else text
