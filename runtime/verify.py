"""Parity: does what runs here compute what the reference computed when the bundle was built?

A bundle carries the reference's hidden states at every block boundary for a short text, and what head and exits make
of them. The exporter compares each stage with them as it is built, and ``eexport verify`` does the same on the target,
where there is no checkpoint.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
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
"""How many logits of a row a reference keeps."""


@dataclasses.dataclass(frozen=True)
class Top:
    """The likeliest of each row of logits.

    Attributes:
        ids: [T, K] best first.
        logits: [T, K] theirs.
    """

    ids: NDArray[np.int64]
    logits: Array

    @classmethod
    def of(cls, logits: Array) -> "Top":
        """The ``TOP`` likeliest of logits [T, V], fewer where V is less."""
        count = min(TOP, logits.shape[-1])
        ids = np.argpartition(logits, -count, axis=-1)[:, -count:]
        order = np.argsort(np.take_along_axis(logits, ids, axis=-1), axis=-1)[:, ::-1]
        ids = np.take_along_axis(ids, order, axis=-1)
        return cls(ids, np.take_along_axis(logits, ids, axis=-1))


@dataclasses.dataclass(frozen=True)
class Reference:
    """What the torch reference computed for one text.

    Attributes:
        token_ids: [T].
        depths: [P] layers before each of ``hidden``, rising: 0, the end of each block, and what exits read besides.
        hidden: [P, T, D] fp32.
        tops: By the name of the stage with these logits.
        exit_hidden: [T, D] fp32 that an exit head gives out, by its name.
    """

    token_ids: Array
    depths: NDArray[np.int64]
    hidden: Array
    tops: Mapping[str, Top]
    exit_hidden: Mapping[str, Array]

    def at(self, depth: int) -> Array:
        """Hidden states [T, D] after ``depth`` layers."""
        hidden: Array = self.hidden[int(np.searchsorted(self.depths, depth))]
        return hidden

    def sources(self, stage: StageSpec) -> list[Array]:
        """What ``stage`` takes from other stages, [T] or [T, D] each."""
        return [self._source(spec.name, stage.layers[0]) for spec in stage.sources]

    def _source(self, name: str, depth: int) -> Array:
        if name == "token_ids":
            return self.token_ids
        if name == "previous":
            last = self.hidden[-1]
            return np.concatenate([np.zeros_like(last[:1]), last[:-1]])
        if name.startswith("hidden."):
            return self.at(int(name.removeprefix("hidden.")))
        return self.at(0 if name == "embedding" else depth)

    def save(self, folder: Path) -> None:
        """Write it into a bundle."""
        arrays = {"token_ids": self.token_ids, "depths": self.depths, "hidden": self.hidden}
        for stage, top in self.tops.items():
            arrays |= {f"{stage}.ids": top.ids, f"{stage}.logits": top.logits}
        arrays |= {f"{stage}.hidden_out": hidden for stage, hidden in self.exit_hidden.items()}
        np.savez(folder / REFERENCE_NAME, **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, folder: Path) -> "Reference":
        """Read it from a bundle. Raises BundleError."""
        try:
            with np.load(folder / REFERENCE_NAME) as file:
                arrays = dict(file)
            return cls(
                arrays.pop("token_ids"),
                arrays.pop("depths"),
                arrays.pop("hidden"),
                {name: Top(ids, arrays[f"{name}.logits"]) for name, ids in _ending_in(".ids", arrays)},
                dict(_ending_in(".hidden_out", arrays)),
            )
        except (OSError, EOFError, KeyError, ValueError, BadZipFile) as error:
            raise BundleError(f"{folder / REFERENCE_NAME}: cannot be read ({error}): build the bundle again") from None


def _ending_in(end: str, arrays: Mapping[str, Array]) -> list[tuple[str, Any]]:
    return [(name.removesuffix(end), array) for name, array in arrays.items() if name.endswith(end)]


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

    def run(self, stage: StageSpec, *sources: Array) -> list[Array]:
        """Outputs of ``stage`` but for its caches, [T, D] or [T, V] each.

        ``sources`` are token ids [T] or hidden states [T, D], in the order of ``stage.sources``.
        """
        rows = len(sources[0])
        sizes = {"B": 1, "T": rows, "C": -(-(rows + self._rows.spare) // 64) * 64}
        results = [spec for spec in stage.outputs if not spec.name.startswith("present.")]
        buffers: dict[str, Buffer] = {}
        for spec in (*stage.sources, *results, *stage.kv_inputs):
            buffer = buffers[spec.name] = self._backend.allocate(spec.sized(**sizes), spec.dtype)
            if spec.name.startswith("past."):
                buffers[spec.name.replace("past.", "present.", 1)] = buffer
        if stage.kv_inputs:
            positions, fill = positions_for(stage, self._model, self._rows, self._backend).bind(rows, sizes["C"])
            buffers.update(positions)
            fill(0)
        for spec, source in zip(stage.sources, sources, strict=True):
            buffers[spec.name].array[0] = source
        self._backend.load(self._folder / stage.graph, stage).bind(buffers)()
        return [buffers[spec.name].array[0] for spec in results]


def compare(stage: str, found: Array, expected: Array) -> Parity:
    """Parity of rows [T, …] of the same shape."""
    a, b = found.astype(np.float64), expected.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
        cosines = (a * b).sum(-1) / np.where(norms > 0, norms, 1.0)
        difference = np.abs(a - b).max()
        relative = np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-30)
    return Parity(stage, float(cosines.mean()), float(cosines.min()), float(difference), float(relative))


def compare_logits(stage: str, logits: Array, top: Top) -> Parity:
    """Parity of logits [T, V], over the reference's likeliest tokens of each row."""
    picked = np.take_along_axis(logits, top.ids, axis=-1)  # [T, K]
    agreement = float((logits.argmax(-1) == top.ids[:, 0]).mean())
    return dataclasses.replace(compare(stage, picked, top.logits), argmax_agreement=agreement)


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
    results = [parity for stage in manifest.all_stages for parity in stage_parity(runner, stage, reference)]
    chain = Chain(folder, manifest, backend, len(reference.token_ids))
    ids = reference.token_ids.tolist()
    results.append(compare_logits("chain", chain.forward(ids, len(ids)), reference.tops[manifest.stages[-1].name]))
    return results


def stage_parity(runner: StageRunner, stage: StageSpec, reference: Reference) -> list[Parity]:
    """Parity of ``stage`` fed with the reference's hidden states; an exit head's own hidden states have a row too."""
    outputs = runner.run(stage, *reference.sources(stage))
    if stage.kind in ("embed", "block"):
        return [compare(stage.name, outputs[0], reference.at(stage.layers[1]))]
    parities = [compare_logits(stage.name, outputs[-1], reference.tops[stage.name])]
    if stage.kind == "exit":
        parities.append(compare(f"{stage.name}.hidden", outputs[0], reference.exit_hidden[stage.name]))
    return parities


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
