"""Trained exits in a bundle: what they compute, that it is exact, and that nothing is stored twice."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import numpy_helper
from tiny_exits import HEADS, ROWS, heads, predictor, read_by, token_ids
from transformers import AutoConfig, AutoModelForCausalLM

from eexport.models.checkpoint import open_checkpoint
from eexport.models.exits import Calibration, ExitHead
from eexport.models.exits_file import read_calibration
from eexport.runtime.backend import Backend
from eexport.runtime.manifest import StageSpec, read_manifest
from eexport.runtime.positions import positions_for
from eexport.runtime.verify import StageRunner

Make = Callable[..., Path]
Floats = NDArray[Any]

DIALECTS = ["ort", "standard"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-ungrouped-untied": ("llama", {"kv_heads": 4, "tied": False}),
    "llama-all-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral-yarn": (
        "mistral",
        {"rope": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    ),
    "qwen2": ("qwen2", {"tied": False}),
    "qwen3-wide": ("qwen3", {"head_dim": 32, "kv_heads": 1}),
}


@cache
def hidden_states(folder: Path) -> list[Floats]:
    """[1 + L] hidden states [T, D] that transformers gives for `token_ids`, none of them normed."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    states = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
    model.model.norm.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
    with torch.inference_mode():
        model(torch.tensor([token_ids()]))
    return [state[0].numpy() for state in states]


def rms_normed(rows: Floats, eps: float) -> Floats:
    normed: Floats = rows / np.sqrt((rows.astype(np.float64) ** 2).mean(-1, keepdims=True) + eps).astype(np.float32)
    return normed


def by_transformers(folder: Path, head: ExitHead, calibration: Calibration) -> tuple[Floats, Floats]:
    """A head's hidden states [T, D] and logits [T, Vd], its layer and norm run by a model of one layer."""
    config = AutoConfig.from_pretrained(folder)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = {name: torch.from_numpy(values) for name, values in head.tensors.items() if "fuse" not in name}
    final = tensors.pop("norm.weight")
    model.model.layers[0].load_state_dict(tensors)
    model.model.norm.load_state_dict({"weight": final})
    sources = [read_by(name, head.depth, hidden_states(folder)) for name in head.features]
    stream = sources[0]
    if len(sources) > 1:
        scales = [head.tensors[f"fuse_norm.{index}.weight"] for index in range(len(sources))]
        normed = [rms_normed(rows, config.rms_norm_eps) * scale for rows, scale in zip(sources, scales, strict=True)]
        stream = np.concatenate(normed, -1) @ head.tensors["fuse.weight"].T
    before: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: before.append(inputs[0]))
    with torch.inference_mode():
        after = model.model(inputs_embeds=torch.from_numpy(stream)[None]).last_hidden_state
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).lm_head.weight.detach().numpy()
    return before[0][0].numpy(), after[0].numpy() @ whole[calibration.draft_ids].T


def runner(bundle: Path, backend: Backend) -> StageRunner:
    manifest = read_manifest(bundle)
    return StageRunner(backend, bundle, manifest.model, manifest.rows)


class TestNumbers:
    @pytest.mark.parametrize("dialect", DIALECTS)
    @pytest.mark.parametrize("case", CASES)
    def test_heads_are_what_transformers_computes(
        self,
        case: str,
        dialect: str,
        backend: Backend,
        tiny_checkpoint: Make,
        tiny_calibration: Make,
        tiny_bundle: Make,
    ) -> None:
        arch, options = CASES[case]
        folder = tiny_checkpoint(arch, **options)
        place = tiny_calibration(folder)
        bundle, calibration = tiny_bundle(folder, dialect=dialect, calibration=place), read_calibration(place)
        run, states = runner(bundle, backend).run, hidden_states(folder)
        assert [head.layers[0] for head in heads(bundle)] == list(HEADS)
        for head, stage in zip(calibration.heads, heads(bundle), strict=True):
            assert [source.name for source in stage.sources] == list(HEADS[head.depth])
            hidden, logits = by_transformers(folder, head, calibration)
            found = run(stage, *(read_by(name, head.depth, states) for name in head.features))
            assert np.abs(found[0] - hidden).max() < 1e-4 and np.abs(found[1] - logits).max() < 1e-4
            assert logits.std() > 0.3, "the head has nothing to say"

    @pytest.mark.parametrize("dialect", DIALECTS)
    @pytest.mark.parametrize("layers", [(1, 2), (2,), (1, 2, 3)])
    def test_the_predictor(
        self,
        dialect: str,
        layers: tuple[int, ...],
        backend: Backend,
        tiny_checkpoint: Make,
        tiny_calibration: Make,
        tiny_bundle: Make,
    ) -> None:
        folder = tiny_checkpoint()
        place = tiny_calibration(folder, predictor=layers)
        bundle, states = tiny_bundle(folder, dialect=dialect, calibration=place), hidden_states(folder)
        trained = read_calibration(place).predictor
        assert trained is not None
        weights, eps = trained.tensors, open_checkpoint(folder).spec.rms_norm_eps
        rows = np.concatenate([rms_normed(states[layer], eps) for layer in layers], -1)
        units = rows @ weights["hidden.weight"].T + weights["hidden.bias"]
        expected = units / (1 + np.exp(-units)) @ weights["output.weight"].T + weights["output.bias"]
        (found,) = runner(bundle, backend).run(predictor(bundle), *(states[layer] for layer in layers))
        assert found.shape == (ROWS, 3)  # two exits and full depth
        assert np.abs(found - expected).max() < 1e-4

    def test_blocks_give_out_what_exits_read(
        self, backend: Backend, tiny_checkpoint: Make, tiny_calibration: Make, tiny_bundle: Make
    ) -> None:
        folder = tiny_checkpoint(layers=6)
        features: dict[int, tuple[str, ...]] = {5: ("hidden", "hidden.2", "hidden.4", "hidden.1")}
        bundle = tiny_bundle(folder, calibration=tiny_calibration(folder, heads=features, predictor=(1, 2, 3, 4)))
        manifest, states = read_manifest(bundle), hidden_states(folder)
        given: dict[int, Floats] = {}
        for block in manifest.blocks:
            outputs = runner(bundle, backend).run(block, states[block.layers[0]])
            given |= zip((block.layers[1], *block.hidden_layers), outputs, strict=True)
        assert {1, 2, 3, 4, 5} <= given.keys()
        assert all(np.abs(rows - states[depth]).max() < 1e-4 for depth, rows in given.items())

    @pytest.mark.parametrize("dialect", DIALECTS)
    def test_int8_rounds_nothing_again(
        self, dialect: str, tiny_checkpoint: Make, tiny_calibration: Make, tiny_bundle: Make
    ) -> None:
        folder = tiny_checkpoint(soft=True)
        place = tiny_calibration(folder)
        bundle = tiny_bundle(folder, dialect=dialect, precision="int8", calibration=place)
        calibration = read_calibration(place)
        for head in calibration.heads:
            for part, name in (("self_attn.o_proj", "attn/o_proj"), ("mlp.down_proj", "mlp/down_proj")):
                stored = dequantized(bundle / f"{head.name}.onnx", f"/layers.{head.name}/{name}.weight", dialect)
                assert np.array_equal(stored, head.tensors[f"{part}.weight"])
        fused = dequantized(bundle / "exit_02.onnx", "/fuse.weight", dialect)
        assert np.array_equal(fused, calibration.heads[1].tensors["fuse.weight"])

    @pytest.mark.parametrize("precision", ["fp16", "int8", "int4"])
    @pytest.mark.parametrize("dialect", DIALECTS)
    def test_other_precisions_pass_the_gate(
        self, dialect: str, precision: str, tiny_checkpoint: Make, tiny_calibration: Make, tiny_bundle: Make
    ) -> None:
        folder = tiny_checkpoint(soft=True)
        bundle = tiny_bundle(folder, dialect=dialect, precision=precision, calibration=tiny_calibration(folder))
        parity = {row["stage"]: row for row in read_manifest(bundle).parity["stages"]}
        for name in ("exit_01", "exit_02", "exit_03", "predictor"):
            assert parity[name]["cosine"] > 0.9 and parity[name]["argmax_agreement"] > 0.6
            assert parity[name]["relative"] > 0  # or it is not that precision


def dequantized(graph: Path, name: str, dialect: str) -> Floats:
    """A quantised matrix [N, K] of a graph with blocks of 32, as its nodes read it."""
    tensors = {t.name: numpy_helper.to_array(t) for t in onnx.load(graph).graph.initializer}
    values, scales = tensors[f"{name}.values"], tensors[f"{name}.scales"].astype(np.float32)
    if dialect == "standard":  # [K, N], signed
        weight: Floats = (values.astype(np.float32) * np.repeat(scales, 32, axis=0)).T
    else:  # [N, K/32, 32], offset by 128
        weight = ((values.astype(np.float32) - 128) * scales.reshape(*values.shape[:2], 1)).reshape(len(values), -1)
    return weight


class TestExactness:
    """A row's bits depend on nothing but what came before it, as in blocks."""

    @pytest.mark.parametrize("precision", ["fp32", "fp16", "int8", "int4"])
    @pytest.mark.parametrize("dialect", DIALECTS)
    @pytest.mark.parametrize("shape", ["llama", "llama-ungrouped-untied", "qwen3-wide"])
    def test_rows_do_not_depend_on_their_number(
        self,
        shape: str,
        dialect: str,
        precision: str,
        backend: Backend,
        tiny_checkpoint: Make,
        tiny_calibration: Make,
        tiny_bundle: Make,
    ) -> None:
        arch, options = CASES[shape]
        folder = tiny_checkpoint(arch, soft=True, **options)
        bundle = tiny_bundle(folder, dialect=dialect, precision=precision, calibration=tiny_calibration(folder))
        states = hidden_states(folder)
        for stage in (*heads(bundle), predictor(bundle)):
            sources = [read_by(source.name, stage.layers[0], states)[:64] for source in stage.sources]
            whole = in_chunks(bundle, stage, backend, sources, 64)
            for chunk in (1, 2, 3, 5, 8):
                found = in_chunks(bundle, stage, backend, sources, chunk)
                for name, rows in whole.items():
                    assert np.array_equal(found[name], rows), f"{name} of {stage.name}, {chunk} at once"


def in_chunks(
    bundle: Path, stage: StageSpec, backend: Backend, sources: list[Floats], chunk: int
) -> dict[str, NDArray[Any]]:
    """Outputs of a stage for rows that come `chunk` at a time, its cache growing; padded as the runtime does."""
    manifest, loaded = read_manifest(bundle), backend.load(bundle / stage.graph, stage)
    caches = {t.name: backend.allocate(t.sized(B=1, C=128), t.dtype) for t in stage.kv_inputs}
    kept: dict[str, list[NDArray[Any]]] = {}
    for start in range(0, len(sources[0]), chunk):
        count = len(sources[0][start : start + chunk])
        rows = -(-count // manifest.rows.multiple) * manifest.rows.multiple
        results = [t for t in stage.outputs if not t.name.startswith("present.")]
        buffers = {t.name: backend.allocate(t.sized(B=1, T=rows), t.dtype) for t in (*stage.sources, *results)}
        buffers |= caches | {name.replace("past.", "present."): cache for name, cache in caches.items()}
        for spec, values in zip(stage.sources, sources, strict=True):
            buffers[spec.name].array[0, :count] = values[start : start + count]
            buffers[spec.name].array[0, count:] = values[start + count - 1]
        if caches:
            positions, fill = positions_for(stage, manifest.model, manifest.rows, backend).bind(rows, 128)
            fill(start)
            buffers |= positions
        loaded.bind(buffers)()
        for spec in results:
            kept.setdefault(spec.name, []).append(np.array(buffers[spec.name].array[0, :count]))
    return {name: np.concatenate(parts) for name, parts in kept.items()}
