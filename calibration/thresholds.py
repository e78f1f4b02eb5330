"""The exit rule for a budget, chosen on recorded texts so that the budget holds with a stated confidence.

The texts are parted. Some fix a path of candidate rules, from one that hardly ever exits to one that always does; the
others, which had no part in that, test the candidates along it (``risk``). The chance that an exit's token is wrong is
taken as a logistic curve in the logarithm of its entropy, with one slope for all exits and a height for each. Spending
risk where it leaves out most layers then means thresholds in a fixed proportion: a candidate is one number times that
proportion. A few texts are enough for so few parameters, and a poor path costs layers, not the guarantee.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from eexport.calibration.exit_traces import ExitTraces, Replayed, replay
from eexport.calibration.risk import betting_p, binomial_p, fixed_sequence, least_prompts
from eexport.runtime.errors import EexportError
from eexport.runtime.exits import ExitRule

ASSUMED = (
    "prompts are independent draws from the source that is met later, and answers no longer than the recorded ones; "
    "keys and values of the layers left out are recomputed exactly; tokens are compared at places of the full model's "
    "own text; an answer counts as lost if it was right and any of its tokens may have changed"
)
"""What the stated confidence rests on."""
CANDIDATES = 60
PATH_SHARE = 0.2
"""Of the texts, those that fix the path: first such as a budget cannot be tested on, then others."""
PREVIOUS = (math.inf, 4.0, 3.0, 2.0, 1.0, 0.5)
"""Thresholds tried for the previous token's entropy, in nats."""
COMPARED_AT = 0.01
"""Share of wrong tokens at which these are compared by the layers they leave out."""

Floats = NDArray[np.float64]
Kind = Literal["pp", "%rel", "%tokens"]


@dataclass(frozen=True)
class Budget:
    """What may be lost, on average over prompts like the recorded ones.

    Attributes:
        kind: "pp", the share of prompts with a score whose right answer is lost; "%rel", the same of the prompts that
            the full model solves; "%tokens", the share of a text's tokens, averaged over texts, that leave with
            another token than the full model's, at places of the full model's own text.
        share: 0.01 is a percentage point, or one per cent.
    """

    kind: Kind
    share: float

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """Read "0.5pp", "0.5%rel" or "1%tokens". Raises EexportError."""
        match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)(pp|%rel|%tokens)", text)
        if match is None:
            raise EexportError(
                f"budget {text!r}: give 0.5pp (points of accuracy), 0.5%rel (per cent of the model's accuracy) "
                "or 1%tokens (per cent of tokens that differ)"
            )
        share = float(match[1]) / 100
        if not 0 < share < 1:
            raise EexportError(f"budget {text!r}: give more than 0 and less than 100")
        return cls(cast(Kind, match[2]), share)

    def __str__(self) -> str:
        """As ``parse`` reads it."""
        return f"{100 * self.share:.12f}".rstrip("0").rstrip(".") + self.kind

    def counted(self, correct: NDArray[np.floating]) -> NDArray[np.bool_]:
        """[P] the texts that it is about, by their scores [P]."""
        if self.kind == "%tokens":
            return np.ones(len(correct), bool)
        return np.asarray(correct == 1 if self.kind == "%rel" else ~np.isnan(correct))

    def losses(self, found: Replayed) -> Floats:
        """Loss of each text that it is about.

        An answer counts as lost if it was right and the text may become another, which bounds the loss from above.
        """
        losses = found.wrong_share if self.kind == "%tokens" else (found.changed & (found.correct == 1)).astype(float)
        return np.asarray(losses[self.counted(found.correct)], np.float64)

    def p_value(self, losses: Floats, delta: float) -> float:
        """P-value of "the mean loss is over the budget" for independent losses in random order."""
        if self.kind == "%tokens":
            return betting_p(losses, self.share, delta)
        return binomial_p(int(losses.sum()), len(losses), self.share)


@dataclass(frozen=True)
class Chosen:
    """A rule and what it rests on.

    Attributes:
        rule: The rule; one that never exits where the budget cannot be met.
        budget: As it is written.
        confidence: That the budget holds.
        prompts: Texts that it was tested on.
        p_value: Of the rule; where it never exits, of the safest candidate (1 if there was none to test).
        loss: Mean loss on those texts.
        saved: Share of layers left out on them.
        reason: Why this rule and none that exits more, in a line.
    """

    rule: ExitRule
    budget: str
    confidence: float
    prompts: int
    p_value: float
    loss: float
    saved: float
    reason: str


def never(exits: int) -> ExitRule:
    """The rule under which no token leaves."""
    return ExitRule((0.0,) * exits, math.inf)


def choose(
    traces: ExitTraces,
    budget: Budget,
    confidence: float = 0.95,
    seed: int = 0,
    own: NDArray[np.bool_] | None = None,
) -> Chosen:
    """The rule that exits most of those shown to stay within ``budget``.

    The chance over the draw of the texts that the rule breaks the budget on further texts of the same source is at most
    1 - ``confidence``.

    Args:
        traces: Recorded texts that had no part in training the exits or their predictor.
        budget: What may be lost.
        confidence: Over 0 and under 1.
        seed: Of the parting into texts that fix the path and texts that test it.
        own: [P] texts of the source that the budget is about; the others only fix the path. None for all.

    Raises:
        EexportError: ``confidence`` is no such share.
    """
    if not 0 < confidence < 1:
        raise EexportError(f"confidence {confidence}: give a share between 0 and 1, such as 0.95")
    order = np.random.default_rng(seed).permutation(len(traces.lengths))
    about = budget.counted(traces.correct) if own is None else budget.counted(traces.correct) & own
    counted = about[order]
    others, useful = order[~counted], order[counted]
    spared = max(0, math.ceil(PATH_SHARE * len(order)) - len(others))
    path = exit_path(traces.pick(np.concatenate((others, useful[:spared]))))
    return walk(path, traces.pick(useful[spared:]), budget, confidence)


def walk(path: Sequence[ExitRule], tested: ExitTraces, budget: Budget, confidence: float) -> Chosen:
    """The last rule of ``path`` up to which all are shown to stay within ``budget``.

    Args:
        path: Candidates from the safest on, made without ``tested``.
        tested: Texts in random order.
        budget: What may be lost.
        confidence: That the result stays within it.
    """
    delta, seen = 1 - confidence, list[Chosen]()
    prompts, least = int(budget.counted(tested.correct).sum()), least_prompts(budget.share, delta)
    nothing = Chosen(never(len(tested.depths)), str(budget), confidence, prompts, 1.0, 0.0, 0.0, "")
    if prompts < least:
        what = {"pp": "prompts with a score", "%rel": "prompts that the full model solves", "%tokens": "prompts"}
        return dataclasses.replace(
            nothing,
            reason=f"{budget} at {100 * confidence:g}% needs at least {least} {what[budget.kind]} to test on, "
            f"even without a single loss; there are {prompts}",
        )

    def p_value(rule: ExitRule) -> float:
        found = replay(tested, rule)
        losses, saved = budget.losses(found), found.saved(tested.num_layers)
        p = budget.p_value(losses, delta)
        seen.append(dataclasses.replace(nothing, rule=rule, p_value=p, loss=float(losses.mean()), saved=saved))
        return p

    held = fixed_sequence(map(p_value, path), delta)
    failed = seen[held] if held < len(path) else None
    if held:
        beyond = f"the next has p = {failed.p_value:.2g}" if failed else "there is none that exits more"
        return dataclasses.replace(seen[held - 1], reason=f"{held} of {len(path)} candidates hold; {beyond}")
    if failed is None:
        return dataclasses.replace(nothing, reason="the predictor names no exit in the texts that fix the candidates")
    return dataclasses.replace(
        nothing,
        p_value=failed.p_value,
        reason=f"not even the safest of {len(path)} candidates is shown to stay within {budget} at "
        f"{100 * confidence:g}%: it loses {failed.loss:.2%} on {prompts} prompts (p = {failed.p_value:.2g})",
    )


def exit_path(traces: ExitTraces) -> tuple[ExitRule, ...]:
    """Candidates from one that hardly ever exits to one that always does; none if the predictor names no exit.

    The threshold of the previous token's entropy is the same in all: that which leaves out most layers where the share
    of wrong tokens is ``COMPARED_AT`` by the fitted curve.
    """
    if not traces.named.any():
        return ()
    fits = {previous: _Fit.of(traces, previous) for previous in PREVIOUS}
    previous = max(PREVIOUS, key=lambda value: fits[value].saved_at(COMPARED_AT))
    fit = fits[previous]
    levels = np.quantile(fit.levels, np.linspace(0, 1, CANDIDATES + 1)[1:] ** 3)  # finest where it is safest
    levels[-1] *= 1.001  # a token leaves below a threshold, not at it
    return tuple(ExitRule(tuple((level * fit.proportion).tolist()), previous) for level in levels)


@dataclass(frozen=True)
class _Fit:
    """The curve of risk over entropy, for the M tokens that may leave.

    Attributes:
        proportion: [E] of the exits' thresholds, at equal risk for a layer left out.
        levels: [M] the number times ``proportion`` above which a token leaves, ascending.
        risk: [M] chance that it is wrong.
        gain: [M] layers that it leaves out. Both as a share of all tokens.
    """

    proportion: Floats
    levels: Floats
    risk: Floats
    gain: Floats

    @classmethod
    def of(cls, traces: ExitTraces, previous: float) -> "_Fit":
        """Fit the tokens after one of an entropy up to ``previous``."""
        free = traces.named & (traces.before(traces.final_entropy) <= previous)
        place, x = traces.place[free], np.log(np.maximum(traces.own_entropy[free], _TINY))
        centre = float(x.mean()) if len(x) else 0.0
        slope, heights = _logistic(x - centre, place, traces.own_wrong[free], len(traces.depths))
        proportion = np.exp((np.log(traces.gain) - heights) / slope)
        levels = np.exp(x) / proportion[place]
        order = np.argsort(levels)
        risk = _sigmoid(heights[place] + slope * (x - centre))
        tokens = len(traces.named)
        return cls(proportion, levels[order], risk[order] / tokens, traces.gain[place][order] / tokens)

    def saved_at(self, wrong: float) -> float:
        """Share of layers left out where the share of wrong tokens is ``wrong``."""
        return float(self.gain[: int(np.searchsorted(np.cumsum(self.risk), wrong))].sum())


_TINY = 1e-9  # nats, for a logarithm
_LEAST_SLOPE = 0.25  # under it entropy says next to nothing about an exit, and proportions would run away


def _logistic(x: Floats, place: NDArray[np.int64], wrong: NDArray[np.bool_], exits: int) -> tuple[float, Floats]:
    """Slope and heights [E] of the log odds of ``wrong`` over ``x``, by Newton steps on the posterior.

    The priors, a slope of 1 and exits of one height, matter where there are few tokens or none is wrong.
    """
    design = np.column_stack((x, np.ones(len(x)), np.eye(exits)[place]))
    prior, precision = np.array([1.0, -2.0] + [0.0] * exits), np.array([1.0, 0.01] + [1.0] * exits)
    weights = prior
    for _ in range(50):
        chance = _sigmoid(design @ weights)
        gradient = design.T @ (wrong - chance) - precision * (weights - prior)
        curvature = (design * (chance * (1 - chance))[:, None]).T @ design + np.diag(precision)
        step = np.linalg.solve(curvature, gradient)
        weights = weights + step / max(1.0, float(np.abs(step).max()))
        if np.abs(step).max() < 1e-6:
            break
    return max(_LEAST_SLOPE, float(weights[0])), weights[1] + weights[2:]


def _sigmoid(values: Floats) -> Floats:
    return np.asarray(0.5 * (1 + np.tanh(values / 2)), np.float64)


@dataclass(frozen=True)
class Resampled:
    """What ``choose`` comes to over and over. The first two are shares of the runs, the others means over them.

    Attributes:
        runs: How often it chose.
        broken: The rule loses more than the budget.
        exiting: The rule exits at all.
        loss: What it loses.
        left: Share of tokens that leave early.
        saved: Share of layers left out.
    """

    runs: int
    broken: float
    exiting: float
    loss: float
    left: float
    saved: float


def resample(
    traces: ExitTraces,
    budget: Budget,
    *,
    runs: int = 200,
    prompts: int | None = None,
    confidence: float = 0.95,
    seed: int = 0,
) -> Resampled:
    """Does the budget hold as often as is said? With ``traces`` as the population, so that true losses are known.

    Each run draws ``prompts`` texts (by default as many as there are) with replacement, chooses a rule on them, and
    takes its loss over all texts. A part set aside would be too small to tell a broken budget from chance.
    """
    generator = np.random.default_rng(seed)
    size = len(traces.lengths) if prompts is None else prompts
    rows = []
    for run in range(runs):
        drawn = generator.integers(0, len(traces.lengths), size)
        chosen = choose(traces.pick(drawn), budget, confidence, seed=run)
        found = replay(traces, chosen.rule)
        loss, left = float(budget.losses(found).mean()), found.exits.sum() / found.tokens.sum()
        rows.append((loss > budget.share, chosen.rule.exits, loss, left, found.saved(traces.num_layers)))
    broken, exiting, mean_loss, mean_left, saved = np.mean(rows, axis=0).tolist()
    return Resampled(runs, broken, exiting, mean_loss, mean_left, saved)
