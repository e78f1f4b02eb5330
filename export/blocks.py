"""Where the decoder is cut, and the exact inputs and outputs of every stage.

    stage   inputs                                                      outputs
    embed   token_ids [B,T] i64                                         hidden [B,T,D]
    block   hidden [B,T,D], the dialect's position inputs,              hidden_out [B,T,D], present.* [B,KvH,C,Hd],
            past.{layer}.{key,value} [B,KvH,C,Hd]                       hidden.{1..4} [B,T,D] (within the block)
    head    hidden [B,T,D]                                              logits [B,T,V] f32
    exit    its features [B,T,D] (models/exits.py), position inputs,    hidden_out [B,T,D], logits [B,T,Vd] f32,
            past.{exit}.{key,value} [B,KvH,C,Hd]                        present.* [B,KvH,C,Hd]
    predictor  hidden.{1..4} [B,T,D]                                    logits [B,T,E+1] f32

Position inputs: ``standard`` takes cos, sin [B,T,Hd/2], mask [B,1,T,C] (added to the scores) and write_index [B] i64
(where slot b writes its T new keys); ``ort`` takes cos_table, sin_table [C,Hd/2], and last_index [B], new_rows [B],
total_length [1] (i32), from which GroupQueryAttention derives the same.

B slots and T rows are free in every graph, so one graph serves prefill, decode and verification. The StageSpec made
here is what the graph builder emits, the manifest records and the runtime binds.
"""

from collections.abc import Sequence

from eexport.models.exits import PREDICTOR_LAYERS, Calibration, ExitHead
from eexport.models.spec import ModelSpec
from eexport.runtime.errors import EexportError
from eexport.runtime.exits import ExitRule
from eexport.runtime.manifest import ExitsInfo, StageSpec, TensorSpec

_MOST_BLOCKS = 4  # seven cost 15-20% of a token more than four, which cost about what one does


class PlanError(EexportError):
    """The block boundaries asked for do not cut this model; one line."""


def plan_blocks(num_layers: int, blocks: str = "auto", exits: Sequence[int] = ()) -> tuple[tuple[int, int], ...]:
    """Half-open layer ranges of the blocks.

    Args:
        num_layers: Depth of the model.
        blocks: ``auto`` (about 4, ending at depth 4, a quarter and a half, or at ``exits`` first), a number of equal
            blocks ("2"), or explicit boundaries: the depths at which a block ends ("4,8,16").
        exits: Depths of trained exits, short of the model's own, at which a block has to end.

    Raises:
        PlanError: When the text is none of these, or does not fit the depth or the exits.
    """
    if blocks == "auto":
        cuts = _automatic(num_layers, exits)
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
    if missed := sorted(set(exits) - set(cuts)):
        needed = ",".join(str(cut) for cut in sorted({*cuts, *exits, num_layers}))
        raise PlanError(
            f"--blocks {blocks}: no block ends after layer {missed[0]}, where the calibration has an exit: give "
            f"{needed} or auto, or build with --no-exits"
        )
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


def plan_exits(
    spec: ModelSpec, calibration: Calibration, activations: str, positions: tuple[TensorSpec, ...]
) -> ExitsInfo:
    """Every stage that branches off from the chain; the arguments are those of ``plan_stages``."""
    thresholds, predictor = calibration.thresholds, None
    heads = tuple(_exit(spec, head, len(calibration.draft_ids), activations, positions) for head in calibration.heads)
    if calibration.predictor is not None:
        layers = calibration.predictor.layers
        classes = len(calibration.exit_depths(spec.num_layers)) + 1
        inputs = tuple(_hidden(f"hidden.{layer}", spec, activations) for layer in layers)
        logits = TensorSpec("logits", "float32", ("B", "T", classes))
        depth = max(layers)
        predictor = StageSpec("predictor", "predictor", "predictor.onnx", (depth, depth), inputs, (logits,))
    return ExitsInfo(
        heads=heads,
        predictor=predictor,
        draft_ids="draft_ids.npy",
        rule=None if thresholds is None else ExitRule(thresholds.entropy, thresholds.previous),
        record=calibration.record,
    )


def _automatic(num_layers: int, exits: Sequence[int]) -> list[int]:
    """The exits, filled up with depths that may be of use, as long as the blocks are few."""
    half = _to_four(num_layers / 2)
    fillers = (PREDICTOR_LAYERS, half) if exits else (PREDICTOR_LAYERS, _to_four(num_layers / 4), half)
    cuts = set(exits)
    for cut in fillers:
        if 0 < cut < num_layers and len(cuts) < _MOST_BLOCKS - 1:
            cuts.add(cut)
    return sorted(cuts)


def _block(
    spec: ModelSpec, index: int, layers: tuple[int, int], activations: str, positions: tuple[TensorSpec, ...]
) -> StageSpec:
    past, present = _caches([str(layer) for layer in range(*layers)], spec, activations)
    early = range(layers[0] + 1, min(PREDICTOR_LAYERS + 1, layers[1]))
    inputs = (_hidden("hidden", spec, activations), *positions, *past)
    outputs = (
        _hidden("hidden_out", spec, activations),
        *present,
        *(_hidden(f"hidden.{depth}", spec, activations) for depth in early),
    )
    name = f"block_{index:02d}"
    return StageSpec("block", name, f"{name}.onnx", layers, inputs, outputs)


def _exit(
    spec: ModelSpec, head: ExitHead, draft: int, activations: str, positions: tuple[TensorSpec, ...]
) -> StageSpec:
    past, present = _caches([head.name], spec, activations)
    inputs = (*(_hidden(feature, spec, activations) for feature in head.features), *positions, *past)
    logits = TensorSpec("logits", "float32", ("B", "T", draft))
    outputs = (_hidden("hidden_out", spec, activations), logits, *present)
    return StageSpec("exit", head.name, f"{head.name}.onnx", (head.depth, head.depth), inputs, outputs)


def _caches(names: Sequence[str], spec: ModelSpec, dtype: str) -> list[list[TensorSpec]]:
    """The caches of layers with these names, as inputs and as outputs."""
    shape = ("B", spec.num_kv_heads, "C", spec.head_dim)
    parts = [f"{name}.{kind}" for name in names for kind in ("key", "value")]
    return [[TensorSpec(f"{time}.{part}", dtype, shape) for part in parts] for time in ("past", "present")]


def _hidden(name: str, spec: ModelSpec, dtype: str) -> TensorSpec:
    return TensorSpec(name, dtype, ("B", "T", spec.hidden_size))


def _to_four(depth: float) -> int:
    """The multiple of four at or above ``depth``: boundaries of different models fall on the same few depths."""
    return 4 * -(-int(depth) // 4)
