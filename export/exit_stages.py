"""Exit heads and the exit predictor as graphs, from the pieces that blocks are made of, and their reference."""

import dataclasses
import io
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from onnx import TensorProto
from torch import Tensor

from eexport.export.dialect import Dialect, Matrix
from eexport.export.graph import Graph, WeightFile
from eexport.export.stages import LayerGraph
from eexport.models.decoder import LayerKV, rope_tables
from eexport.models.exit_decoder import exit_hidden, exit_logits, predictor_logits
from eexport.models.exits import Calibration, Floats
from eexport.models.spec import ModelSpec
from eexport.runtime.manifest import ExitsInfo, StageSpec
from eexport.runtime.verify import Reference, Top


def write_exits(
    folder: Path,
    spec: ModelSpec,
    dialect: Dialect,
    exits: ExitsInfo,
    calibration: Calibration,
    draft_rows: Tensor,
    reference: Reference,
    step: Callable[[str], None],
) -> Reference:
    """Write every exit stage, and what the heads share.

    Args:
        folder: The bundle.
        spec: The model.
        dialect: How graphs are written.
        exits: The stages.
        calibration: Their numbers.
        draft_rows: [Vd, D] rows of the LM head for the draft vocabulary.
        reference: With the hidden states that the stages read.
        step: Called with the name of each stage that is done.

    Returns:
        The reference with what the stages should compute.
    """
    ids = io.BytesIO()
    np.save(ids, calibration.draft_ids)  # straight to a file it does not notice a full disk
    (folder / exits.draft_ids).write_bytes(ids.getbuffer())
    file = WeightFile(folder / "draft.bin")
    draft = dialect.store_table(file, "draft", draft_rows)
    file.close()
    tops, hidden = dict(reference.tops), {}
    cos, sin = rope_tables(spec.rope, torch.arange(len(reference.token_ids))[None])
    for head, stage in zip(calibration.heads, exits.heads, strict=True):
        tensors = _torch(head.tensors)
        _head_graph(spec, stage, dialect, tensors, draft, folder)
        result = exit_hidden(spec, tensors, _sources(reference, stage), cos, sin, LayerKV())
        hidden[stage.name] = result[0].numpy()
        tops[stage.name] = Top.of(exit_logits(spec, tensors, result, draft_rows)[0].numpy())
        step(stage.name)
    if calibration.predictor is not None and exits.predictor is not None:
        stage, tensors = exits.predictor, _torch(calibration.predictor.tensors)
        _predictor_graph(spec, stage, dialect, tensors, folder)
        tops[stage.name] = Top.of(predictor_logits(spec, tensors, _sources(reference, stage))[0].numpy())
        step(stage.name)
    return dataclasses.replace(reference, tops=tops, exit_hidden=hidden)


def _head_graph(
    spec: ModelSpec, stage: StageSpec, dialect: Dialect, tensors: Mapping[str, Tensor], draft: Matrix, folder: Path
) -> None:
    """Norm and fuse what it reads if that is more than one thing, then one layer and the head."""
    layers = LayerGraph(spec, stage, dialect, folder)
    if len(stage.sources) > 1:
        normed = []
        for index, source in enumerate(stage.sources):
            name = f"/fuse_norm.{index}"
            scale = dialect.store_vector(layers.file, f"{name}.weight", tensors[f"fuse_norm.{index}.weight"])
            normed.append(dialect.norm(layers.graph, name, source.name, scale, spec.rms_norm_eps))
        joined = layers.graph.one("Concat", normed, "/features", axis=-1)
        layers.stream = layers.linear("/fuse", joined, tensors, "fuse")
    layers.add_layer(stage.name, tensors)
    layers.close_head(tensors["norm.weight"], draft)


def _predictor_graph(
    spec: ModelSpec, stage: StageSpec, dialect: Dialect, tensors: Mapping[str, Tensor], folder: Path
) -> None:
    """Hidden states divided by their RMS, two layers; small enough not to be quantised."""
    graph, file = Graph(stage), WeightFile(folder / f"{stage.name}.bin")
    one = dialect.store_vector(file, "/one", torch.ones(spec.hidden_size))

    def layer(name: str, source: str) -> str:
        matrix = dialect.store_small(file, f"/{name}.weight", tensors[f"{name}.weight"])
        bias = dialect.store_vector(file, f"/{name}.bias", tensors[f"{name}.bias"])
        return dialect.linear(graph, f"/{name}", source, matrix, bias)

    states = [dialect.norm(graph, f"/norm/{s.name}", s.name, one, spec.rms_norm_eps) for s in stage.sources]
    units = layer("hidden", graph.one("Concat", states, "/states", axis=-1))
    result = layer("output", dialect.silu(graph, "/hidden/silu", units))
    graph.one("Cast", [result], "logits", to=TensorProto.FLOAT)
    file.close()
    graph.save(folder)


def _torch(tensors: Mapping[str, Floats]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(values) for name, values in tensors.items()}


def _sources(reference: Reference, stage: StageSpec) -> list[Tensor]:
    """What ``stage`` reads, [1, T, D] each."""
    return [torch.from_numpy(values)[None] for values in reference.sources(stage)]
