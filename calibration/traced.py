"""What the probe asks of a model: hidden states at several depths, and the head on any of them.

``traced_checkpoint`` reads every layer of a checkpoint (torch), ``traced_bundle`` the depths that a bundle gives out
(no torch, so it works on the device). Legend: R sequences, P depths, D hidden width, V vocabulary, N any rows.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from eexport.runtime.errors import EexportError

Floats = NDArray[np.float32]

SLOTS = 1 << 14
"""Tokens that the sequences decoded together may hold at most; more would only take memory."""


class TracedModel(Protocol):
    """A decoder that shows its hidden states while it decodes a few sequences at once.

    Attributes:
        name: Of the model.
        identity: A hash of what it computes, so that records of another model are never taken for its own.
        form: What is traced: "checkpoint, fp32" or "bundle, int8".
        num_layers: Its full depth.
        depths: P depths at which hidden states are read, ascending; 1 is after the first layer, the last is the full
            depth.
        eos_token_ids: Tokens that end a sequence.
        context_length: Most tokens of a sequence.
        width: How many sequences it decodes together at most.
        slots: How many tokens these may hold together; a single sequence may hold more.
    """

    name: str
    identity: str
    form: str
    num_layers: int
    depths: tuple[int, ...]
    eos_token_ids: frozenset[int]
    context_length: int
    width: int
    slots: int

    def start(self, sequences: Sequence[Sequence[int]], room: int) -> Floats:
        """Begin R sequences that may each grow by ``room`` tokens; hidden states [R, P, D] of their last tokens."""
        ...

    def step(self, tokens: Sequence[int]) -> Floats:
        """Append a token to each of the R sequences; hidden states [R, P, D]."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these of the sequences only."""
        ...

    def logits(self, hidden: Floats) -> Floats:
        """Final norm and head: hidden states [N, D] to logits [N, V]."""
        ...

    def logit_cosine(self, hidden: Floats) -> Floats:
        """Cosine between each depth's logits and the last's, for hidden states [R, P, D]: [R, P]."""
        ...


def check_finite(hidden: Floats, depths: Sequence[int], name: str) -> None:
    """Raise EexportError naming the first layer of ``hidden`` [R, P, D] that holds NaN or infinity."""
    finite = np.isfinite(hidden).all(axis=(0, 2))
    if not finite.all():
        depth = depths[int(np.argmin(finite))]
        raise EexportError(
            f"{name}: the activations after layer {depth} are not finite, so nothing can be measured: the checkpoint "
            "is damaged, or its precision too small for it"
        )


def cosine(left: Floats, right: Floats) -> Floats:
    """Cosine over the last axis; 0 where one side is all zeros."""
    products = np.einsum("...d,...d->...", left, right, dtype=np.float64)
    norms = np.linalg.norm(left.astype(np.float64), axis=-1) * np.linalg.norm(right.astype(np.float64), axis=-1)
    result: Floats = np.divide(products, norms, out=np.zeros_like(products), where=norms > 0).astype(np.float32)
    return result
