"""How an intermediate layer's answer compares with the last one's, token by token.

The raw lens: the model's own final norm and head applied to the hidden state after a layer. Legend: P depths, the last
of them the full depth; D hidden width; V vocabulary.
"""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from eexport.calibration.traced import Floats, cosine

TOP = 10
_GROUP = 64  # logits a group, when the likeliest are looked for


@dataclass(frozen=True)
class Measures:
    """Arrays over depths: [P] for one token, [N, P] for N tokens.

    Attributes:
        hidden_cosine: Between the hidden state and the last layer's.
        logit_cosine: Between the logits and the last layer's.
        top_overlap: How many of the ten likeliest tokens are among the last layer's ten, whatever their order.
        top_order: At how many of the ten places stands the very token that the last layer puts there.
        argmax: The likeliest token.
        probability: Its probability.
        entropy: Of the distribution, in nats.
    """

    hidden_cosine: Floats
    logit_cosine: Floats
    top_overlap: NDArray[np.uint8]
    top_order: NDArray[np.uint8]
    argmax: NDArray[np.int32]
    probability: Floats
    entropy: Floats

    @classmethod
    def stack(cls, rows: "list[Measures]") -> "Measures":
        """N tokens' measures [P] as [N, P]."""
        return cls(**{field.name: np.stack([getattr(row, field.name) for row in rows]) for field in fields(cls)})

    @classmethod
    def join(cls, parts: "list[Measures]") -> "Measures":
        """Several [N, P] one after the other."""
        return cls(
            **{field.name: np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)}
        )

    @property
    def agrees(self) -> NDArray[np.bool_]:
        """Whether a depth's likeliest token is the last layer's."""
        agrees: NDArray[np.bool_] = self.argmax == self.argmax[..., -1:]
        return agrees


def measure(hidden: Floats, logits: Floats, logit_cosine: Floats) -> Measures:
    """Measures of one token from hidden states [P, D], their logits [P, V] and the logits' cosines [P].

    ``logits`` is overwritten.
    """
    top = top_tokens(logits, min(TOP, logits.shape[-1]))
    argmax = top[:, 0]
    logits -= logits[np.arange(len(logits)), argmax][:, None]
    weights = np.exp(logits)  # of the softmax, the likeliest has 1
    total = weights.sum(-1)
    # H = log Z - sum(p·x), as p = exp(x) / Z
    entropy = np.log(total) - (weights[:, None, :] @ logits[:, :, None])[:, 0, 0] / total
    return Measures(
        hidden_cosine=cosine(hidden, hidden[-1:]),
        logit_cosine=logit_cosine,
        top_overlap=(top[:, :, None] == top[-1][None, None]).any(-1).sum(-1).astype(np.uint8),
        top_order=(top == top[-1]).sum(-1).astype(np.uint8),
        argmax=argmax.astype(np.int32),
        probability=(1 / total).astype(np.float32),
        entropy=np.maximum(entropy, 0).astype(np.float32),
    )


def top_tokens(logits: Floats, count: int) -> NDArray[np.int64]:
    """The ``count`` likeliest tokens of each row of [P, V], best first, the lower id first among equals: [P, count].

    They lie in the groups with the highest maxima, so most of the vocabulary is looked at only once.
    """
    rows, vocab = logits.shape
    groups = vocab // _GROUP
    if groups <= count:
        candidates = np.broadcast_to(np.arange(vocab), (rows, vocab))
    else:
        maxima = logits[:, : groups * _GROUP].reshape(rows, groups, _GROUP).max(-1)  # [P, groups]
        best = np.argpartition(-maxima, count - 1, axis=-1)[:, :count]
        inside = (best[:, :, None] * _GROUP + np.arange(_GROUP)).reshape(rows, -1)  # [P, count·64]
        rest = np.broadcast_to(np.arange(groups * _GROUP, vocab), (rows, vocab - groups * _GROUP))
        candidates = np.sort(np.concatenate((inside, rest), axis=-1), axis=-1)
    values = np.take_along_axis(logits, candidates, axis=-1)
    order = np.argsort(-values, axis=-1, kind="stable")[:, :count]
    return np.take_along_axis(candidates, order, axis=-1)


def log_softmax(logits: Floats) -> Floats:
    """Log-probabilities over the last axis, in nats."""
    shifted = logits - logits.max(-1, keepdims=True)
    result: Floats = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True, dtype=np.float64)).astype(np.float32)
    return result
