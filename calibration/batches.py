"""Texts of a corpus as padded torch tensors, and the features that heads read from them.

Legend: B texts, T rows of the longest, D hidden width, K likeliest tokens kept.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from eexport.calibration.corpus import Corpus, Text


@dataclass(frozen=True)
class Batch:
    """B texts, padded at their ends.

    Attributes:
        texts: They.
        tokens: [B, T].
        top_ids: [B, T, K].
        top_logprobs: [B, T, K].
        counted: [B, T] rows that count: no padding, and not the template's beginning.
    """

    texts: list[Text]
    tokens: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    counted: Tensor

    def hidden(self, depth: int) -> Tensor:
        """Hidden states [B, T, D] after ``depth`` layers, fp32."""
        padded = _padded([text.hidden[depth].view(np.int16) for text in self.texts])
        return padded.view(torch.bfloat16).float()


def make_batch(corpus: Corpus, numbers: Sequence[int]) -> Batch:
    """The texts of these numbers."""
    texts = [corpus[number] for number in numbers]
    longest = max(text.info.length for text in texts)
    rows = torch.arange(longest)
    first = torch.tensor([text.info.first for text in texts])[:, None]
    length = torch.tensor([text.info.length for text in texts])[:, None]
    return Batch(
        texts,
        _padded([text.tokens for text in texts]).long(),
        _padded([text.top_ids for text in texts]).long(),
        _padded([text.top_logprobs for text in texts]).float(),
        (rows >= first) & (rows < length),
    )


def head_features(batch: Batch, features: Sequence[str], depth: int, last: int, embedding: Tensor) -> list[Tensor]:
    """What a head reads, [B, T, D] each, in its order; see ``models.exits``.

    Args:
        batch: The texts.
        features: Their names.
        depth: Of the head.
        last: The model's number of layers.
        embedding: [V, D].
    """

    def one(name: str) -> Tensor:
        if name == "embedding":
            return F.embedding(batch.tokens, embedding)
        if name == "previous":
            return shifted(batch.hidden(last))
        return batch.hidden(depth if name == "hidden" else int(name.removeprefix("hidden.")))

    return [one(name) for name in features]


def shifted(hidden: Tensor) -> Tensor:
    """[B, T, D] of the position before; zeros at position 0."""
    return F.pad(hidden, (0, 0, 1, 0))[:, :-1]


def in_turn(corpus: Corpus, numbers: Sequence[int], size: int, seed: int) -> Iterator[list[int]]:
    """Batches of ``size`` texts of about one length, for ever: each pass takes every text once, in another order."""
    ordered = sorted(numbers, key=lambda number: (corpus.infos[number].length, number))
    groups = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    choice = random.Random(seed)
    while True:
        yield from choice.sample(groups, len(groups))


def _padded(arrays: Sequence[NDArray[np.generic]]) -> Tensor:
    longest = max(len(array) for array in arrays)
    result = np.zeros((len(arrays), longest, *arrays[0].shape[1:]), arrays[0].dtype)
    for row, array in zip(result, arrays, strict=True):
        row[: len(array)] = array
    return torch.from_numpy(result)
