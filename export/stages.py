"""The decoder as graphs: what every dialect shares. How a matrix, a norm or attention is written is the dialect's.

A group's query heads are folded into rows, [B, KvH, G·T, Hd]: keys are read once per group, and one row of a matrix
product then never runs alone, which would take another kernel and give other bits (DESIGN: a row must not depend on
how many rows run with it).
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from eexport.export.dialect import Dialect
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
        groups = spec.num_heads // spec.num_kv_heads
        self._lone_rows = groups == 1  # without grouping a single row would run alone: see _attention
        self._mask = "mask" if groups == 1 else self._graph.one("Concat", ["mask"] * groups, "/mask", axis=2)
        if self._lone_rows:
            self._mask = self._double_last_row(self._mask, "/mask")

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
            return self._dialect.norm(self._graph, name, self._residual, scale, self._spec.rms_norm_eps)
        exposed = f"hidden.{layer}" if layer in self._exposed else None
        self._residual, normed = self._dialect.add_norm(
            self._graph, name, self._residual, self._delta, scale, self._spec.rms_norm_eps, exposed
        )
        return normed

    def _attention(self, path: str, layer: int, normed: str, tensors: Mapping[str, Tensor]) -> str:
        spec, graph = self._spec, self._graph
        heads, kv_heads, width = spec.num_heads, spec.num_kv_heads, spec.head_dim
        name = f"{path}/attn"
        qkv = self._linear(f"{name}/qkv_proj", normed, tensors, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        # [B, T, (H+2·KvH)·Hd] -> [B, H+2·KvH, T, Hd]
        shape = graph.ints("shape.heads", [0, 0, heads + 2 * kv_heads, width])
        split = graph.one("Transpose", [graph.one("Reshape", [qkv, shape], f"{name}/heads")], f"{name}/bhtd", perm=[0, 2, 1, 3])
        query, key, value = self._rotated(name, split, tensors)
        # [B, H, T, Hd] -> [B, KvH, G·T, Hd]
        query = graph.one("Reshape", [query, graph.ints("shape.fold", [0, kv_heads, -1, width])], f"{name}/fold")
        caches = []
        for kind, update in (("key", key), ("value", value)):
            past, present = f"past.{layer}.{kind}", f"present.{layer}.{kind}"
            caches.append(graph.one("TensorScatter", [past, update, "write_index"], present, axis=2))
        if self._lone_rows:
            query = self._double_last_row(query, f"{name}/query")
        mixed = self._dialect.attention(graph, name, query, caches[0], caches[1], self._mask, width**-0.5)
        if self._lone_rows:
            ends = [graph.ints("ints.first", [0]), graph.ints("ints.last", [-1]), graph.ints("ints.rows", [2])]
            mixed = graph.one("Slice", [mixed, *ends], f"{name}/undouble")
        # [B, KvH, G·T, Hd] -> [B, H, T, Hd] -> [B, T, H·Hd]
        mixed = graph.one("Reshape", [mixed, graph.ints("shape.unfold", [0, heads, -1, width])], f"{name}/unfold")
        mixed = graph.one("Transpose", [mixed], f"{name}/bthd", perm=[0, 2, 1, 3])
        return graph.one("Reshape", [mixed, graph.ints("shape.flat", [0, 0, heads * width])], f"{name}/flat")

    def _rotated(self, name: str, split: str, tensors: Mapping[str, Tensor]) -> tuple[str, str, str]:
        """Queries and keys with positions, and values, [B, heads, T, Hd] each, from all heads in one tensor."""
        heads, kv_heads = self._spec.num_heads, self._spec.num_kv_heads
        graph = self._graph
        if not self._spec.qk_norm:
            sizes = graph.ints("split.qk_v", [heads + kv_heads, kv_heads])
            both, value = graph.op("Split", [split, sizes], f"{name}/split_v", [f"{name}/qk", f"{name}/v"], axis=1)
            both = graph.one("RotaryEmbedding", [both, "cos", "sin"], f"{name}/rope")
            sizes = graph.ints("split.q_k", [heads, kv_heads])
            query, key = graph.op("Split", [both, sizes], f"{name}/split_qk", [f"{name}/q", f"{name}/k"], axis=1)
            return query, key, value
        sizes = graph.ints("split.q_k_v", [heads, kv_heads, kv_heads])
        parts = [f"{name}/{kind}" for kind in "qkv"]
        query, key, value = graph.op("Split", [split, sizes], f"{name}/split", parts, axis=1)
        rotated = []
        for kind, source in (("q", query), ("k", key)):
            weight = tensors[f"self_attn.{kind}_norm.weight"]
            scale = self._dialect.store_vector(self._file, f"{name}/{kind}_norm.weight", weight)
            normed = self._dialect.norm(graph, f"{name}/{kind}_norm", source, scale, self._spec.rms_norm_eps)
            rotated.append(graph.one("RotaryEmbedding", [normed, "cos", "sin"], f"{name}/{kind}_rope"))
        return rotated[0], rotated[1], value

    def _double_last_row(self, source: str, name: str) -> str:
        """[B, heads, T, width] -> [B, heads, T+1, width]: the last row twice, so that no row runs alone."""
        graph = self._graph
        ends = [graph.ints("ints.last", [-1]), graph.ints("ints.end", [2**62]), graph.ints("ints.rows", [2])]
        last = graph.one("Slice", [source, *ends], f"{name}/last_row")
        return graph.one("Concat", [source, last], f"{name}/doubled", axis=2)

    def _linear(self, name: str, source: str, tensors: Mapping[str, Tensor], *parts: str) -> str:
        """One matrix product for the projections ``parts``, whose rows are stacked."""
        weight = torch.cat([tensors[f"{part}.weight"] for part in parts])
        bias = None
        if any(f"{part}.bias" in tensors for part in parts):
            rows = [tensors[f"{part}.weight"].shape[0] for part in parts]
            bias = torch.cat([tensors.get(f"{p}.bias", torch.zeros(n)) for p, n in zip(parts, rows, strict=True)])
        matrix = self._dialect.store_matrix(self._file, f"{name}.weight", weight)
        return self._dialect.linear(
            self._graph, name, source, matrix, None if bias is None else self._dialect.store_vector(self._file, f"{name}.bias", bias)
        )


def embed_graph(stage: StageSpec, dialect: Dialect, table: tuple[Stored, ...], folder: Path) -> None:
    """Write the embedding stage from its stored table."""
    graph = Graph(stage)
    dialect.embed(graph, table, int(stage.outputs[0].shape[-1]))
    graph.save(folder)


def head_graph(
    spec: ModelSpec, stage: StageSpec, dialect: Dialect, table: tuple[Stored, ...], norm: Stored, folder: Path
) -> None:
    """Write the final norm and LM head; ``table`` may be the embedding's own."""
    graph = Graph(stage)
    normed = dialect.norm(graph, "/norm", "hidden", norm, spec.rms_norm_eps)
    dialect.head(graph, normed, table)
    graph.save(folder)
