"""How deep a token has to go: by entropy, and by the answer itself. N tokens, P depths, L layers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eexport.calibration.traced import Floats

Places = NDArray[np.int64]

LOW_FINAL_ENTROPY = 0.5
"""Nats; below it the final distribution of a boilerplate token lies."""


def stays(holds: NDArray[np.bool_]) -> Places:
    """For each token the place of the first depth from which on ``holds`` [N, P] is true to the end; P if never."""
    ending = np.cumprod(holds[:, ::-1], axis=1).sum(axis=1)  # how many true ones the row ends with
    return np.asarray(holds.shape[1] - ending, dtype=np.int64)


def confident_at(entropy: Floats, tau: float) -> Places:
    """Place of the depth from which on the entropy [N, P] stays at or under ``tau`` nats; P if it ends above."""
    return stays(entropy <= tau)


def decided_at(argmax: NDArray[np.int32]) -> Places:
    """Place of the depth from which on every depth's likeliest token [N, P] is the last one's."""
    return stays(argmax == argmax[:, -1:])


def histogram(places: Places, count: int) -> list[int]:
    """How many tokens stand at each of ``count`` depths; those that never get there (place P) are left out."""
    counts: list[int] = np.bincount(places[places < count], minlength=count).tolist()
    return counts


def skip_share(places: Places, depths: Sequence[int], num_layers: int) -> float:
    """Mean share of layers that a token leaves out which exits at ``places``; who never exits leaves out none."""
    reached = np.asarray([*depths, num_layers])[places]
    return float(1 - reached.mean() / num_layers)


@dataclass(frozen=True)
class Boilerplate:
    """Signals of tokens that need little depth, as shares of all tokens.

    Attributes:
        rapid: The entropy falls under τ by a quarter of the layers and stays there.
        low_final: The final entropy is under 0.5 nats.
        both: Both of these, which is what counts as boilerplate.
        neighbours: Correlation (phi) of ``both`` between a token and the next one; None where it does not vary.
        low_final_neighbours: The same of ``low_final``.
    """

    rapid: float
    low_final: float
    both: float
    neighbours: float | None
    low_final_neighbours: float | None


def boilerplate(entropies: Sequence[Floats], depths: Sequence[int], num_layers: int, tau: float) -> Boilerplate:
    """Find the boilerplate in texts, each with entropies [N, P] in nats."""
    early = max(1, int(np.searchsorted(depths, num_layers / 4, side="right")))  # places of depths up to a quarter
    rapid = [confident_at(entropy, tau) < early for entropy in entropies]
    low = [entropy[:, -1] < LOW_FINAL_ENTROPY for entropy in entropies]
    both = [a & b for a, b in zip(rapid, low, strict=True)]
    rapid_share, low_share, both_share = (float(np.concatenate(flags).mean()) for flags in (rapid, low, both))
    return Boilerplate(rapid_share, low_share, both_share, _neighbour_phi(both), _neighbour_phi(low))


def _neighbour_phi(flags: Sequence[NDArray[np.bool_]]) -> float | None:
    here, there = (np.concatenate([f[part] for f in flags]) for part in (slice(None, -1), slice(1, None)))
    if not len(here) or here.all() or not here.any() or there.all() or not there.any():
        return None
    return float(np.corrcoef(here, there)[0, 1])


def layer_ranges(num_layers: int) -> list[tuple[int, int]]:
    """The ranges of the usage table: 1-8, 9-12, 13-24 and 25-32 of 32 layers, in proportion; first and last layer."""
    ends = sorted({max(1, round(num_layers * part)) for part in (0.25, 0.375, 0.75, 1)})
    return [(start + 1, end) for start, end in zip([0, *ends], ends, strict=False)]


def layer_use(places: Places, depths: Sequence[int], num_layers: int) -> list[float]:
    """For each of ``layer_ranges`` the share of tokens that exit at ``places`` and run its first layer."""
    reached = np.asarray([*depths, num_layers])[places]
    return [float((reached >= first).mean()) for first, _ in layer_ranges(num_layers)]
