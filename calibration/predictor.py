"""The exit predictor: from the hidden states of the first layers, which exit does a token need?

The required exit of a token is the shallowest from which on every exit agrees with the full model; full depth where the
deepest exit does not. Legend: N tokens, E exits, D hidden width, F = layers · D.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from eexport.calibration.corpus import Corpus
from eexport.calibration.train import Course, Tensors, adamw, train
from eexport.models.exit_decoder import predictor_logits
from eexport.models.exits import PREDICTOR_LAYERS, PREDICTOR_UNITS, ExitPredictor, predictor_shapes
from eexport.models.spec import ModelSpec
from eexport.runtime.console import Progress

Classes = NDArray[np.int64]

_ROWS = 512  # of a step
_EPOCHS = 8
_BINS = 10


def required_exits(agrees: NDArray[np.bool_]) -> Classes:
    """Class [N] of tokens by ``agrees`` [N, E], shallowest exit first; E for full depth.

    >>> required_exits(np.array([[True, True], [True, False], [False, True], [False, False]])).tolist()
    [0, 2, 1, 2]
    """
    stable = np.logical_and.accumulate(agrees[:, ::-1], axis=1)  # [N, E] agrees from here down, deepest first
    return np.asarray(agrees.shape[1] - stable.sum(axis=1), np.int64)


def train_predictor(
    spec: ModelSpec,
    corpus: Corpus,
    numbers: Sequence[int],
    agrees: Sequence[NDArray[np.bool_]],
    shallowest: int,
    state: Path,
    seed: int,
    progress: Progress,
) -> tuple[ExitPredictor, int]:
    """A predictor, and the most common class of its training rows.

    Args:
        spec: The model.
        corpus: The texts.
        numbers: Texts that the exits were not trained on: on those that they were, they agree too often.
        agrees: [N, E] of each text's answer rows.
        shallowest: Depth of the first exit; what lies deeper is not there yet where a token may leave.
        state: As in ``train``.
        seed: Of first values and order.
        progress: As in ``train``.
    """
    layers = tuple(range(1, min(PREDICTOR_LAYERS, shallowest) + 1))
    rows: dict[int, list[NDArray[np.uint16]]] = {layer: [] for layer in layers}
    for text in map(corpus.__getitem__, numbers):
        for layer, found in rows.items():
            found.append(text.hidden[layer][text.answer_rows].copy())  # a view would keep its file open
    states = [torch.from_numpy(np.concatenate(found).view(np.int16)) for found in rows.values()]
    classes = torch.from_numpy(np.concatenate([required_exits(text) for text in agrees]))
    exits = agrees[0].shape[1]

    def loss_of(values: Tensors, rows: list[int]) -> Tensor:
        chosen = torch.tensor(rows)
        read = [s[chosen].view(torch.bfloat16).float()[None] for s in states]
        return F.cross_entropy(predictor_logits(spec, values, read)[0], classes[chosen])

    course = Course(max(1, _EPOCHS * len(classes) // _ROWS))
    first = _first_values(spec, layers, exits, seed)
    values, _ = train("predictor", first, adamw, _row_batches(len(classes), seed), loss_of, course, state, progress)
    predictor = ExitPredictor(layers, {name: value.numpy() for name, value in values.items()})
    return predictor, int(classes.bincount(minlength=exits + 1).argmax())


def _first_values(spec: ModelSpec, layers: Sequence[int], exits: int, seed: int) -> dict[str, Tensor]:
    """Small random numbers, as PyTorch's own linear layers begin."""
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for name, shape in predictor_shapes(spec, layers, exits).items():
        bound = (len(layers) * spec.hidden_size if name.startswith("hidden.") else PREDICTOR_UNITS) ** -0.5
        values[name] = (torch.rand(shape, generator=generator) * 2 - 1) * bound
    return values


def _row_batches(rows: int, seed: int) -> Iterator[list[int]]:
    """Random rows for each step, for ever; a pass takes every row once, but for what is left of a batch."""
    generator = torch.Generator().manual_seed(seed)
    size = min(_ROWS, rows)
    while True:
        order = torch.randperm(rows, generator=generator)
        for start in range(0, rows - size + 1, size):
            yield order[start : start + size].tolist()


@dataclass(frozen=True)
class PredictorScores:
    """How well required exits are predicted. Shares of N tokens; depths are layers, full depth the model's own.

    Attributes:
        tokens: N.
        exact: Named the required exit.
        within_two_layers: The depth named is at most 2 layers off.
        within_one_exit: The class named is at most one off.
        trivial_class: The most common class of the training rows, which the trivial predictor always says.
        trivial_exact: Share of that.
        trivial_within_two_layers: Share of that.
        trivial_within_one_exit: Share of that.
        too_shallow: Named an exit shallower than required: a wrong token if the exit's head is believed.
        confusion: [E+1][E+1] tokens, required by named.
        calibration_error: Expected calibration error of the named class's probability, in ten bins of equal width.
        reliability: For each bin: mean probability, share that was right, tokens.
    """

    tokens: int
    exact: float
    within_two_layers: float
    within_one_exit: float
    trivial_class: int
    trivial_exact: float
    trivial_within_two_layers: float
    trivial_within_one_exit: float
    too_shallow: float
    confusion: list[list[int]]
    calibration_error: float
    reliability: list[tuple[float, float, int]]


def predictor_scores(
    logits: NDArray[np.floating], required: Classes, depths: Sequence[int], trivial: int
) -> PredictorScores:
    """Compare logits [N, E+1] with the required classes [N].

    Args:
        logits: Of the predictor.
        required: See ``required_exits``.
        depths: [E+1] depth of each class, the last the model's own.
        trivial: What the trivial predictor always says.
    """
    places = np.asarray(depths)
    scaled = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities = scaled / scaled.sum(axis=1, keepdims=True)
    named, sure = logits.argmax(axis=1), probabilities.max(axis=1)
    right = named == required
    bins = np.minimum((sure * _BINS).astype(int), _BINS - 1)
    reliability = [
        (float(sure[bins == b].mean()), float(right[bins == b].mean()), int((bins == b).sum()))
        for b in range(_BINS)
        if (bins == b).any()
    ]
    confusion = np.zeros((len(places), len(places)), np.int64)
    np.add.at(confusion, (required, named), 1)

    def near(said: NDArray[np.integer] | int) -> tuple[float, float, float]:
        layers = np.abs(places[said] - places[required])
        steps = np.abs(said - required)
        return float((steps == 0).mean()), float((layers <= 2).mean()), float((steps <= 1).mean())

    return PredictorScores(
        len(required),
        *near(named),
        trivial,
        *near(trivial),
        too_shallow=float((named < required).mean()),
        confusion=confusion.tolist(),
        calibration_error=sum(abs(p - r) * n for p, r, n in reliability) / len(required),
        reliability=reliability,
    )
