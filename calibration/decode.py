"""The model's own greedy continuations, measured at every depth, and those of oracles beside them.

An oracle with threshold δ emits, for each token, the answer of the earliest depth whose logits have a cosine over δ
with the last depth's, and goes on from the tokens it chose (arXiv 2603.23701, appendix C). It runs every layer: it
says what an exit could have skipped if it knew the answer. While oracles choose the same tokens they share one
sequence; where they part, a new sequence branches off.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from eexport.calibration.measures import Measures, log_softmax, measure
from eexport.calibration.traced import Floats, TracedModel

_MEASURED = 4  # sequences whose logits at every depth are in memory at once
FULL = -1
"""The policy that always takes the last depth; oracles are numbered by the place of their threshold."""


@dataclass
class Written:
    """What one policy wrote.

    Attributes:
        tokens: Its tokens, an end token included.
        exits: For each, the place in ``TracedModel.depths`` of the depth that chose it.
        divergence: For each, the KL divergence of that depth's distribution from the last depth's, in nats.
        surprise: For each, minus the log-probability that the last depth gave it, in nats.
    """

    tokens: list[int] = field(default_factory=list)
    exits: list[int] = field(default_factory=list)
    divergence: list[float] = field(default_factory=list)
    surprise: list[float] = field(default_factory=list)


@dataclass
class Continuation:
    """All that came after one prompt: the full model's path with its measures [N, P], and the oracles' paths."""

    measures: Measures
    paths: dict[int, Written]


@dataclass
class _Branch:
    """A sequence being decoded for the policies that have chosen the same tokens so far."""

    prompt: int
    tokens: list[int]
    policies: list[int]


def first_over(cosines: Floats, threshold: float) -> int:
    """The place of the earliest depth whose cosine [P] exceeds ``threshold``; the last depth's always counts."""
    over = cosines > threshold
    return int(np.argmax(over)) if over[:-1].any() else len(cosines) - 1


def continue_prompts(
    model: TracedModel,
    prompts: Sequence[Sequence[int]],
    thresholds: Sequence[float],
    limit: int,
    on_token: Callable[[], None] = lambda: None,
) -> list[Continuation]:
    """Continue each prompt greedily under the full model and under an oracle for every threshold.

    Args:
        model: What decodes.
        prompts: Token ids, one or more each.
        thresholds: The oracles' δ.
        limit: Most tokens of a continuation; the context and end tokens may stop it before.
        on_token: Called for each token of the full model.
    """
    policies = [FULL, *range(len(thresholds))]
    paths = [{policy: Written() for policy in policies} for _ in prompts]
    traces: list[list[Measures]] = [[] for _ in prompts]
    rooms = [min(limit, model.context_length - len(ids)) for ids in prompts]
    waiting = [_Branch(index, [], policies) for index in range(len(prompts))]
    while waiting:
        running = _take(model, waiting, [len(ids) + limit for ids in prompts])
        hidden = model.start([[*prompts[b.prompt], *b.tokens] for b in running], limit)
        while True:
            chosen = _choose(model, running, hidden, thresholds, traces, paths)
            kept = []
            for row, (branch, groups) in enumerate(zip(running, chosen, strict=True)):
                if FULL in branch.policies:
                    on_token()
                ended = len(branch.tokens) + 1 >= rooms[branch.prompt]
                going = {} if ended else {t: group for t, group in groups.items() if t not in model.eos_token_ids}
                # The full model's choice, or else the most frequent one, goes on in place.
                ordered = sorted(going.items(), key=lambda item: (FULL not in item[1], -len(item[1])))
                for token, group in ordered[1:]:
                    waiting.append(_Branch(branch.prompt, [*branch.tokens, token], group))
                if ordered:
                    token, branch.policies = ordered[0]
                    branch.tokens.append(token)
                    kept.append(row)
            if not kept:
                break
            if len(kept) < len(running):
                model.keep(kept)
                running = [running[row] for row in kept]
            hidden = model.step([branch.tokens[-1] for branch in running])
    return [Continuation(Measures.stack(trace), found) for trace, found in zip(traces, paths, strict=True)]


def _take(model: TracedModel, waiting: list[_Branch], lengths: Sequence[int]) -> list[_Branch]:
    """As many branches as the model holds; ``lengths`` are those that the prompts' sequences may reach.

    The last first: branches that parted from a sequence come before new sequences, so few of them wait.
    """
    taken: list[_Branch] = []
    longest = 0
    while waiting and len(taken) < model.width:
        longest = max(longest, lengths[waiting[-1].prompt])
        if taken and (len(taken) + 1) * longest > model.slots:
            break
        taken.append(waiting.pop())
    return taken


def _choose(
    model: TracedModel,
    running: Sequence[_Branch],
    hidden: Floats,
    thresholds: Sequence[float],
    traces: list[list[Measures]],
    paths: list[dict[int, Written]],
) -> list[dict[int, list[int]]]:
    """Let every policy of R branches choose its next token from hidden states [R, P, D].

    Returns:
        For each branch its policies by the token they chose.
    """
    cosines = model.logit_cosine(hidden)
    last = cosines.shape[1] - 1
    exits = [
        {policy: last if policy == FULL else first_over(row, thresholds[policy]) for policy in branch.policies}
        for branch, row in zip(running, cosines, strict=True)
    ]
    used = [sorted({*chosen.values(), last}) for chosen in exits]
    result: list[dict[int, list[int]]] = [{} for _ in running]
    # The head is large: it is read once for several branches. Those that need few depths are taken together.
    few = [row for row, chosen in enumerate(exits) if FULL not in chosen]
    measured = [row for row, chosen in enumerate(exits) if FULL in chosen]
    for rows in filter(None, (few, *(measured[i : i + _MEASURED] for i in range(0, len(measured), _MEASURED)))):
        wanted = [used[row] if FULL not in exits[row] else list(range(last + 1)) for row in rows]
        stacked = model.logits(np.concatenate([hidden[row, places] for row, places in zip(rows, wanted, strict=True)]))
        ends = np.cumsum([len(places) for places in wanted])[:-1]
        for row, places, logits in zip(rows, wanted, np.split(stacked, ends), strict=True):
            log_probs = log_softmax(logits[np.searchsorted(places, used[row])])
            result[row] = _write(exits[row], used[row], log_probs, paths[running[row].prompt])
            if FULL in exits[row]:
                traces[running[row].prompt].append(measure(hidden[row], logits, cosines[row]))
    return result


def _write(
    exits: dict[int, int], used: Sequence[int], log_probs: Floats, paths: dict[int, Written]
) -> dict[int, list[int]]:
    """Write each policy's token, chosen at its place in ``exits``; ``log_probs`` [U, V] are those of ``used``."""
    final = log_probs[-1]
    tokens = log_probs.argmax(-1)
    divergence = (np.exp(final) * (final - log_probs)).sum(-1, dtype=np.float64)
    groups: dict[int, list[int]] = {}
    for policy, place in exits.items():
        row = used.index(place)
        token, path = int(tokens[row]), paths[policy]
        path.tokens.append(token)
        path.exits.append(place)
        path.divergence.append(float(divergence[row]))
        path.surprise.append(-float(final[token]))
        groups.setdefault(token, []).append(policy)
    return groups
