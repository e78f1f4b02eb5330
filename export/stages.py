"""The decoder as graphs: what every dialect shares. How a matrix, a norm or attention is written is the dialect's."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from eexport.export.dialect import Dialect, Matrix
from eexport.export.graph import Graph, Stored, WeightFile
from eexport.models.spec import ModelSpec
from eexport.runtime.manifest import StageSpec


class BlockGraph:
    """A block being written layer by layer, so that one layer's weights are in memory at a time."""

    def __init__(self, spec: ModelSpec, stage: StageSpec, dialect: Dialect, folder: Path) -> None:
        self._spec, self._dialect, self._folder = spec, dialect, folder
        self._graph = Graph(stage)
        self._file = WeightFile(folder / f"{stage.name}.bin")
        self._residual, self._delta = "hidden", ""  # the stream so far, and what is still to be added to it
        self._exposed = set(stage.hidden_layers)

    def add_layer(self, layer: int, tensors: Mapping[str, Tensor]) -> None:
        """Append layer ``layer``; ``tensors`` are its weights by their names within the layer."""
        path = f"/layers.{layer}"
        normed = self._add_norm(f"{path}/input_norm", tensors["input_layernorm.weight"], layer)
        mixed = self._attention(path, layer, normed, tensors)
        self._delta = self._linear(f"{path}/attn/o_proj", mixed, tensors, "self_attn.o_proj")
        normed = self._add_norm(f"{path}/post_norm", tensors["post_attention_layernorm.weight"], None)
        both = self._linear(f"{path}/mlp/gate_up_proj", normed, tensors, "mlp.gate_proj", "mlp.up_proj")
        gated = self._dialect.swiglu(self._graph, f"{path}/mlp", both, self._spec.intermediate_size)
        self._delta = self._linear(f"{path}/mlp/down_proj", gated, tensors, "mlp.down_proj")

    def save(self) -> None:
        """Close the residual stream into ``hidden_out`` and write graph and weights."""
        self._graph.one("Add", [self._residual, self._delta], "hidden_out")
        self._file.close()
        self._graph.save(self._folder)

    def _add_norm(self, name: str, weight: Tensor, layer: int | None) -> str:
        """Add the pending delta to the residual stream and normalise; ``layer`` names the depth reached, if any."""
        scale = self._dialect.store_vector(self._file, f"{name}.weight", weight)
        if not self._delta:
            return self._dialect.first_norm(self._graph, name, self._residual, scale, self._spec.rms_norm_eps)
        exposed = f"hidden.{layer}" if layer in self._exposed else None
        self._residual, normed = self._dialect.add_norm(
            self._graph, name, self._residual, self._delta, scale, self._spec.rms_norm_eps, exposed
        )
        return normed

    def _attention(self, path: str, layer: int, normed: str, tensors: Mapping[str, Tensor]) -> str:
        name = f"{path}/attn"
        parts = [f"self_attn.{kind}_proj" for kind in "qkv"]
        qkv = self._linear(f"{name}/qkv_proj", normed, tensors, *parts)
        norms = None
        if self._spec.qk_norm:
            query, key = (
                self._dialect.store_vector(
                    self._file, f"{name}/{kind}_norm.weight", tensors[f"self_attn.{kind}_norm.weight"]
                )
                for kind in "qk"
            )
            norms = (query, key)
        return self._dialect.attention(self._graph, self._spec, name, layer, qkv, norms)

    def _linear(self, name: str, source: str, tensors: Mapping[str, Tensor], *parts: str) -> str:
        """One matrix product for the projections ``parts``, whose rows are stacked."""
        weight = torch.cat([tensors[f"{part}.weight"] for part in parts])
        bias = None
        if any(f"{part}.bias" in tensors for part in parts):
            rows = [tensors[f"{part}.weight"].shape[0] for part in parts]
            bias = torch.cat([tensors.get(f"{p}.bias", torch.zeros(n)) for p, n in zip(parts, rows, strict=True)])
        matrix = self._dialect.store_matrix(self._file, f"{name}.weight", weight)
        return self._dialect.linear(
            self._graph,
            name,
            source,
            matrix,
            None if bias is None else self._dialect.store_vector(self._file, f"{name}.bias", bias),
        )


def embed_graph(stage: StageSpec, dialect: Dialect, table: Matrix, folder: Path) -> None:
    """Write the embedding stage from its stored table."""
    graph = Graph(stage)
    dialect.embed(graph, table)
    graph.save(folder)


def head_graph(spec: ModelSpec, stage: StageSpec, dialect: Dialect, table: Matrix, norm: Stored, folder: Path) -> None:
    """Write the final norm and LM head; ``table`` may be the embedding's own."""
    graph = Graph(stage)
    normed = dialect.norm(graph, "/norm", "hidden", norm, spec.rms_norm_eps)
    dialect.head(graph, normed, table)
    graph.save(folder)
