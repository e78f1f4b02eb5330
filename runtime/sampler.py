"""From a row of logits to the next token: penalties, filters and one seeded draw, in numpy alone.

Order: repetition penalty, frequency and presence penalty, logit bias, temperature, top-k, top-p, min-p, draw.
Reported logprobs are the model's own, log-softmax of the raw logits, whatever the parameters.
"""

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from eexport.runtime.errors import EexportError, RequestError

Logits = npt.NDArray[np.float32]
TokenIds = npt.NDArray[np.int64]
Probabilities = npt.NDArray[np.float64]

GREEDY_BELOW = 1e-5  # a temperature under this is greedy: dividing by it says nothing more
MAX_LOGPROBS = 20  # OpenAI's limit for top_logprobs
_BLOCK = 512  # tokens summed together before a draw walks through one block of them
_POOL_FLOORS = (1e-2, 1e-4, 1e-6, 0.0)  # weights, the largest being 1: how far down top-p looks, in steps
_RANGES = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop; a wrong value is a RequestError that names the field."""

    max_tokens: int | None = None
    """Tokens to make, at least 1; None is up to the end of the context."""
    temperature: float = 0.0
    """0 to 100; 0, or next to 0, always takes the likeliest token."""
    top_k: int = 0
    """Draw from this many likeliest tokens; 0 is all."""
    top_p: float = 1.0
    """Draw from the fewest tokens that hold this share of the probability, at least one."""
    min_p: float = 0.0
    """Drop tokens less probable than this share of the likeliest one's probability."""
    repetition_penalty: float = 1.0
    """For tokens of prompt and output: divides a positive logit, multiplies a negative one."""
    frequency_penalty: float = 0.0
    """-2 to 2; taken off a token's logit once for each time it is in the output."""
    presence_penalty: float = 0.0
    """-2 to 2; taken off a token's logit if it is in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id to a number from -100 to 100 that is added to its logit."""
    stop: Sequence[str] = ()
    """Strings that end the output and are left out of it; a single string is a list of one."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the output, besides the model's own."""
    seed: int | None = None
    """Same seed and logits, same tokens; None differs every time."""
    logprobs: int | None = None
    """How many likeliest tokens to report with each token, 0 to 20; None reports no logprobs at all."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence tokens."""

    def __post_init__(self) -> None:
        """Check every field and bring it to plain Python types."""
        if self.max_tokens is not None:
            self._set(max_tokens=_integer("max_tokens", self.max_tokens, 1))
        for name, (low, high) in _RANGES.items():
            self._set(**{name: _number(name, getattr(self, name), low, high)})
        self._set(top_k=_integer("top_k", self.top_k, 0))
        if not isinstance(self.logit_bias, Mapping):
            raise _wrong("logit_bias", "an object of token ids and numbers", self.logit_bias)
        tokens = [_integer("logit_bias", token, 0) for token in self.logit_bias]
        biases = [_number("logit_bias", bias, -100, 100) for bias in self.logit_bias.values()]
        self._set(logit_bias=dict(zip(tokens, biases, strict=True)))
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, Sequence) or not all(isinstance(text, str) and text for text in stop):
            raise _wrong("stop", "a list of strings, none of them empty", self.stop)
        self._set(stop=tuple(stop))
        if isinstance(self.stop_token_ids, str) or not isinstance(self.stop_token_ids, Sequence):
            raise _wrong("stop_token_ids", "a list of token ids", self.stop_token_ids)
        self._set(stop_token_ids=tuple(_integer("stop_token_ids", token, 0) for token in self.stop_token_ids))
        if self.seed is not None:
            self._set(seed=_integer("seed", self.seed, -(2**63), 2**64 - 1))
        if self.logprobs is not None:
            self._set(logprobs=_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS))
        if not isinstance(self.ignore_eos, bool):
            raise _wrong("ignore_eos", "true or false", self.ignore_eos)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < GREEDY_BELOW

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)


class Sampled(NamedTuple):
    """A chosen token; ``logprob`` and ``top``, likeliest first, only if ``logprobs`` was asked for."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Chooses the tokens of one reply.

    Penalties see the tokens told to ``observe`` and no others, so a drafted token that is turned down leaves
    no trace. Each token drawn costs one random number.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int] = ()) -> None:
        """Start a reply to ``prompt_ids``."""
        self._params = params
        self._position = len(prompt_ids)
        self._penalties = _Penalties(params, prompt_ids) if _Penalties.wanted(params) else None
        self._row = np.empty(0, np.float32)  # [V] scratch, from the first token that needs it
        # Seeds below 0 are the upper half of the 64-bit range.
        seed = None if params.seed is None else params.seed % 2**64
        self._random = np.random.Generator(np.random.PCG64(seed))

    def observe(self, token_id: int) -> None:
        """Note that ``token_id`` is now part of the output; call it for every token, sampled or not."""
        self._position += 1
        if self._penalties is not None:
            self._penalties.observe(token_id)

    def sample(self, logits: Logits) -> Sampled:
        """Choose a token for logits [V] fp32, which are left as they are; EexportError if they hold NaN."""
        adjusted = self._adjusted(logits)
        if self._params.is_greedy:
            token_id = self._likeliest(adjusted)
        else:
            token_ids, weights = self._candidates(adjusted)
            index = _draw(weights, self._random.random())
            token_id = index if token_ids is None else int(token_ids[index])
        if self._params.logprobs is None:
            return Sampled(token_id)
        return _with_logprobs(token_id, logits, self._params.logprobs)

    def probabilities(self, logits: Logits) -> tuple[TokenIds, Probabilities]:
        """What ``sample`` draws from: token ids [n], ascending, and probabilities [n] that sum to 1."""
        adjusted = self._adjusted(logits)
        if self._params.is_greedy:
            return np.array([self._likeliest(adjusted)]), np.ones(1)
        token_ids, weights = self._candidates(adjusted)
        exact = weights.astype(np.float64)
        return np.arange(weights.size) if token_ids is None else token_ids, exact / exact.sum()

    def _adjusted(self, logits: Logits) -> Logits:
        return logits if self._penalties is None else self._penalties.apply(logits, self._row_of(logits.size))

    def _row_of(self, size: int) -> Logits:
        # A new array of this size at every token costs several times what the arithmetic on it does.
        if self._row.size != size:
            self._row = np.empty(size, np.float32)
        return self._row

    def _likeliest(self, logits: Logits) -> int:
        token_id = int(logits.argmax())  # of a row with NaN this is the first NaN
        self._check(logits[token_id])
        return token_id

    def _candidates(self, logits: Logits) -> tuple[TokenIds | None, Logits]:
        """Token ids left by the filters (None for all, else ascending), and weights, the largest being 1.

        Without a filter the weights are the scratch row.
        """
        params = self._params
        peak = logits.max()  # NaN if any is
        self._check(peak)
        with np.errstate(over="ignore"):  # a masked logit may go to -inf
            scaled = np.subtract(logits, peak, out=self._row_of(logits.size))
            scaled *= np.float32(1 / params.temperature)
        kept: TokenIds | None = None
        if 0 < params.top_k < scaled.size:
            cutoff = np.partition(scaled, scaled.size - params.top_k)[scaled.size - params.top_k]
            kept = _largest(scaled, cutoff, params.top_k)
            scaled = scaled[kept]
        weights: Logits = np.exp(scaled, out=scaled)
        for keep in (_nucleus, _probable):
            if (chosen := keep(weights, params)) is not None:
                kept = chosen if kept is None else kept[chosen]
                weights = weights[chosen]
        return kept, weights

    def _check(self, peak: np.floating) -> None:
        if not math.isfinite(peak):
            raise EexportError(
                f"non-finite logits from the model at position {self._position}: it cannot be used as built; "
                "check it with another backend or build it at a higher precision"
            )


class _Penalties:
    """Repetition, frequency and presence penalties and the logit bias, with the counts that they need."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        self._params = params
        self._bias_ids = np.fromiter(params.logit_bias.keys(), np.int64)
        self._bias = np.fromiter(params.logit_bias.values(), np.float32)
        self._ids = np.unique(np.asarray(prompt_ids, np.int64))  # [n] every token seen so far
        self._counts = np.zeros(self._ids.size, np.float32)  # [n] how often in the output
        self._slots = {token_id: slot for slot, token_id in enumerate(self._ids.tolist())}

    @staticmethod
    def wanted(params: SamplingParams) -> bool:
        counted = params.frequency_penalty != 0 or params.presence_penalty != 0
        return counted or params.repetition_penalty != 1 or bool(params.logit_bias)

    def observe(self, token_id: int) -> None:
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == self._ids.size:  # full: double it
            grown = max(64, 2 * slot)
            self._ids = np.resize(self._ids, grown) if slot else np.zeros(grown, np.int64)
            self._counts = np.concatenate([self._counts, np.zeros(grown - slot, np.float32)])
        self._ids[slot] = token_id
        self._counts[slot] += 1

    def apply(self, logits: Logits, adjusted: Logits) -> Logits:
        """Write the penalised logits [V] to ``adjusted`` [V], and return it."""
        params, used = self._params, len(self._slots)
        np.copyto(adjusted, logits)
        ids, counts = self._ids[:used], self._counts[:used]
        picked = adjusted[ids]
        penalty = np.float32(params.repetition_penalty)
        picked = np.where(picked > 0, picked / penalty, picked * penalty)
        picked -= np.float32(params.frequency_penalty) * counts
        picked -= np.float32(params.presence_penalty) * (counts > 0)
        adjusted[ids] = picked
        if self._bias_ids.size:
            if (last := int(self._bias_ids.max())) >= logits.size:
                message = f"logit_bias: token {last} is outside the vocabulary (0 to {logits.size - 1})"
                raise RequestError(message, "logit_bias")
            adjusted[self._bias_ids] += self._bias
        return adjusted


def _largest(values: Logits, cutoff: np.floating, count: int) -> TokenIds:
    """Where the ``count`` largest values are, ascending; ``cutoff`` is the least. A tie keeps lower ids."""
    kept = np.flatnonzero(values >= cutoff)
    if (excess := kept.size - count) > 0:
        tied = kept[values[kept] == cutoff]
        kept = np.setdiff1d(kept, tied[-excess:], assume_unique=True)
    return kept


def _nucleus(weights: Logits, params: SamplingParams) -> TokenIds | None:
    """Top-p: the fewest weights that hold ``top_p`` of the sum. Sorts only as many as may be among them."""
    if params.top_p >= 1:
        return None
    goal = params.top_p * weights.sum(dtype=np.float64)
    pool = weights
    for floor in _POOL_FLOORS:
        pool = weights[weights >= floor]
        if pool.sum(dtype=np.float64) >= goal:
            break
    descending = np.sort(pool)[::-1]
    count = min(int(np.searchsorted(descending.cumsum(dtype=np.float64), goal)) + 1, pool.size)
    return _largest(weights, descending[count - 1], count)


def _probable(weights: Logits, params: SamplingParams) -> TokenIds | None:
    """Min-p: weights of at least ``min_p``, the largest being 1."""
    return np.flatnonzero(weights >= params.min_p) if params.min_p > 0 else None


def _draw(weights: Logits, uniform: float) -> int:
    """Index of the weight that ``uniform`` in [0, 1) falls on: first its block, then its place there."""
    block_ends = np.add.reduceat(weights, np.arange(0, weights.size, _BLOCK), dtype=np.float64).cumsum()
    target = uniform * block_ends[-1]
    block = _first_above(block_ends, target)
    start = block * _BLOCK
    ends = weights[start : start + _BLOCK].cumsum(dtype=np.float64)
    return start + _first_above(ends, target - (block_ends[block - 1] if block else 0.0))


def _first_above(ends: Probabilities, target: float) -> int:
    # Rounding may put the target at the very end; a weight of zero must not be drawn even then.
    return int(np.searchsorted(ends, min(target, np.nextafter(ends[-1], 0)), side="right"))


def _with_logprobs(token_id: int, logits: Logits, count: int) -> Sampled:
    peak = logits.max()
    log_total = float(peak) + math.log(np.exp(logits - peak).sum(dtype=np.float64))
    top: tuple[tuple[int, float], ...] = ()
    if count := min(count, logits.size):
        cutoff = np.partition(logits, logits.size - count)[logits.size - count]
        ids = _largest(logits, cutoff, count)
        ids = ids[np.argsort(-logits[ids], kind="stable")]
        top = tuple((int(i), float(logits[i]) - log_total) for i in ids)
    return Sampled(token_id, float(logits[token_id]) - log_total, top)


def _number(name: str, value: Any, low: float, high: float) -> float:
    # The comparison is false for NaN.
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        raise _wrong(name, f"a number from {low:g} to {high:g}", value)
    return float(value)


def _integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_integer or value < low or (high is not None and value > high):
        raise _wrong(name, f"an integer from {low}" + (" up" if high is None else f" to {high}"), value)
    return int(value)


def _wrong(name: str, wanted: str, value: object) -> RequestError:
    return RequestError(f"{name}: expected {wanted}, got {reprlib.repr(value)}", name)
