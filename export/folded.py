"""Attention from standard operators, with the query heads of a group folded into rows.

[B, KvH, G·T, Hd]: keys are read once per group, and a single row of queries never runs alone, which would take another
matrix kernel and give other bits than the same row among others.
"""

from eexport.export.graph import Graph, Stored
from eexport.models.spec import ModelSpec
from eexport.runtime.manifest import TensorSpec


def masked_inputs(spec: ModelSpec, dtype: str) -> tuple[TensorSpec, ...]:
    """Position inputs of a block: the rows' angles, an additive mask, and where slot b writes its rows."""
    angle = ("B", "T", spec.head_dim // 2)
    return (
        TensorSpec("cos", dtype, angle),
        TensorSpec("sin", dtype, angle),
        TensorSpec("mask", dtype, ("B", 1, "T", "C")),
        TensorSpec("write_index", "int64", ("B",)),
    )


def folded_attention(
    graph: Graph, spec: ModelSpec, name: str, cache: str, qkv: str, norms: tuple[Stored, Stored] | None
) -> str:
    """From projections [B, T, (H+2·KvH)·Hd] to mixed values [B, T, H·Hd], updating ``past.{cache}.*`` in place."""
    heads, kv_heads, width = spec.num_heads, spec.num_kv_heads, spec.head_dim
    # [B, T, (H+2·KvH)·Hd] -> [B, H+2·KvH, T, Hd]
    shape = graph.ints("shape.heads", [0, 0, heads + 2 * kv_heads, width])
    split = graph.one("Reshape", [qkv, shape], f"{name}/heads")
    split = graph.one("Transpose", [split], f"{name}/bhtd", perm=[0, 2, 1, 3])
    query, key, value = _rotated(graph, spec, name, split, norms)
    caches = []
    for kind, update in (("key", key), ("value", value)):
        past, present = f"past.{cache}.{kind}", f"present.{cache}.{kind}"
        caches.append(graph.one("TensorScatter", [past, update, "write_index"], present, axis=2))
    # [B, H, T, Hd] -> [B, KvH, G·T, Hd]
    query = graph.one("Reshape", [query, graph.ints("shape.fold", [0, kv_heads, -1, width])], f"{name}/fold")
    mask = _folded_mask(graph, heads // kv_heads)
    mixed = graph.one("Attention", [query, *caches, mask], name, scale=width**-0.5)
    # [B, KvH, G·T, Hd] -> [B, H, T, Hd] -> [B, T, H·Hd]
    mixed = graph.one("Reshape", [mixed, graph.ints("shape.unfold", [0, heads, -1, width])], f"{name}/unfold")
    mixed = graph.one("Transpose", [mixed], f"{name}/bthd", perm=[0, 2, 1, 3])
    return graph.one("Reshape", [mixed, graph.ints("shape.flat", [0, 0, heads * width])], f"{name}/flat")


def _folded_mask(graph: Graph, groups: int) -> str:
    """The mask for folded rows [B, 1, G·T, C], made once a block."""
    if groups == 1:
        return "mask"
    return graph.once("/mask", lambda: graph.one("Concat", ["mask"] * groups, "/mask", axis=2))


def _rotated(
    graph: Graph, spec: ModelSpec, name: str, split: str, norms: tuple[Stored, Stored] | None
) -> tuple[str, str, str]:
    """Queries and keys with positions, and values, [B, heads, T, Hd] each, from all heads in one tensor."""
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    if norms is None:
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
    for kind, source, scale in (("q", query, norms[0]), ("k", key, norms[1])):
        inputs = [source, graph.weight(scale)]
        normed = graph.one("RMSNormalization", inputs, f"{name}/{kind}_norm", axis=-1, epsilon=spec.rms_norm_eps)
        rotated.append(graph.one("RotaryEmbedding", [normed, "cos", "sin"], f"{name}/{kind}_rope"))
    return rotated[0], rotated[1], value
