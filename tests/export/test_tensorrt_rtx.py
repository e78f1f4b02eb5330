"""The standard dialect parses and compiles ahead of time with TensorRT-RTX, on a machine without a GPU."""

import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from eexport.runtime.manifest import StageSpec, read_manifest

if sys.platform != "linux" or platform.machine() != "x86_64":
    pytest.skip("TensorRT-RTX has no wheel for this platform", allow_module_level=True)

import tensorrt_rtx_bindings as trt

Make = Callable[..., Path]

CAPACITY = 1024  # an engine's caches have one size: TensorRT updates none of a dynamic one in place
PRECISIONS = ["fp32", "fp16", "int8", "int4"]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped": ("llama", {}),
    "ungrouped": ("llama", {"kv_heads": 4}),
    "biased-untied": ("qwen2", {"tied": False}),
    "one-kv-head": ("qwen3", {"head_dim": 32, "kv_heads": 1}),
    "smollm2": (
        "llama",
        {"layers": 2, "hidden": 576, "heads": 9, "kv_heads": 3, "intermediate": 1536, "vocab": 512},
    ),
}


class Log(trt.ILogger):  # type: ignore[misc]
    """Keeps what the compiler complains of."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[str] = []

    def log(self, severity: Any, message: str) -> None:
        if severity <= trt.ILogger.ERROR:
            self.errors.append(message)


def compile_stage(bundle: Path, stage: StageSpec, *, fused: bool = False) -> int:
    """Bytes of the engine for compute capability 8.9; `fused` refuses attention without a kernel."""
    log = Log()
    builder = trt.Builder(log)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, log)
    model = with_capacity(onnx.load(bundle / stage.graph, load_external_data=False))
    parsed = parser.parse(model.SerializeToString(), str(bundle / stage.graph))  # the path is for the weights
    assert parsed, [parser.get_error(i).desc() for i in range(parser.num_errors)]
    for layer in (network.get_layer(i) for i in range(network.num_layers)):
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer
            layer.attention.decomposable = not fused
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    profile = builder.create_optimization_profile()
    for spec in stage.inputs:
        least, most = spec.sized(B=1, T=1, C=CAPACITY), spec.sized(B=1, T=64, C=CAPACITY)
        profile.set_shape(spec.name, least, least, most)
    config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    assert engine is not None, log.errors
    return int(engine.nbytes)


def with_capacity(model: onnx.ModelProto) -> onnx.ModelProto:
    """`model` with its dimension C fixed."""
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == "C":
                dim.dim_value = CAPACITY
    return model


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", MODELS)
def test_every_stage_compiles(
    model: str, precision: str, tiny_checkpoint: Make, tiny_calibration: Make, tiny_bundle: Make
) -> None:
    """Exits too: a head that reads one thing, one that reads several, and the predictor."""
    arch, options = MODELS[model]
    folder = tiny_checkpoint(arch, soft=True, **options)
    layers = options.get("layers", 3)
    exits = tiny_calibration(folder, heads={1: ("hidden",), layers: ("embedding", "previous", "hidden.1")})
    bundle = tiny_bundle(folder, precision=precision, dialect="standard", calibration=exits)
    stages = read_manifest(bundle).all_stages
    assert [stage.kind for stage in stages[-3:]] == ["exit", "exit", "predictor"]
    for stage in stages:
        assert compile_stage(bundle, stage) > 0


@pytest.mark.parametrize("precision", ["fp16", "int8", "int4"])
def test_attention_has_a_kernel_of_its_own(precision: str, tiny_checkpoint: Make, tiny_bundle: Make) -> None:
    arch, options = MODELS["smollm2"]
    folder = tiny_checkpoint(arch, soft=True, **options)
    bundle = tiny_bundle(folder, precision=precision, dialect="standard", blocks="1")
    compile_stage(bundle, read_manifest(bundle).blocks[0], fused=True)


def test_weights_stay_quantised(tiny_checkpoint: Make, tiny_bundle: Make) -> None:
    """Engines shrink with the weights: nothing is widened when it is compiled."""
    arch, options = MODELS["smollm2"]
    folder = tiny_checkpoint(arch, soft=True, **options)
    sizes = {}
    for precision in PRECISIONS:
        bundle = tiny_bundle(folder, precision=precision, dialect="standard", blocks="1")
        embed, block, _ = read_manifest(bundle).stages
        sizes[precision] = compile_stage(bundle, embed), compile_stage(bundle, block)
    weights = (512 * 576, 2 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536))
    for part, count in enumerate(weights):
        wide, half, byte, nibble = (sizes[precision][part] for precision in PRECISIONS)
        assert wide - half > 1.8 * count and half - byte > 0.7 * count
        if part == 1:  # the table is int8 at both
            assert byte - nibble > 0.4 * count
