"""Where the decoder is cut, and the exact inputs and outputs of every stage.

    stage   inputs                                                      outputs
    embed   token_ids [B,T] i64                                         hidden [B,T,D]
    block   hidden [B,T,D], the dialect's position inputs,              hidden_out [B,T,D], present.* [B,KvH,C,Hd],
            past.{layer}.{key,value} [B,KvH,C,Hd]                       hidden.{1..4} [B,T,D] (within the block)
    head    hidden [B,T,D]                                              logits [B,T,V] f32

Position inputs: ``standard`` takes cos, sin [B,T,Hd/2], mask [B,1,T,C] (added to the scores) and write_index [B] i64
(where slot b writes its T new keys); ``ort`` takes cos_table, sin_table [C,Hd/2], and last_index [B], new_rows [B],
total_length [1] (i32), from which GroupQueryAttention derives the same.

B slots and T rows are free in every graph, so one graph serves prefill, decode and verification. The StageSpec made
here is what the graph builder emits, the manifest records and the runtime binds.
"""

from eexport.models.spec import ModelSpec
from eexport.runtime.errors import EexportError
from eexport.runtime.manifest import StageSpec, TensorSpec

PREDICTOR_LAYERS = 4  # the exit predictor reads the hidden states of layers 1-4


class PlanError(EexportError):
    """The block boundaries asked for do not cut this model; one line."""


def plan_blocks(num_layers: int, blocks: str = "auto") -> tuple[tuple[int, int], ...]:
    """Half-open layer ranges of the blocks.

    Args:
        num_layers: Depth of the model.
        blocks: ``auto`` (about 4, ending at depth 4, a quarter and a half, the candidate exits), a number of equal
            blocks ("2"), or explicit boundaries: the depths at which a block ends ("4,8,16").

    Raises:
        PlanError: When the text is none of these or does not fit the depth.
    """
    if blocks == "auto":
        cuts = sorted({PREDICTOR_LAYERS, _to_four(num_layers / 4), _to_four(num_layers / 2)})
        cuts = [cut for cut in cuts if 0 < cut < num_layers]
    elif blocks.isdecimal():
        count = int(blocks)
        if not 1 <= count <= num_layers:
            raise PlanError(f"--blocks {blocks}: this model has {num_layers} layers, so 1 to {num_layers} blocks")
        cuts = [round(num_layers * part / count) for part in range(1, count)]
    else:
        try:
            cuts = [int(part) for part in blocks.split(",")]
        except ValueError:
            raise PlanError(
                f"--blocks {blocks}: give auto, a number of blocks, or the depths where blocks end, e.g. 4,8,16"
            ) from None
        if cuts[-1:] == [num_layers]:
            cuts.pop()
        if cuts != sorted(set(cuts)) or (cuts and not (cuts[0] > 0 and cuts[-1] < num_layers)):
            raise PlanError(f"--blocks {blocks}: depths must rise and lie between 1 and {num_layers - 1}")
    edges = [0, *cuts, num_layers]
    return tuple(zip(edges, edges[1:], strict=False))


def plan_stages(
    spec: ModelSpec, ranges: tuple[tuple[int, int], ...], activations: str, positions: tuple[TensorSpec, ...]
) -> tuple[StageSpec, ...]:
    """Every stage of the chain.

    Args:
        spec: The model.
        ranges: Layers of each block.
        activations: dtype between stages, "float32" or "float16".
        positions: The dialect's position inputs.
    """
    depth = spec.num_layers
    hidden = _hidden("hidden", spec, activations)
    embed = StageSpec(
        "embed", "embed", "embed.onnx", (0, 0), (TensorSpec("token_ids", "int64", ("B", "T")),), (hidden,)
    )
    blocks = tuple(_block(spec, index, layers, activations, positions) for index, layers in enumerate(ranges))
    logits = TensorSpec("logits", "float32", ("B", "T", spec.vocab_size))
    head = StageSpec("head", "head", "head.onnx", (depth, depth), (hidden,), (logits,))
    return (embed, *blocks, head)


def _block(
    spec: ModelSpec, index: int, layers: tuple[int, int], activations: str, positions: tuple[TensorSpec, ...]
) -> StageSpec:
    cache = ("B", spec.num_kv_heads, "C", spec.head_dim)
    caches = [f"{layer}.{kind}" for layer in range(*layers) for kind in ("key", "value")]
    inputs = (
        _hidden("hidden", spec, activations),
        *positions,
        *(TensorSpec(f"past.{name}", activations, cache) for name in caches),
    )
    early = range(layers[0] + 1, min(PREDICTOR_LAYERS + 1, layers[1]))
    outputs = (
        _hidden("hidden_out", spec, activations),
        *(TensorSpec(f"present.{name}", activations, cache) for name in caches),
        *(_hidden(f"hidden.{depth}", spec, activations) for depth in early),
    )
    name = f"block_{index:02d}"
    return StageSpec("block", name, f"{name}.onnx", layers, inputs, outputs)


def _hidden(name: str, spec: ModelSpec, dtype: str) -> TensorSpec:
    return TensorSpec(name, dtype, ("B", "T", spec.hidden_size))


def _to_four(depth: float) -> int:
    """The multiple of four at or above ``depth``: boundaries of different models fall on the same few depths."""
    return 4 * -(-int(depth) // 4)
