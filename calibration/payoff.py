"""What a drafting head is worth on a device: expected speed-up of exact decoding, from acceptance and stage times.

A round drafts K tokens, one after the other, and verifies them in one pass of K + 1 rows: at a head of depth d the
layers below d have run for every drafted token, and what is left is the last one's, then the deeper layers and the LM
head for all rows. It yields the accepted tokens and one more. The formula is that of speculative decoding (Leviathan et
al. 2023, arXiv 2211.17192) with measured acceptance in place of a constant rate.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eexport.runtime.costs import CostTable

LONGEST = 7
_SAME = 0.01


@dataclass(frozen=True)
class Payoff:
    """The best that a head does on one device.

    Attributes:
        speedup: Expected, against one token at a time; 1 where drafting does not pay.
        length: Tokens drafted a round, 0 where none.
        accepted: Of these, on average.
        draft_ms: What a drafted token takes.
        per_ms: Accepted tokens for a millisecond of draft, for drafts of three tokens.
    """

    speedup: float
    length: int
    accepted: float
    draft_ms: float
    per_ms: float


def survival(agrees: NDArray[np.bool_], longest: int = LONGEST) -> NDArray[np.float64]:
    """Share of the N rows of a text from which at least 1, 2, … ``longest`` tokens in a row are right.

    Args:
        agrees: [passes, N] whether the j-th token of a draft is right at a row; the last pass holds for later ones.
        longest: Tokens of a draft. One that would go beyond the end of the text counts as far as the text goes.
    """
    rows = agrees.shape[1]
    shares, right = [], np.ones(rows, bool)
    for step in range(longest):
        right = right[: rows - step] & agrees[min(step, len(agrees) - 1), step:]
        shares.append(float(right.sum() / rows))
    return np.array(shares)


def payoff(shares: Sequence[float], costs: CostTable, depth: int, draft_vocabulary: float) -> Payoff:
    """The best length of drafts, and what it gives.

    Args:
        shares: P(at least j drafted tokens are right) for j = 1, 2, …
        costs: Of the device.
        depth: Of the head; the full depth for one that reads the last hidden state.
        draft_vocabulary: Share of the vocabulary that the head computes.
    """
    deep = costs.num_layers
    shallow = 0 if depth == deep else depth
    head_ms = costs.layers_ms(deep - 1, deep, 1) + draft_vocabulary * costs.head_ms(1)
    draft_ms = costs.embed_ms(1) + costs.layers_ms(0, shallow, 1) + head_ms
    best = (1.0, 0, 0.0)
    for length in range(1, len(shares) + 1):
        accepted = float(sum(shares[:length]))
        rows = length + 1
        # What the shallow layers have computed is not computed again; the last drafted token still has to pass them.
        verify = (
            costs.step_ms(rows)
            if not shallow
            else costs.embed_ms(1)
            + costs.layers_ms(0, shallow, 1)
            + costs.layers_ms(shallow, deep, rows)
            + costs.head_ms(rows)
            + costs.host_ms
        )
        best = max(best, ((1 + accepted) * costs.step_ms(1) / (length * draft_ms + verify), length, accepted))
    return Payoff(*best, draft_ms, float(sum(shares[:3])) / (3 * draft_ms))


def draft_size(coverage: dict[int, float], costs: CostTable, depth: int, vocab_size: int) -> int:
    """The size of the draft vocabulary that gives most coverage for a draft's time.

    Args:
        coverage: Share of the model's tokens that are in a vocabulary of each size.
        costs: Of the device.
        depth: Of the exit that drafts.
        vocab_size: The model's.
    """
    below = costs.embed_ms(1) + costs.layers_ms(0, depth + 1, 1)
    gain = {size: share / (below + costs.head_ms(1) * size / vocab_size) for size, share in coverage.items()}
    # Of sizes that come to the same, the one with most coverage, so that noise in the times decides nothing.
    return max(size for size in coverage if gain[size] >= (1 - _SAME) * max(gain.values()))
