"""A build: what is in the bundle, what is refused, and what it costs."""

import math
import os
import shutil
import subprocess
import sys
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from tiny import edit_config, edit_tensors, make_checkpoint

from eexport.export.blocks import PlanError
from eexport.export.build import BuildError, BuildOptions, build
from eexport.export.dialect_ort import OrtDialect
from eexport.export.dialect_standard import StandardDialect
from eexport.models.checkpoint import open_checkpoint
from eexport.runtime.backend import Backend
from eexport.runtime.engine import Engine
from eexport.runtime.errors import BundleError
from eexport.runtime.manifest import Manifest, read_manifest

Make = Callable[..., Path]
Load = Callable[..., Engine]

FORMS = [(dialect, precision) for dialect in ("ort", "standard") for precision in ("fp32", "fp16", "int8", "int4")]
Region = tuple[str, int, int]


def built(checkpoint: Path, out: Path, **options: Any) -> Manifest:
    return build(open_checkpoint(checkpoint), out, BuildOptions(**{"precision": "fp32"} | options))


def refusal(checkpoint: Path, out: Path, **options: Any) -> str:
    """The one line that a refused build says; it leaves nothing."""
    with pytest.raises(BuildError) as caught:
        built(checkpoint, out, **options)
    assert "\n" not in str(caught.value)
    assert not out.exists() and not list(out.parent.glob(f".{out.name}*"))
    return str(caught.value)


def graphs(bundle: Path) -> dict[str, onnx.ModelProto]:
    return {path.name: onnx.load(path, load_external_data=False) for path in sorted(bundle.glob("*.onnx"))}


def regions(model: onnx.ModelProto) -> dict[str, Region]:
    """Where each weight of a graph lies: file, offset, length."""
    found = {}
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            fields = {entry.key: entry.value for entry in tensor.external_data}
            found[tensor.name] = (fields["location"], int(fields["offset"]), int(fields["length"]))
    return found


class TestContents:
    @pytest.mark.parametrize(("dialect", "precision"), FORMS)
    def test_graphs_hold_no_weights(
        self, dialect: str, precision: str, tiny_checkpoint: Make, tiny_bundle: Make
    ) -> None:
        """So no model meets protobuf's limit of 2 GB."""
        folder = tiny_checkpoint("qwen2", soft=True, tied=False)
        for name, model in graphs(tiny_bundle(folder, precision=precision, dialect=dialect)).items():
            inside = [t for t in model.graph.initializer if t.data_location != onnx.TensorProto.EXTERNAL]
            assert all(math.prod(tensor.dims) <= 8 for tensor in inside)
            assert len(model.SerializeToString()) < 60_000
            assert regions(model), f"{name} refers to no weights"

    @pytest.mark.parametrize("tied", [True, False])
    @pytest.mark.parametrize(("dialect", "precision"), FORMS)
    def test_weights_are_stored_once(
        self, tied: bool, dialect: str, precision: str, tiny_checkpoint: Make, tiny_bundle: Make
    ) -> None:
        bundle = tiny_bundle(
            tiny_checkpoint("qwen2", soft=True, tied=tied), precision=precision, dialect=dialect, blocks="2"
        )
        by_graph = {name: set(regions(model).values()) for name, model in graphs(bundle).items()}
        assert bool(by_graph["embed.onnx"] & by_graph["head.onnx"]) == tied
        assert not by_graph["block_00.onnx"] & by_graph["block_01.onnx"]
        every = sorted(set().union(*by_graph.values()))
        large = [region for region in every if region[2] >= 1024]
        parts = {(bundle / file).read_bytes()[start : start + size] for file, start, size in large}
        assert len(parts) == len(large), "the same bytes lie in two places"
        for path in bundle.glob("*.bin"):  # what no graph refers to is padding, less than a page a tensor
            used = [size for file, _, size in every if file == path.name]
            assert 0 <= path.stat().st_size - sum(used) < 4096 * len(used)

    @pytest.mark.parametrize(("precision", "bytes_per_weight"), [("fp32", 4), ("fp16", 2), ("int8", 1.125)])
    def test_size_of_a_tied_bundle(
        self, precision: str, bytes_per_weight: float, tiny_checkpoint: Make, tiny_bundle: Make
    ) -> None:
        folder = tiny_checkpoint(hidden=256, intermediate=512, vocab=2048)
        weights = sum(math.prod(shape) for shape in open_checkpoint(folder).spec.tensor_shapes().values())
        bundle = tiny_bundle(folder, precision=precision)
        size = sum(path.stat().st_size for path in bundle.glob("*.bin"))
        assert size < 1.1 * bytes_per_weight * weights

    @pytest.mark.parametrize(("dialect", "precision"), FORMS)
    def test_graphs_are_what_the_manifest_says(
        self, dialect: str, precision: str, tiny_checkpoint: Make, tiny_bundle: Make
    ) -> None:
        bundle = tiny_bundle(tiny_checkpoint("qwen2", soft=True), precision=precision, dialect=dialect, blocks="2")
        models = graphs(bundle)
        for stage in read_manifest(bundle).stages:
            model = models[stage.graph]
            assert [_signature(v) for v in model.graph.input] == [(t.name, t.dtype, t.shape) for t in stage.inputs]
            assert [_signature(v) for v in model.graph.output] == [(t.name, t.dtype, t.shape) for t in stage.outputs]
            assert model.ir_version == 11
            domains = {opset.domain: opset.version for opset in model.opset_import}
            assert domains.pop("") == 24
            if dialect == "standard":
                assert not domains
                onnx.checker.check_model(str(bundle / stage.graph), full_check=True)

    @pytest.mark.parametrize("dialect", ["ort", "standard"])
    def test_a_lookup_costs_nothing_by_the_size_of_its_table(
        self, dialect: str, backend: Backend, tiny_checkpoint: Make, tiny_bundle: Make
    ) -> None:
        """Rows of a quantised embedding are gathered first and dequantised after that."""
        seconds = []
        for vocab in (320, 32_000):
            bundle = tiny_bundle(tiny_checkpoint(soft=True, layers=1, vocab=vocab), precision="int8", dialect=dialect)
            embed = read_manifest(bundle).stages[0]
            tensors = (*embed.inputs, *embed.outputs)
            buffers = {tensor.name: backend.allocate(tensor.sized(B=1, T=1), tensor.dtype) for tensor in tensors}
            run = backend.load(bundle / embed.graph, embed).bind(buffers)
            seconds.append(min(timeit.repeat(run, number=1, repeat=50)))
        assert seconds[1] < 8 * seconds[0]

    def test_text_and_sampling_go_along(self, tmp_path: Path, backend: Backend) -> None:
        folder = make_checkpoint(
            tmp_path / "checkpoint", bos=True, generation={"do_sample": True, "temperature": 0.7, "top_k": 5}
        )
        manifest = built(folder, tmp_path / "bundle")
        assert manifest.sampling == {"temperature": 0.7, "top_k": 5}
        assert manifest.text.special["bos_token"] == "<s>"
        engine = Engine.load(tmp_path / "bundle", backend=backend)
        assert engine.codec.encode_chat([{"role": "user", "content": "x"}])[:2] == [0, 1]
        (folder / "chat_template.jinja").unlink()
        assert built(folder, tmp_path / "plain").text.chat_template is None
        assert not (tmp_path / "plain" / "chat_template.jinja").exists()

    def test_hidden_states_for_the_predictor(self, tiny_checkpoint: Make, tiny_bundle: Make) -> None:
        """Layers 1 to 4, as outputs of the first block or as its end."""
        manifest = read_manifest(tiny_bundle(tiny_checkpoint(layers=6)))
        assert manifest.boundaries == (4,)
        assert [block.hidden_layers for block in manifest.blocks] == [(1, 2, 3), ()]
        manifest = read_manifest(tiny_bundle(tiny_checkpoint(layers=6), blocks="1"))
        assert [block.hidden_layers for block in manifest.blocks] == [(1, 2, 3, 4)]

    def test_progress(self, tmp_path: Path, tiny_checkpoint: Make) -> None:
        steps: list[tuple[str, int, int]] = []
        checkpoint = open_checkpoint(tiny_checkpoint())
        options = BuildOptions(precision="fp32")
        build(checkpoint, tmp_path / "bundle", options, lambda *step: steps.append(step))
        assert [done for _, done, _ in steps] == list(range(1, 6)) and {total for *_, total in steps} == {5}
        assert steps[0][0] == "embedding" and steps[-1][0] == "head"


class TestPlaces:
    def test_relocatable_and_nothing_outside(
        self, tmp_path: Path, tiny_checkpoint: Make, tiny_engine: Load, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        checkpoint, here = tiny_checkpoint(tied=False), tmp_path / "here"
        before = {path: path.stat().st_mtime_ns for path in checkpoint.iterdir()}
        here.mkdir()
        monkeypatch.chdir(here)
        built(checkpoint, Path("out") / "Modèle 模型 #1", blocks="2")
        assert {path.name for path in here.iterdir()} == {"out"}
        assert {path.name for path in (here / "out").iterdir()} == {"Modèle 模型 #1"}
        assert {path: path.stat().st_mtime_ns for path in checkpoint.iterdir()} == before
        moved = Path(shutil.move(here / "out" / "Modèle 模型 #1", tmp_path / "moved"))
        shutil.rmtree(here / "out")
        monkeypatch.chdir("/")
        engine = tiny_engine(moved)
        assert len(list(engine.generate("hello", max_tokens=3, ignore_eos=True))) == 3
        assert str(tmp_path) not in (moved / "manifest.json").read_text(encoding="utf-8")

    def test_force(self, tmp_path: Path, tiny_checkpoint: Make) -> None:
        out = tmp_path / "bundle"
        built(tiny_checkpoint(), out, blocks="3")
        with pytest.raises(BundleError, match="--force"):
            built(tiny_checkpoint(), out)
        assert (out / "block_02.bin").exists()
        built(tiny_checkpoint(), out, blocks="1", force=True)
        assert not (out / "block_01.bin").exists() and len(read_manifest(out).blocks) == 1

    def test_an_interrupted_build_leaves_nothing(self, tmp_path: Path, tiny_checkpoint: Make) -> None:
        def stop(what: str, *_: int) -> None:
            if what == "layer 1":
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            build(open_checkpoint(tiny_checkpoint()), tmp_path / "bundle", BuildOptions("fp32"), stop)
        assert not list(tmp_path.iterdir())


class TestRefused:
    @pytest.mark.parametrize(
        ("options", "named"),
        [
            ({"precision": "bf16"}, ["--precision bf16", "fp32, fp16, int8, int4"]),
            ({"dialect": "tensorrt"}, ["--dialect tensorrt", "ort, standard"]),
            ({"dialect": "standard", "vocab_precision": "int8"}, ["--vocab-precision"]),
            ({"precision": "int8", "block_size": 48}, ["--block-size 48"]),
        ],
    )
    def test_options(self, options: dict[str, Any], named: list[str], tmp_path: Path, tiny_checkpoint: Make) -> None:
        message = refusal(tiny_checkpoint(), tmp_path / "bundle", **options)
        assert all(part in message for part in named)

    def test_a_plan_that_does_not_fit(self, tmp_path: Path, tiny_checkpoint: Make) -> None:
        with pytest.raises(PlanError, match="3 layers"):
            built(tiny_checkpoint(), tmp_path / "bundle", blocks="4")

    @pytest.mark.parametrize("precision", ["int8", "int4"])
    @pytest.mark.parametrize("dialect", ["ort", "standard"])
    def test_widths_that_blocks_do_not_divide(
        self, dialect: str, precision: str, tmp_path: Path, tiny_checkpoint: Make
    ) -> None:
        folder = tiny_checkpoint(intermediate=100)
        assert "intermediate_size is 100" in refusal(folder, tmp_path / "bundle", precision=precision, dialect=dialect)
        assert built(folder, tmp_path / "bundle", precision="fp16", dialect=dialect)

    def test_too_little_space(self, tmp_path: Path, tiny_checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=1 << 20))
        with pytest.raises(BundleError, match="1 MB free"):
            built(tiny_checkpoint(), tmp_path / "bundle")
        assert not list(tmp_path.iterdir())


class TestParity:
    """The gate at the end of every stage."""

    @pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
    @pytest.mark.parametrize("dialect", [OrtDialect, StandardDialect])
    def test_dropped_biases(
        self,
        dialect: Any,
        precision: str,
        tmp_path: Path,
        tiny_checkpoint: Make,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        whole = dialect.linear
        monkeypatch.setattr(dialect, "linear", lambda self, *arguments: whole(self, *arguments[:-1], None))
        folder = tiny_checkpoint("qwen2")
        message = refusal(folder, tmp_path / "bundle", precision=precision, dialect=dialect.name)
        assert f"parity failed at {precision}: block_00 has a mean cosine" in message

    @pytest.mark.parametrize("dialect", [OrtDialect, StandardDialect])
    def test_a_wrong_matrix(
        self, dialect: Any, tmp_path: Path, tiny_checkpoint: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = dialect.store_matrix

        def swap(self: Any, file: Any, name: str, weight: torch.Tensor) -> Any:
            wrong = "/layers.2/" in name and "down_proj" in name
            return store(self, file, name, weight.flip(0) if wrong else weight)

        monkeypatch.setattr(dialect, "store_matrix", swap)
        assert "block_02 has a mean cosine" in refusal(
            tiny_checkpoint(), tmp_path / "bundle", dialect=dialect.name, blocks="3"
        )

    @pytest.mark.parametrize("dialect", [OrtDialect, StandardDialect])
    def test_a_wrong_head(
        self, dialect: Any, tmp_path: Path, tiny_checkpoint: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = dialect.store_table

        def swap(self: Any, file: Any, name: str, weight: torch.Tensor) -> Any:
            return store(self, file, name, weight.roll(1, 0) if name == "head" else weight)

        monkeypatch.setattr(dialect, "store_table", swap)
        folder = tiny_checkpoint(tied=False)
        assert "head has a mean cosine" in refusal(folder, tmp_path / "bundle", dialect=dialect.name)

    @pytest.mark.parametrize("precision", ["fp16", "int8"])
    def test_fp16_that_overflows(self, precision: str, tmp_path: Path) -> None:
        """Activations of more than 65504 in one block, as some published models have."""
        folder = make_checkpoint(tmp_path / "checkpoint", layers=4)

        def enlarge(tensors: dict[str, torch.Tensor]) -> None:
            for name in ("gate_proj", "up_proj"):
                tensors[f"model.layers.2.mlp.{name}.weight"].mul_(500)

        edit_tensors(folder, enlarge)
        out = tmp_path / "bundle"
        message = refusal(folder, out, precision=precision, dialect="standard", blocks="2")
        assert "block_01 gives NaN or infinity" in message and "--precision fp32" in message
        built(folder, out, dialect="standard", blocks="2")  # as the message says

    def test_an_outlier_channel_is_on_record(self, tmp_path: Path, tiny_checkpoint: Make) -> None:
        """What int4 costs here is in the manifest, beside the choice itself."""
        plain = tiny_checkpoint(soft=True, layers=2)
        outlier = Path(shutil.copytree(plain, tmp_path / "checkpoint"))

        def enlarge(tensors: dict[str, torch.Tensor]) -> None:
            for name, tensor in tensors.items():
                if name.endswith("layernorm.weight"):
                    tensor[5].mul_(8)

        edit_tensors(outlier, enlarge)
        exact = built(outlier, tmp_path / "fp32")
        assert (exact.precision.weights, exact.precision.matmul_activations) == ("fp32", "float32")
        rough = built(outlier, tmp_path / "int4", precision="int4")
        assert (rough.precision.weights, rough.precision.matmul_activations) == ("int4", "int8")
        usual = built(plain, tmp_path / "usual", precision="int4")
        chains = [manifest.parity["stages"][-1] for manifest in (exact, usual, rough)]
        assert chains[0]["argmax_agreement"] == 1.0 and chains[0]["relative"] < 1e-5
        assert chains[2]["argmax_agreement"] < 1.0 and chains[2]["relative"] > chains[1]["relative"]


class TestCheckpoints:
    def test_bf16_weights_are_exact_in_fp32(self, tmp_path: Path, tiny_checkpoint: Make) -> None:
        manifest = built(tiny_checkpoint(dtype=torch.bfloat16), tmp_path / "bundle")
        assert manifest.built_with["checkpoint"]["dtypes"].startswith("BF16")
        assert all(stage["max_difference"] < 1e-4 for stage in manifest.parity["stages"])

    def test_a_context_shorter_than_the_probe(self, tmp_path: Path, backend: Backend) -> None:
        folder = make_checkpoint(tmp_path / "checkpoint", context=8)
        manifest = built(folder, tmp_path / "bundle")
        assert manifest.model.context_length == 8
        engine = Engine.load(tmp_path / "bundle", backend=backend)
        assert len(list(engine.generate([5], ignore_eos=True))) == 7

    def test_a_tokenizer_with_more_tokens_than_the_model(self, tmp_path: Path) -> None:
        folder = make_checkpoint(tmp_path / "checkpoint", vocab=32)
        edit_config(folder, "generation_config.json", eos_token_id=[2, 31])
        assert built(folder, tmp_path / "bundle").model.eos_token_ids == (2, 31)


PEAKS = """
import sys
from pathlib import Path
import torch
from eexport.export.build import BuildOptions, build
from eexport.models.checkpoint import open_checkpoint
torch.set_num_threads(1)
for layers, folder in enumerate(sys.argv[1:]):
    checkpoint = open_checkpoint(folder)
    options = BuildOptions("fp32", blocks=str(checkpoint.spec.num_layers))
    build(checkpoint, Path(folder).with_name(f"bundle{layers}"), options)
    status = Path("/proc/self/status").read_text()
    print(int(status.split("VmHWM:")[1].split()[0]) * 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no peak memory to read")
def test_peak_memory_follows_the_block_and_not_the_model(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden": 384, "heads": 6, "intermediate": 1024, "dtype": torch.bfloat16}
    few = make_checkpoint(tmp_path / "few", layers=4, **sizes)
    many = make_checkpoint(tmp_path / "many", layers=20, **sizes)
    command = [sys.executable, "-c", PEAKS, str(few), str(many)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ, check=True)
    first, second = map(int, done.stdout.split())
    sizes_on_disk = [(folder / "model.safetensors").stat().st_size for folder in (few, many)]
    more = 2 * (sizes_on_disk[1] - sizes_on_disk[0])  # bytes in fp32
    assert more > 90 << 20
    assert second - first < more / 4


def _signature(value: onnx.ValueInfoProto) -> tuple[str, str, tuple[int | str, ...]]:
    kind = value.type.tensor_type
    dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type).name
    return value.name, dtype, tuple(dim.dim_param or dim.dim_value for dim in kind.shape.dim)
