"""The early-exit adaptability score of arXiv 2603.23701: how much of what is skipped is already decided.

Per candidate depth ℓ of L: S̃^α · skip^(1-α), where S̃ is the similarity to the last depth in [0, 1] and skip the share
of layers left out, (L-ℓ)/L. The model's score is the mean over the candidates. It screens models; it is neither a
share of layers nor a speed-up.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]

ALPHAS = tuple(round(0.05 * step, 2) for step in range(21))
"""Where the curve over α is drawn."""


def from_cosine(cosine: Doubles) -> Doubles:
    """Map cosines from [-1, 1] linearly to [0, 1]."""
    return (np.clip(cosine, -1, 1) + 1) / 2


def layer_scores(similarity: Doubles, depths: Sequence[int], num_layers: int, alpha: float) -> Doubles:
    """The score of each depth from similarities [P] in [0, 1]; ``alpha`` is the weight of similarity, 0 to 1."""
    skip = (num_layers - np.asarray(depths, dtype=np.float64)) / num_layers
    scores: Doubles = np.asarray(similarity, dtype=np.float64) ** alpha * skip ** (1 - alpha)
    return scores


def eas(similarity: Doubles, depths: Sequence[int], num_layers: int, alpha: float) -> float:
    """Mean score of the depths before the last layer, one or more, from similarities [P] in [0, 1]."""
    candidates = [place for place, depth in enumerate(depths) if depth < num_layers]
    scores = layer_scores(similarity, depths, num_layers, alpha)
    return float(scores[candidates].mean())
