"""Parity: does what runs here compute what the reference computed when the bundle was built?

A bundle carries the reference's hidden states at every block boundary for a short text. The exporter compares each
stage with them as it is built, and ``eexport verify`` does the same on the target, where there is no checkpoint.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from eexport.runtime.backend import Array, Backend, Buffer
from eexport.runtime.chain import Chain
from eexport.runtime.errors import BundleError
from eexport.runtime.manifest import Manifest, ModelInfo, RowsInfo, StageSpec
from eexport.runtime.positions import positions_for

REFERENCE_NAME = "reference.npz"
TOP = 64
"""Logits kept per row of the reference."""


@dataclasses.dataclass(frozen=True)
class Reference:
    """What the torch reference computed for one text.

    Attributes:
        token_ids: [T].
        hidden: [1 + blocks, T, D] fp32: after the embedding and after each block.
        top_ids: [T, K] the likeliest tokens, best first.
        top_logits: [T, K] their logits.
    """

    token_ids: Array
    hidden: Array
    top_ids: NDArray[np.int64]
    top_logits: Array

    def save(self, folder: Path) -> None:
        """Write it into a bundle."""
        np.savez(folder / REFERENCE_NAME, **dataclasses.asdict(self))

    @classmethod
    def load(cls, folder: Path) -> "Reference":
        """Read it from a bundle. Raises BundleError."""
        try:
            with np.load(folder / REFERENCE_NAME) as arrays:
                return cls(**{field.name: arrays[field.name] for field in dataclasses.fields(cls)})
        except (OSError, EOFError, KeyError, ValueError, BadZipFile) as error:
            raise BundleError(f"{folder / REFERENCE_NAME}: cannot be read ({error}): build the bundle again") from None


@dataclasses.dataclass(frozen=True)
class Parity:
    """How close a stage comes to the reference, over rows: cosine, and differences.

    Attributes:
        stage: Its name.
        cosine: Mean over rows. Quantisation can turn a single row far, one with very large activations above all.
        worst_cosine: The worst row's.
        max_difference: The largest absolute difference of an element.
        relative: Norm of the difference over norm of the reference.
        argmax_agreement: Share of rows with the reference's likeliest token; only where there are logits.
    """

    stage: str
    cosine: float
    worst_cosine: float
    max_difference: float
    relative: float
    argmax_agreement: float | None = None


class StageRunner:
    """Runs single stages over T rows from an empty cache."""

    def __init__(self, backend: Backend, folder: Path, model: ModelInfo, rows: RowsInfo) -> None:
        self._backend, self._folder, self._model, self._rows = backend, folder, model, rows

    def run(self, stage: StageSpec, source: Array) -> Array:
        """Output [T, D] or [T, V] of ``stage`` for token ids [T] or hidden states [T, D]."""
        rows = len(source)
        sizes = {"B": 1, "T": rows, "C": -(-(rows + self._rows.spare) // 64) * 64}
        buffers: dict[str, Buffer] = {}
        for spec in (stage.inputs[0], stage.outputs[0], *stage.kv_inputs):
            buffer = buffers[spec.name] = self._backend.allocate(spec.sized(**sizes), spec.dtype)
            if spec.name.startswith("past."):
                buffers[spec.name.replace("past.", "present.", 1)] = buffer
        if stage.kind == "block":
            positions, fill = positions_for(stage, self._model, self._rows, self._backend).bind(rows, sizes["C"])
            buffers.update(positions)
            fill(0)
        result = buffers[stage.outputs[0].name]
        buffers[stage.inputs[0].name].array[0] = source
        self._backend.load(self._folder / stage.graph, stage).bind(buffers)()
        values: Array = result.array[0]
        return values


def compare(stage: str, found: Array, expected: Array) -> Parity:
    """Parity of rows [T, …] of the same shape."""
    a, b = found.astype(np.float64), expected.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
        cosines = (a * b).sum(-1) / np.where(norms > 0, norms, 1.0)
        difference = np.abs(a - b).max()
        relative = np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-30)
    return Parity(stage, float(cosines.mean()), float(cosines.min()), float(difference), float(relative))


def compare_logits(stage: str, logits: Array, reference: Reference) -> Parity:
    """Parity of logits [T, V], over the reference's likeliest tokens of each row."""
    picked = np.take_along_axis(logits, reference.top_ids, axis=-1)  # [T, K]
    agreement = float((logits.argmax(-1) == reference.top_ids[:, 0]).mean())
    return dataclasses.replace(compare(stage, picked, reference.top_logits), argmax_agreement=agreement)


def failure(parity: Parity, least_cosine: float) -> str | None:
    """Why ``parity`` is not good enough, or None. NaN fails."""
    if not np.isfinite([parity.cosine, parity.max_difference, parity.relative]).all():
        return f"{parity.stage} gives NaN or infinity"
    if parity.cosine < least_cosine:
        return f"{parity.stage} has a mean cosine of {parity.cosine:.5f} to the reference, {least_cosine} is needed"
    return None


def verify_bundle(folder: Path, manifest: Manifest, backend: Backend) -> list[Parity]:
    """Parity of every stage alone, and of the whole chain (stage ``chain``), on this machine."""
    reference = Reference.load(folder)
    runner = StageRunner(backend, folder, manifest.model, manifest.rows)
    embed, *blocks, head = manifest.stages
    results = [compare(embed.name, runner.run(embed, reference.token_ids), reference.hidden[0])]
    for index, block in enumerate(blocks):
        results.append(compare(block.name, runner.run(block, reference.hidden[index]), reference.hidden[index + 1]))
    results.append(compare_logits(head.name, runner.run(head, reference.hidden[-1]), reference))
    chain = Chain(folder, manifest, backend, len(reference.token_ids))
    ids = reference.token_ids.tolist()
    results.append(compare_logits("chain", chain.forward(ids, len(ids)), reference))
    return results


def rows_that_differ(chain: Chain, ids: Sequence[int], counts: Sequence[int]) -> dict[int, float]:
    """Row counts M whose logits are not bit for bit those of one row at a time, with the largest difference.

    An empty result is what the ``exact`` mode rests on: a row's bits do not depend on the rows beside it.
    """
    chain.reset()
    alone = np.concatenate([np.array(chain.forward([token], 1)) for token in ids])
    differing = {}
    for count in counts:
        chain.reset()
        parts = [list(ids[i : i + count]) for i in range(0, len(ids), count)]
        together = np.concatenate([np.array(chain.forward(part, len(part))) for part in parts])
        if not np.array_equal(alone, together):
            differing[count] = float(np.abs(alone - together).max())
    chain.reset()
    return differing
