"""The decoder as graphs: what every dialect shares. How a matrix, a norm or attention is written is the dialect's."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from eexport.export.dialect import Dialect, Matrix
from eexport.export.graph import Graph, Stored, WeightFile
from eexport.models.spec import ModelSpec
from eexport.runtime.manifest import StageSpec


class LayerGraph:
    """Decoder layers being written into a stage one by one, so that one layer's weights are in memory at a time.

    Attributes:
        graph: The stage's.
        file: Its weights.
        stream: The residual stream so far, but for what the last layer is still to add to it.
    """

    def __init__(self, spec: ModelSpec, stage: StageSpec, dialect: Dialect, folder: Path) -> None:
        self._spec, self._dialect, self._folder = spec, dialect, folder
        self.graph = Graph(stage)
        self.file = WeightFile(folder / f"{stage.name}.bin")
        self.stream, self._delta = stage.inputs[0].name, ""

    def add_layer(self, cache: str, tensors: Mapping[str, Tensor], exposed: str | None = None) -> None:
        """Append a layer.

        Args:
            cache: What its keys and values are called by: its number, or the name of an exit head.
            tensors: Its weights by their names within the layer.
            exposed: Output that the stream before this layer becomes.
        """
        path = f"/layers.{cache}"
        normed = self.norm(f"{path}/input_norm", tensors["input_layernorm.weight"], exposed)
        mixed = self._attention(path, cache, normed, tensors)
        self._delta = self.linear(f"{path}/attn/o_proj", mixed, tensors, "self_attn.o_proj")
        normed = self.norm(f"{path}/post_norm", tensors["post_attention_layernorm.weight"])
        both = self.linear(f"{path}/mlp/gate_up_proj", normed, tensors, "mlp.gate_proj", "mlp.up_proj")
        self._delta = self.linear(f"{path}/mlp/down_proj", self._swiglu(f"{path}/mlp", both), tensors, "mlp.down_proj")

    def norm(self, name: str, weight: Tensor, exposed: str | None = None) -> str:
        """The stream so far, normed; ``exposed`` names the output that it becomes, if any."""
        scale = self._dialect.store_vector(self.file, f"{name}.weight", weight)
        if not self._delta:
            return self._dialect.first_norm(self.graph, name, self.stream, scale, self._spec.rms_norm_eps)
        self.stream, normed = self._dialect.add_norm(
            self.graph, name, self.stream, self._delta, scale, self._spec.rms_norm_eps, exposed
        )
        return normed

    def linear(self, name: str, source: str, tensors: Mapping[str, Tensor], *parts: str) -> str:
        """One matrix product for the projections ``parts``, whose rows are stacked."""
        weight = torch.cat([tensors[f"{part}.weight"] for part in parts])
        bias = None
        if any(f"{part}.bias" in tensors for part in parts):
            rows = [tensors[f"{part}.weight"].shape[0] for part in parts]
            bias = torch.cat([tensors.get(f"{p}.bias", torch.zeros(n)) for p, n in zip(parts, rows, strict=True)])
        matrix = self._dialect.store_matrix(self.file, f"{name}.weight", weight)
        return self._dialect.linear(
            self.graph,
            name,
            source,
            matrix,
            None if bias is None else self._dialect.store_vector(self.file, f"{name}.bias", bias),
        )

    def close_block(self) -> None:
        """Close the residual stream into ``hidden_out`` and write graph and weights."""
        self.graph.one("Add", [self.stream, self._delta], "hidden_out")
        self._save()

    def close_head(self, norm: Tensor, table: Matrix) -> None:
        """Close it into ``hidden_out`` and into ``logits`` by a norm's scale and a stored head, and write all."""
        normed = self.norm("/norm", norm, "hidden_out")
        self._dialect.head(self.graph, normed, table)
        self._save()

    def _save(self) -> None:
        self.file.close()
        self.graph.save(self._folder)

    def _attention(self, path: str, cache: str, normed: str, tensors: Mapping[str, Tensor]) -> str:
        name = f"{path}/attn"
        parts = [f"self_attn.{kind}_proj" for kind in "qkv"]
        qkv = self.linear(f"{name}/qkv_proj", normed, tensors, *parts)
        norms = None
        if self._spec.qk_norm:
            query, key = (
                self._dialect.store_vector(
                    self.file, f"{name}/{kind}_norm.weight", tensors[f"self_attn.{kind}_norm.weight"]
                )
                for kind in "qk"
            )
            norms = (query, key)
        return self._dialect.attention(self.graph, self._spec, name, cache, qkv, norms)

    def _swiglu(self, name: str, both: str) -> str:
        """silu(gate) * up, from both halves in one tensor [B, T, 2·intermediate]."""
        inner = self._spec.intermediate_size
        sizes = self.graph.ints("split.gate_up", [inner, inner])
        gate, up = self.graph.op("Split", [both, sizes], f"{name}/split", [f"{name}/gate", f"{name}/up"], axis=-1)
        return self.graph.one("Mul", [self._dialect.silu(self.graph, f"{name}/silu", gate), up], f"{name}/gated")


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
