"""Trained exits in torch, a whole text at a time: what their slots are compared with."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eexport.models.checkpoint import open_checkpoint
from eexport.models.decoder import Decoder, LayerKV, rope_tables
from eexport.models.exit_decoder import exit_hidden, exit_logits, predictor_logits
from eexport.models.exits import Calibration
from eexport.runtime.exits import ExitRule

Floats = NDArray[np.float32]


def lens(calibration: Calibration, checkpoint: Path) -> Calibration:
    """Its heads changed to say what the model's own norm and head make of what they read; its predictor unbiased."""
    norm = open_checkpoint(checkpoint).weights.read("model.norm.weight")
    heads = []
    for head in calibration.heads:
        outputs = {
            name: np.zeros_like(v) for name, v in head.tensors.items() if "o_proj" in name or "down_proj" in name
        }
        heads.append(dataclasses.replace(head, tensors={**head.tensors, **outputs, "norm.weight": norm}))
    predictor = calibration.predictor
    assert predictor is not None
    unbiased = {**predictor.tensors, "output.bias": np.zeros_like(predictor.tensors["output.bias"])}
    return dataclasses.replace(
        calibration, heads=tuple(heads), predictor=dataclasses.replace(predictor, tensors=unbiased)
    )


def entropy(logits: Floats) -> float:
    """Of the distribution of logits [V], in nats."""
    weights = np.exp(logits.astype(np.float64) - logits.max())
    probabilities = weights / weights.sum()
    return float(-(probabilities * np.log(probabilities)).sum())


@dataclasses.dataclass
class Answer:
    """Tokens of an answer, the depth of each, and how often an exit's head was asked."""

    tokens: list[int]
    depths: list[int]
    tried: int


class ExitReference:
    """A checkpoint with its calibration."""

    def __init__(self, checkpoint: Path, calibration: Calibration) -> None:
        opened = open_checkpoint(checkpoint)
        self.decoder = Decoder.from_weights(opened.spec, opened.weights)
        self.calibration, self.spec = calibration, opened.spec
        self.exits = calibration.exit_depths(self.spec.num_layers)

    def __call__(self, ids: Sequence[int]) -> tuple[list[Floats], Floats, Floats]:
        """Logits of each head [T, Vd], of the predictor [T, E + 1] and of the model [T, V] for one text."""
        cos, sin = rope_tables(self.spec.rope, torch.arange(len(ids))[None])
        states = [self.decoder.embed(torch.tensor([list(ids)]))]
        for layer in self.decoder.layers:
            states.append(layer(states[-1], cos, sin, LayerKV()))
        rows = self.decoder.head_weight[torch.from_numpy(self.calibration.draft_ids).long()]
        heads = []
        for head in self.calibration.heads:
            tensors = {name: torch.from_numpy(values) for name, values in head.tensors.items()}
            features = [_feature(name, head.depth, states) for name in head.features]
            hidden = exit_hidden(self.spec, tensors, features, cos, sin, LayerKV())
            heads.append(exit_logits(self.spec, tensors, hidden, rows)[0].numpy())
        predictor = self.calibration.predictor
        assert predictor is not None
        tensors = {name: torch.from_numpy(values) for name, values in predictor.tensors.items()}
        named = predictor_logits(self.spec, tensors, [states[layer] for layer in predictor.layers])[0].numpy()
        return heads, named, self.decoder.head(states[-1])[0].numpy()

    def answer(self, prompt: Sequence[int], rule: ExitRule, most: int, eos: Sequence[int] = ()) -> Answer:
        """Every token from a pass over the whole text."""
        found, previous = Answer([], [], 0), 0.0
        while len(found.tokens) < most and not (found.tokens and found.tokens[-1] in eos):
            heads, named, final = self([*prompt, *found.tokens])
            place, depth = int(named[-1].argmax()), self.spec.num_layers
            token, surprise = int(final[-1].argmax()), entropy(final[-1])
            if place < len(self.exits) and rule.entropy[place] > 0 and previous <= rule.previous:
                found.tried += 1
                if (own := entropy(heads[place][-1])) < rule.entropy[place]:
                    token, surprise = int(self.calibration.draft_ids[heads[place][-1].argmax()]), own
                    depth = self.exits[place]
            found.tokens.append(token)
            found.depths.append(depth)
            previous = surprise
        return found


def _feature(name: str, depth: int, states: Sequence[Tensor]) -> Tensor:
    if name == "previous":
        return torch.cat([torch.zeros_like(states[-1][:, :1]), states[-1][:, :-1]], dim=1)
    return states[{"hidden": depth, "embedding": 0}.get(name, int(name[-1]) if name[-1].isdigit() else 0)]
