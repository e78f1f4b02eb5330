"""What an exit rule does to recorded texts. Legend: P texts, N tokens of all of them, E exits, L layers.

A text is the full model's own. A token that leaves with another token than the full model's is wrong. If the keys and
values of the layers left out are recomputed exactly, a text made under the rule is the recorded one up to the first
wrong token. So an answer is lost only if it was right and one of its tokens is wrong: an upper bound, as many wrong
tokens do no harm.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from eexport.calibration.intervals import Interval, mean, share
from eexport.runtime.exits import ExitRule, exits_taken

Counts = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ExitTraces:
    """Recorded texts of the full model, as the exits and their predictor see them.

    Attributes:
        depths: E layers run before each exit, shallowest first.
        num_layers: L.
        lengths: [P] tokens of each text, at least one, an end-of-text token among them.
        predicted: [N] exit that the predictor names, E for full depth.
        entropy: [N, E] of each exit head, in nats.
        agrees: [N, E] whether an exit head's token is the full model's.
        final_entropy: [N] of the full model, in nats.
        correct: [P] 1 where the text solves its task, 0 where not, NaN where that is not known.
        kinds: P kinds of text.
    """

    depths: tuple[int, ...]
    num_layers: int
    lengths: Counts
    predicted: NDArray[np.integer]
    entropy: NDArray[np.floating]
    agrees: NDArray[np.bool_]
    final_entropy: NDArray[np.floating]
    correct: NDArray[np.floating]
    kinds: tuple[str, ...]

    def __post_init__(self) -> None:
        """Check the shapes. Raises ValueError."""
        texts, tokens, exits = len(self.lengths), int(self.lengths.sum()), len(self.depths)
        found = [array.shape for array in (self.predicted, self.final_entropy, self.entropy, self.agrees, self.correct)]
        if found != [(tokens,), (tokens,), (tokens, exits), (tokens, exits), (texts,)] or len(self.kinds) != texts:
            raise ValueError(f"{texts} texts of {tokens} tokens with {exits} exits do not fit shapes {found}")
        if not exits or (texts and self.lengths.min() < 1):
            raise ValueError("a text needs a token, and there must be an exit")

    @cached_property
    def starts(self) -> Counts:
        """[P] where each text starts."""
        return np.asarray(np.cumsum(self.lengths) - self.lengths, np.int64)

    @cached_property
    def text(self) -> Counts:
        """[N] the text that a token belongs to."""
        return np.asarray(np.repeat(np.arange(len(self.lengths)), self.lengths), np.int64)

    @cached_property
    def named(self) -> NDArray[np.bool_]:
        """[N] whether the predictor names an exit."""
        return np.asarray(self.predicted < len(self.depths))

    @cached_property
    def place(self) -> Counts:
        """[N] the exit that it names; where it names none, the last, which means nothing."""
        return np.asarray(np.minimum(self.predicted, len(self.depths) - 1), np.int64)

    @cached_property
    def own_entropy(self) -> NDArray[np.float64]:
        """[N] entropy of that exit's head."""
        return np.take_along_axis(self.entropy, self.place[:, None], axis=1)[:, 0].astype(np.float64)

    @cached_property
    def own_wrong(self) -> NDArray[np.bool_]:
        """[N] whether that exit's token is not the full model's."""
        return ~np.take_along_axis(self.agrees, self.place[:, None], axis=1)[:, 0]

    @cached_property
    def gain(self) -> NDArray[np.float64]:
        """[E] share of layers that an exit leaves out."""
        return 1 - np.asarray(self.depths) / self.num_layers

    def before(self, values: NDArray[np.floating]) -> NDArray[np.float64]:
        """[N] of ``values`` [N] that of the token before; 0 for the first of a text."""
        shifted = np.concatenate(([0.0], values[:-1])) if len(values) else np.zeros(0)
        shifted[self.starts] = 0.0
        return shifted

    def pick(self, texts: Sequence[int] | Counts) -> "ExitTraces":
        """These texts in this order; one may come more than once."""
        chosen = np.asarray(texts, np.int64)
        lengths = self.lengths[chosen]
        shift = self.starts[chosen] - (np.cumsum(lengths) - lengths)
        tokens = np.arange(lengths.sum()) + np.repeat(shift, lengths)
        return ExitTraces(
            self.depths,
            self.num_layers,
            lengths,
            self.predicted[tokens],
            self.entropy[tokens],
            self.agrees[tokens],
            self.final_entropy[tokens],
            self.correct[chosen],
            tuple(self.kinds[text] for text in chosen),
        )


@dataclass(frozen=True, eq=False)
class Replayed:
    """Counts [P] of what a rule does to P texts.

    Attributes:
        tokens: All.
        tried: An exit's head is run: one is named that can be believed, and the previous token allows it.
        exits: [P, E] tokens that leave at each exit.
        wrong: Those that leave with another token than the full model's.
        layers: Layers run before the tokens are out. Those left out are made up for later, several tokens at once,
            where keys and values are recomputed.
        correct: As in ``ExitTraces``.
    """

    tokens: Counts
    tried: Counts
    exits: Counts
    wrong: Counts
    layers: Counts
    correct: NDArray[np.floating]

    @property
    def wrong_share(self) -> NDArray[np.float64]:
        """[P] share of a text's tokens that are wrong."""
        return self.wrong / self.tokens

    @property
    def changed(self) -> NDArray[np.bool_]:
        """[P] whether the text may become another."""
        return self.wrong > 0

    def saved(self, num_layers: int) -> float:
        """Share of layers left out over all tokens; 0 without a text."""
        return 1 - float(self.layers.sum()) / max(1.0, float(num_layers * self.tokens.sum()))


def replay(traces: ExitTraces, rule: ExitRule) -> Replayed:
    """Let ``rule`` decide every token of the recorded texts, in the order in which a device would."""
    texts, exits = len(traces.lengths), len(traces.depths)
    taken = exits_taken(rule, traces.predicted, traces.entropy, traces.final_entropy, traces.lengths.tolist())
    previous = traces.before(np.where(taken, traces.own_entropy, traces.final_entropy))
    believable = (np.asarray(rule.entropy) > 0)[traces.place]

    def count(tokens: NDArray[np.bool_]) -> Counts:
        return np.bincount(traces.text[tokens], minlength=texts)

    leaving = np.bincount((traces.text * exits + traces.place)[taken], minlength=texts * exits).reshape(texts, exits)
    return Replayed(
        tokens=traces.lengths,
        tried=count(traces.named & believable & (previous <= rule.previous)),
        exits=leaving,
        wrong=count(taken & traces.own_wrong),
        layers=leaving @ np.asarray(traces.depths) + traces.num_layers * (traces.lengths - leaving.sum(axis=1)),
        correct=traces.correct,
    )


@dataclass(frozen=True)
class Use:
    """What a rule does to texts of one kind. Shares of tokens, unless said otherwise.

    Attributes:
        prompts: Texts.
        tokens: Their tokens.
        tried: An exit's head is run.
        left: Leaving early.
        by_exit: [E] leaving at each exit.
        layers: Layers run for a token before it is out, on average.
        disagreement: Wrong tokens: mean over texts of a text's share.
        scored: Texts of which it is known whether they solve their task.
        solved: Those that do.
        lost: Share of the scored texts whose right answer may be lost; None without any.
        lost_of_solved: The same as a share of the solved texts.
    """

    prompts: int
    tokens: int
    tried: float
    left: float
    by_exit: tuple[float, ...]
    layers: float
    disagreement: Interval
    scored: int
    solved: int
    lost: Interval | None
    lost_of_solved: Interval | None


def report(traces: ExitTraces, rule: ExitRule) -> dict[str, Use]:
    """What ``rule`` does to held-out texts, one or more: "all" of them, and each kind where there are several."""
    kinds = sorted(set(traces.kinds))
    groups = {kind: traces.pick([i for i, other in enumerate(traces.kinds) if other == kind]) for kind in kinds}
    return {name: _use(part, rule) for name, part in {"all": traces, **(groups if len(kinds) > 1 else {})}.items()}


def _use(traces: ExitTraces, rule: ExitRule) -> Use:
    found = replay(traces, rule)
    tokens = int(found.tokens.sum())
    scored, solved = ~np.isnan(found.correct), found.correct == 1
    lost = int((found.changed & solved).sum())
    return Use(
        prompts=len(found.tokens),
        tokens=tokens,
        tried=float(found.tried.sum() / tokens),
        left=float(found.exits.sum() / tokens),
        by_exit=tuple((found.exits.sum(axis=0) / tokens).tolist()),
        layers=float(found.layers.sum() / tokens),
        disagreement=_mean_share(found.wrong_share),
        scored=int(scored.sum()),
        solved=int(solved.sum()),
        lost=share(lost, int(scored.sum())) if scored.any() else None,
        lost_of_solved=share(lost, int(solved.sum())) if solved.any() else None,
    )


def _mean_share(shares: NDArray[np.float64]) -> Interval:
    """A mean of shares; where none was over 0, a share of prompts bounds it, as Student's t would not."""
    found = mean(shares.tolist())
    high = found.high if shares.any() else share(0, len(shares)).high
    return Interval(found.value, max(0.0, found.low), min(1.0, high))
