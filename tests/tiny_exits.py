"""Random calibrations for the tiny checkpoints of ``tiny``: exits that know nothing, in the form of those that do."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eexport.models.checkpoint import checkpoint_identity, open_checkpoint
from eexport.models.exits import (
    Calibration,
    ExitHead,
    ExitPredictor,
    Thresholds,
    head_shapes,
    predictor_shapes,
)
from eexport.runtime.manifest import StageSpec, read_manifest

ROWS = 100

Floats = NDArray[Any]

Features = Mapping[int, tuple[str, ...]]

HEADS: Features = {1: ("hidden",), 2: ("hidden", "embedding", "hidden.1"), 3: ("embedding", "previous")}
"""For three layers: one feature, several, and a head on the last hidden state, which only drafts."""


def make_calibration(
    checkpoint: Path,
    heads: Features = HEADS,
    *,
    draft: int = 64,
    predictor: tuple[int, ...] | None = (1, 2),
    previous: float = 1.5,
    numerics: str = "ort, int8 and int8 for the vocabulary in blocks of 32",
    seed: int = 0,
) -> Calibration:
    """Heads by depth for the checkpoint in a folder, with thresholds of 0.5 nats and an optional predictor's layers."""
    opened, random = open_checkpoint(checkpoint), np.random.default_rng(seed)
    spec = opened.spec
    exits = [depth for depth in heads if depth < spec.num_layers]
    named = {depth: f"exit_{depth:02d}" for depth in heads}
    return Calibration(
        checkpoint=opened.source["name"],
        identity=checkpoint_identity(opened),
        heads=tuple(
            ExitHead(named[depth], depth, features, _tensors(head_shapes(spec, features), random))
            for depth, features in heads.items()
        ),
        draft_ids=np.sort(random.choice(spec.vocab_size, draft, replace=False)).astype(np.int32),
        predictor=None
        if predictor is None
        else ExitPredictor(predictor, _tensors(predictor_shapes(spec, predictor, len(exits)), random)),
        thresholds=Thresholds((0.5,) * len(exits), previous, numerics),
        record={"seed": seed, "data": {"sha256": "0123"}},
    )


def _tensors(shapes: Mapping[str, tuple[int, ...]], random: Any) -> dict[str, NDArray[np.float32]]:
    """Large enough to matter, and queries soft enough for int4."""
    tensors = {}
    for name, shape in shapes.items():
        values = random.standard_normal(shape)
        if len(shape) == 2:
            values *= shape[1] ** -0.5 * (0.3 if "q_proj" in name else 1.0)
        elif "norm" in name:
            values = 1 + 0.2 * values
        tensors[name] = values.astype(np.float32)
    return tensors


def token_ids(count: int = ROWS) -> list[int]:
    """Random ones."""
    return [int(token) for token in np.random.default_rng(1).integers(3, 300, count)]


def read_by(name: str, depth: int, states: list[Floats]) -> Floats:
    """What a head at `depth` reads under this name, [T, D]."""
    if name == "previous":
        return np.concatenate([np.zeros_like(states[-1][:1]), states[-1][:-1]])
    layer = {"hidden": depth, "embedding": 0}.get(name)
    return states[int(name.partition(".")[2]) if layer is None else layer]


def heads(bundle: Path) -> tuple[StageSpec, ...]:
    """The stages of a bundle's heads."""
    exits = read_manifest(bundle).exits
    assert exits is not None
    return exits.heads


def predictor(bundle: Path) -> StageSpec:
    """The stage of a bundle's predictor."""
    exits = read_manifest(bundle).exits
    assert exits is not None and exits.predictor is not None
    return exits.predictor
