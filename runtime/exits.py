"""The rule by which a token leaves early without being verified; calibration tunes this very function."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class ExitRule:
    """When to believe an exit head.

    A token leaves at the exit that the predictor names if the entropy of that exit's head, over the draft vocabulary,
    is under the exit's threshold, unless the previous token came from a distribution of high entropy: what follows a
    decision is computed in full. There is one try: an exit that is not believed is followed by full depth.

    Attributes:
        entropy: A threshold for each exit, shallowest first, in nats; 0 never exits.
        previous: The previous token's entropy, in nats, above which a token takes full depth; infinity for none.
    """

    entropy: tuple[float, ...]
    previous: float

    @property
    def exits(self) -> bool:
        """Whether any token can leave early."""
        return any(threshold > 0 for threshold in self.entropy)

    def leaves(self, exit_index: int, entropy: float, previous: float) -> bool:
        """Whether one token leaves at exit ``exit_index``.

        Args:
            exit_index: What the predictor named; the number of exits stands for full depth.
            entropy: Of the exit head's distribution, in nats.
            previous: Entropy of the distribution that the previous token was taken from, in nats.
        """
        return exit_index < len(self.entropy) and entropy < self.entropy[exit_index] and previous <= self.previous


def exits_taken(
    rule: ExitRule,
    predicted: NDArray[np.integer],
    entropy: NDArray[np.floating],
    final_entropy: NDArray[np.floating],
    lengths: Sequence[int],
) -> NDArray[np.bool_]:
    """Which of N recorded tokens leave early, text by text, in the order in which a device would decide.

    Args:
        rule: The rule.
        predicted: [N] exit that the predictor names, E for full depth.
        entropy: [N, E] of each exit's head, in nats.
        final_entropy: [N] of the full model, in nats.
        lengths: Tokens of each text; they sum to N. The first token of a text has no previous one and may leave.
    """
    tokens, exits = entropy.shape
    if not tokens or not exits:
        return np.zeros(tokens, bool)
    place = np.minimum(predicted, exits - 1)
    own = np.take_along_axis(entropy, place[:, None], axis=1)[:, 0].astype(np.float64)
    believed = (predicted < exits) & (own < np.asarray(rule.entropy)[place])
    # Whether the token before allows it, had that one left early, and had it not.
    left, stayed = (np.roll(np.asarray(values, np.float64) <= rule.previous, 1) for values in (own, final_entropy))
    starts = np.cumsum([0, *lengths])[:-1]
    left[starts[starts < tokens]] = stayed[starts[starts < tokens]] = rule.previous >= 0
    # Where both say the same the token before does not matter. Elsewhere a token does as the one before did, or the
    # opposite: count the opposites since the last token that was settled.
    settled = ~believed | (left == stayed)
    last = np.maximum.accumulate(np.where(settled, np.arange(tokens), 0))
    opposites = np.cumsum(~settled & stayed)
    taken: NDArray[np.bool_] = (believed & left)[last] ^ ((opposites - opposites[last]) % 2 == 1)
    return taken
