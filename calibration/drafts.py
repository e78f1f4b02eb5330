"""Speculative rounds replayed on recorded continuations: what is drafted, what is accepted, what it costs.

A token of a recorded greedy continuation is drafted right by an exit exactly if the exit's likeliest token, with the
true tokens before it, is the full model's: a draft goes on only from right tokens. So a replay counts acceptance and
does not estimate it. How far an exit drafts beyond a wrong token is taken from the true text as well, which is an
approximation. Costs come from a device's ``CostTable``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from eexport.runtime.costs import CostTable
from eexport.runtime.engine import common_prefix
from eexport.runtime.ngram import NgramIndex

LONGEST = 7
"""Tokens of a draft at most: with the token before them, they are verified as 8 rows."""
BUFFER = 3
"""Tokens that may wait for the keys and values of the layers they left out, unless they are verified."""


@dataclass(frozen=True)
class Policy:
    """How tokens are made.

    Attributes:
        mode: "full"; "exact" (drafts are verified); "budget" (an exit's token is kept when its entropy allows).
        lookup: Tokens proposed by n-gram lookup at most; 0 is none.
        place: The exit's place among the depths, if there is one.
        depth: Its depth.
        length: Tokens that the exit drafts at most.
        tau: Entropy in nats over which the exit does not draft on, or does not let a token leave.
    """

    mode: str
    lookup: int = 0
    place: int | None = None
    depth: int | None = None
    length: int = 0
    tau: float = float("inf")


@dataclass(frozen=True)
class Recorded:
    """A prompt's continuation: prompt ids, its N tokens, per depth agreement and entropy [N, P]."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    agrees: NDArray[np.bool_]
    entropy: NDArray[np.float32]
    _runs: dict[tuple[int, float | None], list[int]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def lookup_runs(self) -> list[tuple[int, int]]:
        """For each token: how many tokens n-gram lookup proposes from there on, and how many of them are right."""
        index, runs = NgramIndex(), []
        index.extend(self.prompt)
        for place, token in enumerate(self.tokens):
            proposal = index.propose(LONGEST)
            runs.append((len(proposal), common_prefix(proposal, self.tokens[place : place + LONGEST])))
            index.extend([token])
        return runs

    def right_runs(self, place: int) -> list[int]:
        """For each token how many from there on the exit at ``place`` gets right, at most LONGEST."""
        if (place, None) not in self._runs:
            self._runs[place, None] = _run_lengths(self.agrees[:, place], after=False)
        return self._runs[place, None]

    def sure_runs(self, place: int, tau: float) -> list[int]:
        """For each token for how many from there on the exit's entropy is at most ``tau``, at most LONGEST.

        Beyond the end of the text it counts as sure.
        """
        if (place, tau) not in self._runs:
            self._runs[place, tau] = _run_lengths(self.entropy[:, place] <= tau, after=True)
        return self._runs[place, tau]


def _run_lengths(holds: NDArray[np.bool_], *, after: bool) -> list[int]:
    """For each place how many in a row are true from there on; ``after`` is what follows the last."""
    padded = np.concatenate((holds, np.full(LONGEST, after)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, LONGEST)[: len(holds)]
    lengths: list[int] = np.cumprod(windows, axis=1).sum(axis=1).tolist()
    return lengths


@dataclass
class Tally:
    """What rounds came to; ``ms`` is their time by the cost table.

    ``exited`` tokens were not verified, and ``wrong`` of them are not the full model's at that place.
    """

    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    exited: int = 0
    wrong: int = 0
    ms: float = 0.0


class Replay:
    """Rounds at one device's prices."""

    def __init__(self, costs: CostTable) -> None:
        self._costs = costs
        self._prices: dict[int, _Prices] = {}

    def __call__(self, policy: Policy, text: Recorded) -> Tally:
        """Run a policy over one continuation; the first token is the prefill's and not counted."""
        prices = self._at(policy.depth or 0)
        if policy.place is None:
            return _verified(policy, text, prices, [0] * len(text.tokens), [0] * len(text.tokens))
        if policy.mode == "budget":
            return _unverified(text.entropy[1:, policy.place] <= policy.tau, text.agrees[1:, policy.place], prices)
        right, sure = text.right_runs(policy.place), text.sure_runs(policy.place, policy.tau)
        return _verified(policy, text, prices, right, sure)

    def rounds(self, depth: int) -> list[float]:
        """Milliseconds of a round with an exit at ``depth``, by the number of drafted tokens, 0 to LONGEST."""
        return self._at(depth).drafting

    def _at(self, depth: int) -> "_Prices":
        if (prices := self._prices.get(depth)) is None:
            prices = self._prices[depth] = _Prices(self._costs, depth)
        return prices


class _Prices:
    """Milliseconds of the parts of a round with an exit at ``depth``, by drafted or waiting tokens."""

    def __init__(self, costs: CostTable, depth: int) -> None:
        layers, shallow = costs.num_layers, costs.embed_ms(1) + costs.layers_ms(0, depth, 1)
        self.look = costs.head_ms(1) + costs.host_ms
        self.step = [costs.step_ms(1 + drafted) for drafted in range(LONGEST + 1)]
        # The last drafted token runs through the shallow layers too, to be verified; that pass needs no exit head.
        self.drafting = [
            (drafted + 1) * shallow
            + drafted * self.look
            + costs.layers_ms(depth, layers, drafted + 1)
            + costs.head_ms(drafted + 1)
            + costs.host_ms
            for drafted in range(LONGEST + 1)
        ]
        self.leaving = shallow + self.look
        self.staying = [costs.layers_ms(depth, layers, 1 + waiting) + costs.head_ms(1) for waiting in range(BUFFER + 1)]


def _verified(policy: Policy, text: Recorded, prices: _Prices, right: list[int], sure: list[int]) -> Tally:
    total, tally, place = len(text.tokens), Tally(), 1
    while place < total:
        drafted = accepted = 0
        if policy.lookup:
            drafted, accepted = (min(count, policy.lookup) for count in text.lookup_runs[place])
        if drafted or policy.place is None:
            tally.ms += prices.step[drafted]
        else:
            drafted = min(policy.length, sure[place])
            accepted = min(drafted, right[place])
            # A draft that ends because the exit is unsure has paid for that look as well.
            tally.ms += prices.drafting[drafted] + (prices.look if drafted < policy.length else 0.0)
        made = min(accepted + 1, total - place)
        tally.rounds += 1
        tally.tokens += made
        tally.drafted += drafted
        tally.accepted += min(accepted, made)
        place += made
    return tally


def _unverified(leaves: NDArray[np.bool_], agrees: NDArray[np.bool_], prices: _Prices) -> Tally:
    tally, waiting = Tally(), 0
    for leaving, right in zip(leaves.tolist(), agrees.tolist(), strict=True):
        tally.rounds += 1
        tally.tokens += 1
        tally.ms += prices.leaving
        if leaving and waiting < BUFFER:
            waiting += 1
            tally.exited += 1
            tally.wrong += not right
        else:
            tally.ms += prices.staying[waiting]
            waiting = 0
    return tally


def expected_accepted(texts: Sequence[Recorded], place: int | None, length: int) -> float | None:
    """Mean tokens accepted a round with drafts of ``length``, by the exit at ``place`` or, if None, by n-gram lookup.

    A round without a proposal counts as one with none accepted. None where there was no round at all.
    """
    accepted = rounds = 0
    for text in texts:
        right = [run for _, run in text.lookup_runs] if place is None else text.right_runs(place)
        here = 1
        while here < len(text.tokens):
            run = min(length, right[here])
            accepted, rounds, here = accepted + run, rounds + 1, here + run + 1
    return accepted / rounds if rounds else None


def looping_share(texts: Sequence[Recorded], longest: int = 32, times: int = 3) -> float:
    """Share of tokens that repeat the text ``times`` times over with a period of up to ``longest``: endless loops."""
    looping = total = 0
    for text in texts:
        tokens = np.asarray(text.tokens)
        flags = np.zeros(len(tokens), bool)
        for period in range(1, longest + 1):
            same = np.zeros(len(tokens), bool)
            same[period:] = tokens[period:] == tokens[:-period]
            # Over as many tokens as the repetitions take, each equals the one a period before.
            needed = period * (times - 1)
            windows = np.lib.stride_tricks.sliding_window_view(np.pad(same, (needed - 1, 0)), needed)
            flags |= windows.all(axis=1)
        looping, total = looping + int(flags.sum()), total + len(tokens)
    return looping / total if total else 0.0
