"""Bundles with trained exits: what is in them, and which calibrations a build refuses."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from tiny_exits import heads, make_calibration, predictor, read_by, token_ids

from eexport.export.blocks import PlanError
from eexport.export.build import BuildError, BuildOptions, build
from eexport.export.bundle import file_infos
from eexport.export.dialect_ort import OrtDialect
from eexport.models.checkpoint import open_checkpoint
from eexport.models.errors import CheckpointError
from eexport.models.exits_file import read_calibration, write_calibration
from eexport.runtime.backend import Backend
from eexport.runtime.engine import Engine
from eexport.runtime.exits import ExitRule
from eexport.runtime.manifest import read_manifest
from eexport.runtime.summary import check, headlines, summarise
from eexport.runtime.verify import Reference

Make = Callable[..., Path]
Floats = NDArray[Any]


@pytest.fixture(scope="module")
def bundle(tiny_checkpoint: Make, tiny_calibration: Make, tiny_bundle: Make) -> Path:
    folder = tiny_checkpoint(vocab=8192, soft=True)
    return tiny_bundle(folder, precision="int8", calibration=tiny_calibration(folder, draft=4096))


@pytest.fixture(scope="module")
def plain(tiny_checkpoint: Make, tiny_bundle: Make) -> Path:
    """The same without exits, with the same blocks."""
    return tiny_bundle(tiny_checkpoint(vocab=8192, soft=True), precision="int8", blocks="1,2")


class TestBundle:
    def test_the_manifest(self, bundle: Path) -> None:
        manifest = read_manifest(bundle)
        assert manifest.to_json() == (bundle / "manifest.json").read_text(encoding="utf-8")
        assert [stage.name for stage in manifest.stages] == ["embed", "block_00", "block_01", "block_02", "head"]
        assert manifest.boundaries == (1, 2) and [head.name for head in manifest.exit_heads] == ["exit_01", "exit_02"]
        exits = manifest.exits
        assert exits is not None and exits.rule == ExitRule((0.5, 0.5), 1.5) and exits.record["seed"] == 0
        assert [t.name for t in exits.heads[2].kv_inputs] == ["past.exit_03.key", "past.exit_03.value"]
        ids = np.load(bundle / exits.draft_ids)
        assert ids.dtype == np.int32 and ids.shape == (4096,) and (np.diff(ids) > 0).all()
        assert manifest.built_with["options"]["calibration"] == "tiny"
        recorded = [row["stage"] for row in manifest.parity["stages"]]
        assert recorded[5:] == [
            *(f"exit_{n:02d}{part}" for n in (1, 2, 3) for part in ("", ".hidden")),
            "predictor",
            "chain",
        ]

    def test_heads_have_keys_and_values_too(self, bundle: Path, plain: Path) -> None:
        one, other = (read_manifest(folder).kv_bytes_per_token() for folder in (bundle, plain))
        assert one == 2 * other  # three layers, and three heads of a layer each

    def test_no_threshold_for_the_previous_token(
        self, tmp_path: Path, tiny_checkpoint: Make, tiny_calibration: Make
    ) -> None:
        folder = tiny_checkpoint()
        options = BuildOptions("int8", calibration=tiny_calibration(folder, previous=np.inf, predictor=None))
        written = build(open_checkpoint(folder), tmp_path / "bundle", options)
        assert read_manifest(tmp_path / "bundle") == written
        assert written.exits is not None and written.exits.rule == ExitRule((0.5, 0.5), np.inf)
        assert written.exits.predictor is None and "Infinity" not in written.to_json()

    def test_draft_rows_are_stored_once_and_the_rest_is_small(self, bundle: Path, plain: Path) -> None:
        sizes = {path.name: path.stat().st_size for path in bundle.glob("*.bin")}
        rows, width = 4096, 64
        assert 1.1 * rows * width < sizes["draft.bin"] < 1.2 * rows * width
        assert all(size < rows * width / 2 for name, size in sizes.items() if name.startswith("exit"))
        used = [draft_regions(bundle / f"exit_{n:02d}.onnx") for n in (1, 2, 3)]
        assert used[0] == used[1] == used[2] and len(used[0]) == 2  # values and scales
        more = sum(sizes.values()) - sum(path.stat().st_size for path in plain.glob("*.bin"))
        assert more == sum(size for name, size in sizes.items() if name.startswith(("exit", "draft", "predictor")))

    def test_the_engine_runs_as_without_exits(self, bundle: Path, plain: Path, backend: Backend) -> None:
        one, other = (Engine.load(folder, backend=backend) for folder in (bundle, plain))
        request: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "logprobs": 3}
        assert list(one.generate(token_ids(20), **request)) == list(other.generate(token_ids(20), **request))

    def test_the_reference_feeds_each_exit_what_it_reads(self, bundle: Path) -> None:
        reference = Reference.load(bundle)
        assert reference.depths.tolist() == [0, 1, 2, 3]
        states = list(reference.hidden)
        for stage in (*heads(bundle), predictor(bundle)):
            expected = [read_by(source.name, stage.layers[0], states) for source in stage.sources]
            for found, wanted in zip(reference.sources(stage), expected, strict=True):
                assert np.array_equal(found, wanted)

    def test_verify(self, bundle: Path) -> None:
        told = check(bundle, "cpu", 2)
        assert told["ok"], told["failures"]
        stages = {row["stage"]: row for row in told["stages"]}
        assert stages["exit_02"]["argmax_agreement"] > 0.9 and stages["predictor"]["cosine"] > 0.999
        assert stages["exit_03.hidden"]["argmax_agreement"] is None

    def test_verify_names_what_is_wrong(self, tmp_path: Path, tiny_checkpoint: Make, tiny_calibration: Make) -> None:
        folder = tiny_checkpoint()
        bundle = tmp_path / "bundle"
        build(open_checkpoint(folder), bundle, BuildOptions("fp32", calibration=tiny_calibration(folder)))
        reference = Reference.load(bundle)
        wrong = dataclasses.replace(reference, exit_hidden={**reference.exit_hidden, "exit_02": reference.hidden[0]})
        wrong.save(bundle)
        manifest = read_manifest(bundle)
        files = {**manifest.files, "reference.npz": file_infos(bundle)["reference.npz"]}
        manifest = dataclasses.replace(manifest, files=files)
        (bundle / "manifest.json").write_text(manifest.to_json(), encoding="utf-8")
        (failure,) = check(bundle, "cpu", 2)["failures"]
        assert failure.startswith("exit_02.hidden has a mean cosine")

    def test_inspect(self, bundle: Path, plain: Path) -> None:
        facts = summarise(bundle, read_manifest(bundle))
        stages = {stage["stage"]: stage for stage in facts["stages"]}
        assert stages["exit_01"]["bytes"] > 0 and stages["predictor"]["cosine"] > 0.999
        assert set(facts["shared_files"]) >= {"draft.bin", "draft_ids.npy", "vocab.bin"}
        lines = headlines(facts)
        assert "1 (hidden; under 0.5 nats)" in lines["exits"] and "3 (embedding+previous; drafts)" in lines["exits"]
        assert "trained: none" in headlines(summarise(plain, read_manifest(plain)))["exits"]


def draft_regions(graph: Path) -> set[tuple[str, ...]]:
    """File, offset and length of every tensor of the draft vocabulary."""
    model = onnx.load(graph, load_external_data=False)
    tensors = [t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    regions = {tuple(entry.value for entry in tensor.external_data) for tensor in tensors}
    return {region for region in regions if region[0] == "draft.bin"}


class TestRefused:
    def refusal(self, folder: Path, out: Path, place: Path, error: type[Exception], **options: Any) -> str:
        with pytest.raises(error) as caught:
            build(open_checkpoint(folder), out, BuildOptions("fp32", calibration=place, **options))
        assert "\n" not in str(caught.value) and not out.exists()
        return str(caught.value)

    def test_another_checkpoint(self, tmp_path: Path, tiny_checkpoint: Make, tiny_calibration: Make) -> None:
        place, other = tiny_calibration(tiny_checkpoint()), tiny_checkpoint(seed=1)
        message = self.refusal(other, tmp_path / "bundle", place, CheckpointError)
        identity = read_calibration(place).identity
        assert str(place) in message and identity[:12] in message and message.count("tiny (") == 2

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"draft_ids": np.array([5, 400], np.int32)}, "ids below 320"),
            ({"draft_ids": np.array([7, 5], np.int32)}, "rising list"),
            ({"heads": ()}, "depths []"),
            ({"predictor": None, "thresholds": None, "heads": "wide"}, "norm.weight of exit_01 is"),
        ],
    )
    def test_what_does_not_fit(self, change: dict[str, Any], says: str, tmp_path: Path, tiny_checkpoint: Make) -> None:
        folder = tiny_checkpoint()
        if change.get("heads") == "wide":
            change = {**change, "heads": make_calibration(tiny_checkpoint(hidden=128)).heads}
        place = tmp_path / "calibration"
        write_calibration(dataclasses.replace(make_calibration(folder), **change), place)
        message = self.refusal(folder, tmp_path / "bundle", place, CheckpointError)
        assert says in message and str(place) in message

    def test_blocks_that_miss_an_exit(self, tmp_path: Path, tiny_checkpoint: Make, tiny_calibration: Make) -> None:
        folder = tiny_checkpoint()
        message = self.refusal(folder, tmp_path / "bundle", tiny_calibration(folder), PlanError, blocks="1")
        assert "after layer 1" in message and "1,2,3 or auto" in message

    def test_a_wrong_head(
        self, tmp_path: Path, tiny_checkpoint: Make, tiny_calibration: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = OrtDialect.store_matrix

        def swap(self: Any, file: Any, name: str, weight: torch.Tensor) -> Any:
            return store(self, file, name, weight.flip(0) if name == "/fuse.weight" else weight)

        monkeypatch.setattr(OrtDialect, "store_matrix", swap)
        folder = tiny_checkpoint()
        message = self.refusal(folder, tmp_path / "bundle", tiny_calibration(folder), BuildError)
        assert "exit_02" in message and "mean cosine" in message
