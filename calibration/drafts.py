"""Speculative rounds replayed on recorded continuations: what is drafted, what is accepted, what it costs.

A token of a recorded greedy continuation is drafted right by an exit exactly if the exit's likeliest token, with the
true tokens before it, is the full model's: a draft goes on only from right tokens. So a replay is no estimate of
acceptance but the count itself. Costs come from a device's ``CostTable``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from eexport.runtime.costs import CostTable
from eexport.runtime.ngram import NgramIndex

LONGEST = 8
"""Tokens of a draft at most."""


@dataclass(frozen=True)
class Recorded:
    """A prompt's continuation: prompt ids, its N tokens, per depth agreement and entropy [N, P]."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    agrees: NDArray[np.bool_]
    entropy: NDArray[np.float32]

    @cached_property
    def lookup_runs(self) -> list[tuple[int, int]]:
        """For each token: how many tokens n-gram lookup proposes from there on, and how many of them are right."""
        index, runs = NgramIndex(), []
        index.extend(self.prompt)
        for place, token in enumerate(self.tokens):
            proposal = index.propose(LONGEST)
            right = 0
            for proposed, true in zip(proposal, self.tokens[place:], strict=False):
                if proposed != true:
                    break
                right += 1
            runs.append((len(proposal), right))
            index.extend([token])
        return runs

    def runs(self, holds: NDArray[np.bool_]) -> list[int]:
        """For each token how many from there on are true in ``holds`` [N], at most LONGEST."""
        padded = np.concatenate((holds, np.zeros(LONGEST, bool)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, LONGEST)[: len(holds)]
        runs: list[int] = np.cumprod(windows, axis=1).sum(axis=1).tolist()
        return runs


@dataclass
class Tally:
    """What rounds came to; ``ms`` is their time by the cost table, ``exited`` the tokens that were not verified."""

    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    exited: int = 0
    wrong: int = 0
    ms: float = 0.0

    def add(self, other: "Tally") -> None:
        """Sum two tallies."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


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


def replay(policy: Policy, recorded: Recorded, costs: CostTable, buffer: int = 3) -> Tally:
    """Run a policy over one continuation; the first token is the prefill's and not counted.

    In "budget" at most ``buffer`` tokens wait for the keys and values of the layers they left out.
    """
    if policy.mode == "budget":
        return _replay_budget(policy, recorded, costs, buffer)
    total, tally = len(recorded.tokens), Tally()
    cost = _RoundCosts(costs, policy.depth or 0)
    right, confident = [0] * total, [0] * total
    if policy.place is not None:
        right = recorded.runs(recorded.agrees[:, policy.place])
        confident = recorded.runs(recorded.entropy[:, policy.place] <= policy.tau)
    place = 1
    while place < total:
        drafted = accepted = 0
        if policy.lookup:
            drafted, accepted = (min(count, policy.lookup) for count in recorded.lookup_runs[place])
        if drafted or policy.place is None:
            ms = cost.step[drafted]
        else:
            drafted = min(policy.length, confident[place])
            accepted = min(drafted, right[place])
            # A draft that ends because the exit is unsure has paid for that look as well.
            ms = cost.drafting[drafted] + (cost.look if drafted < policy.length else 0.0)
        made = min(accepted + 1, total - place)
        tally.rounds += 1
        tally.tokens += made
        tally.drafted += drafted
        tally.accepted += min(accepted, made)
        tally.ms += ms
        place += made
    return tally


class _RoundCosts:
    """Milliseconds of a round by the number of drafted tokens."""

    def __init__(self, costs: CostTable, depth: int) -> None:
        layers = costs.num_layers
        self.shallow = costs.embed_ms(1) + costs.layers_ms(0, depth, 1)
        self.look = costs.head_ms(1) + costs.host_ms
        self.step = [costs.step_ms(1 + drafted) for drafted in range(LONGEST + 1)]
        # The last drafted token runs through the shallow layers too, to be verified; that pass needs no exit head.
        self.drafting = [
            (drafted + 1) * self.shallow
            + drafted * self.look
            + costs.layers_ms(depth, layers, drafted + 1)
            + costs.head_ms(drafted + 1)
            + costs.host_ms
            for drafted in range(LONGEST + 1)
        ]


def _replay_budget(policy: Policy, recorded: Recorded, costs: CostTable, buffer: int) -> Tally:
    assert policy.place is not None and policy.depth is not None
    tally, layers, pending = Tally(), costs.num_layers, 0
    shallow = costs.embed_ms(1) + costs.layers_ms(0, policy.depth, 1) + costs.head_ms(1) + costs.host_ms
    deep = [costs.layers_ms(policy.depth, layers, 1 + waiting) + costs.head_ms(1) for waiting in range(buffer + 1)]
    leaves = (recorded.entropy[1:, policy.place] <= policy.tau).tolist()
    for leaving, agrees in zip(leaves, recorded.agrees[1:, policy.place].tolist(), strict=True):
        tally.rounds += 1
        tally.tokens += 1
        tally.ms += shallow
        if leaving and pending < buffer:
            pending += 1
            tally.exited += 1
            tally.wrong += not agrees
        else:
            tally.ms += deep[pending]
            pending = 0
    return tally


def expected_accepted(recorded: Sequence[Recorded], place: int | None, length: int) -> float | None:
    """Mean tokens accepted of a draft of ``length``, by the exit at ``place`` or, if None, by n-gram lookup.

    None where there was no round at all.
    """
    accepted = rounds = 0
    for text in recorded:
        right = [run for _, run in text.lookup_runs] if place is None else text.runs(text.agrees[:, place])
        here = 1
        while here < len(text.tokens):
            run = min(length, right[here])
            accepted, rounds, here = accepted + run, rounds + 1, here + run + 1
    return accepted / rounds if rounds else None


def looping_share(recorded: Sequence[Recorded], longest: int = 32, times: int = 3) -> float:
    """Share of tokens that repeat the text ``times`` times over with a period of up to ``longest``: endless loops."""
    looping = total = 0
    for text in recorded:
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
