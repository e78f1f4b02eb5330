"""Trained exits of a checkpoint: heads, the exit predictor and thresholds, as numbers and nothing else.

An exit head reads hidden states of one position, its ``features``:

    hidden        after the head's own depth
    hidden.1 … 4  after these layers
    embedding     of the current token
    previous      after the last layer and before the final norm, of the position before; zeros at position 0

One feature is the residual stream itself. Several are normed each with a scale of its own, concatenated in their order
and projected to the model's width (as EAGLE-3 fuses its features, arXiv 2503.01840). One decoder layer of the model's
own form follows, with its own keys and values, then a norm and the rows of the model's LM head that belong to the draft
vocabulary, which all heads share.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eexport.models.checkpoint import Checkpoint, checkpoint_identity
from eexport.models.errors import CheckpointError
from eexport.models.spec import ModelSpec

Floats = NDArray[np.float32]

PREDICTOR_LAYERS = 4
"""How many of the first layers the exit predictor, and heads that ask for them, may read."""
PREDICTOR_UNITS = 256

FEATURES = ("hidden", "previous", "embedding", *(f"hidden.{layer}" for layer in range(1, PREDICTOR_LAYERS + 1)))

_TAKEN = ("embed", "head", "vocab", "draft", "predictor")  # files of a bundle


@dataclass(frozen=True, eq=False)
class ExitHead:
    """A trained head.

    Attributes:
        name: Names its stage, files and caches in a bundle, e.g. "exit_08".
        depth: Layers that have run before it; the model's own number of layers for a head that only drafts.
        features: What it reads, of ``FEATURES``.
        tensors: fp32, exactly those of ``head_shapes``.
    """

    name: str
    depth: int
    features: tuple[str, ...]
    tensors: Mapping[str, Floats]


@dataclass(frozen=True, eq=False)
class ExitPredictor:
    """Says which exit a token needs, from the hidden states after the first layers, each divided by its RMS.

    Attributes:
        layers: The layers that it reads, e.g. (1, 2, 3, 4).
        tensors: fp32, exactly those of ``predictor_shapes``.
    """

    layers: tuple[int, ...]
    tensors: Mapping[str, Floats]


@dataclass(frozen=True)
class Thresholds:
    """Numbers of the rule by which a token leaves early, in nats.

    Attributes:
        entropy: For each exit, shallowest first, the entropy of its head under which a token leaves; 0 for never.
        previous: The previous token's entropy above which a token takes full depth; infinity for none.
        numerics: ``Manifest.numerics`` of the stages that they were chosen on; for others nothing is known.
    """

    entropy: tuple[float, ...]
    previous: float
    numerics: str


@dataclass(frozen=True, eq=False)
class Calibration:
    """Everything that was trained and chosen for one checkpoint.

    Attributes:
        checkpoint: Its name, for messages.
        identity: ``checkpoint_identity`` of it.
        heads: By depth, which no two share.
        draft_ids: [Vd] int32, rising: the token ids of the draft vocabulary.
        predictor: None where there is none.
        thresholds: None where none were chosen.
        record: How it came about: metrics, hashes of data, seed, versions, assumptions. JSON values only.
    """

    checkpoint: str
    identity: str
    heads: tuple[ExitHead, ...]
    draft_ids: NDArray[np.int32]
    predictor: ExitPredictor | None
    thresholds: Thresholds | None
    record: dict[str, Any]

    def exit_depths(self, num_layers: int) -> tuple[int, ...]:
        """Depths of the heads at which a token may leave: those short of the model's ``num_layers``."""
        return tuple(head.depth for head in self.heads if head.depth < num_layers)


def head_shapes(spec: ModelSpec, features: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a head; matrices are [out, in], layer tensors named as within a layer."""
    width, shapes = spec.hidden_size, dict[str, tuple[int, ...]]()
    if len(features) > 1:
        shapes["fuse.weight"] = (width, len(features) * width)
        shapes |= {f"fuse_norm.{index}.weight": (width,) for index in range(len(features))}
    return {**shapes, **spec.layer_shapes(), "norm.weight": (width,)}


def predictor_shapes(spec: ModelSpec, layers: Sequence[int], exits: int) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a predictor over ``exits`` exits and full depth."""
    return {
        "hidden.weight": (PREDICTOR_UNITS, len(layers) * spec.hidden_size),
        "hidden.bias": (PREDICTOR_UNITS,),
        "output.weight": (exits + 1, PREDICTOR_UNITS),
        "output.bias": (exits + 1,),
    }


def check_fits(calibration: Calibration, checkpoint: Checkpoint, where: str) -> None:
    """Raise CheckpointError unless ``calibration``, read from ``where``, is of this checkpoint and makes sense."""
    identity = checkpoint_identity(checkpoint)
    if calibration.identity != identity:
        raise CheckpointError(
            f"{where}: is a calibration of {calibration.checkpoint} ({calibration.identity[:12]}…), not of "
            f"{checkpoint.source['name']} ({identity[:12]}…): calibrate this checkpoint"
        )
    problem = next(_problems(calibration, checkpoint.spec), None)
    if problem is not None:
        raise CheckpointError(f"{where}: {problem}: calibrate this checkpoint again")


def _problems(calibration: Calibration, spec: ModelSpec) -> Iterator[str]:
    ids, depths = calibration.draft_ids, [head.depth for head in calibration.heads]
    if not len(ids) or (np.diff(ids) <= 0).any() or ids[0] < 0 or ids[-1] >= spec.vocab_size:
        yield f"the draft vocabulary is not a rising list of ids below {spec.vocab_size}"
    if not depths or depths != sorted(set(depths)) or not 1 <= depths[0] <= depths[-1] <= spec.num_layers:
        yield f"the heads are at depths {depths}, not at rising ones of 1 to {spec.num_layers}"
    if len({head.name for head in calibration.heads}) < len(calibration.heads):
        yield "two heads have one name"
    for head in calibration.heads:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", head.name) or head.name in _TAKEN or head.name.startswith("block_"):
            yield f"{head.name!r} is no name for a head"
        allowed = {f for f in FEATURES if not f.startswith("hidden.") or int(f.partition(".")[2]) <= head.depth}
        if not head.features or len(set(head.features)) < len(head.features) or not allowed.issuperset(head.features):
            yield f"{head.name} cannot read {', '.join(head.features) or 'nothing'} at depth {head.depth}"
        yield from _misfits(head.name, head.tensors, head_shapes(spec, head.features))
    exits = len(calibration.exit_depths(spec.num_layers))
    if (predictor := calibration.predictor) is not None:
        readable = set(range(1, min(PREDICTOR_LAYERS, spec.num_layers) + 1))
        if not predictor.layers or not readable.issuperset(predictor.layers):
            yield f"the predictor cannot read layers {list(predictor.layers)}"
        yield from _misfits("predictor", predictor.tensors, predictor_shapes(spec, predictor.layers, exits))
    if (thresholds := calibration.thresholds) is not None:
        if len(thresholds.entropy) != exits:
            yield f"there are {len(thresholds.entropy)} entropy thresholds for {exits} exits"
        if not all(0 <= value < np.inf for value in thresholds.entropy) or not thresholds.previous >= 0:
            yield "an entropy threshold is not a number of 0 or more"


def _misfits(owner: str, tensors: Mapping[str, Floats], expected: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    for name, shape in expected.items():
        if name not in tensors:
            yield f"{owner} lacks {name}"
        elif tensors[name].shape != shape:
            yield f"{name} of {owner} is {tensors[name].shape}, this model needs {shape}"
    for name in tensors.keys() - expected.keys():
        yield f"{owner} has a tensor {name} that it does not use"
