"""Calibrations: what is written comes back, on the grid that bundles use, and damage is named."""

import dataclasses
import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save
from tiny_exits import make_calibration

from eexport.export.quantize import quantize
from eexport.models.checkpoint import open_checkpoint
from eexport.models.errors import CheckpointError
from eexport.models.exits import Calibration, ExitPredictor, Thresholds, check_fits, head_shapes
from eexport.models.exits_file import JSON_NAME, TENSORS_NAME, read_calibration, write_calibration

Make = Callable[..., Path]
Tensors = dict[str, NDArray[Any]]

NUMERICS = "ort, int8 and int8 for the vocabulary in blocks of 32"


@pytest.fixture(scope="module")
def calibration(tiny_checkpoint: Make) -> Calibration:
    return make_calibration(tiny_checkpoint("qwen2"))


@pytest.fixture
def folder(calibration: Calibration, tmp_path: Path) -> Path:
    """It as written; to be damaged."""
    write_calibration(calibration, tmp_path / "calibration")
    return tmp_path / "calibration"


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_calibration(folder)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)
    return str(caught.value)


def edit_json(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = folder / JSON_NAME
    raw = json.loads(path.read_text(encoding="utf-8"))
    edit(raw)
    path.write_text(json.dumps(raw), encoding="utf-8")


def put_tensors(folder: Path, data: bytes) -> None:
    """Another file of tensors, its size and hash on record."""
    (folder / TENSORS_NAME).write_bytes(data)
    facts = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    edit_json(folder, lambda raw: raw["tensors"].update(facts))


def edit_tensors(folder: Path, edit: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / TENSORS_NAME)
    edit(tensors)
    put_tensors(folder, save(tensors))


def with_tensor(calibration: Calibration, name: str, values: NDArray[np.float32]) -> Calibration:
    """The calibration with one tensor of its first head replaced."""
    head = calibration.heads[0]
    head = dataclasses.replace(head, tensors={**head.tensors, name: values})
    return dataclasses.replace(calibration, heads=(head, *calibration.heads[1:]))


class TestFile:
    def test_round_trip(self, calibration: Calibration, folder: Path) -> None:
        found = read_calibration(folder)
        assert (found.checkpoint, found.identity) == (calibration.checkpoint, calibration.identity)
        assert found.thresholds == calibration.thresholds == Thresholds((0.5, 0.5), 1.5, NUMERICS)
        assert found.record == calibration.record
        assert found.draft_ids.dtype == np.int32 and np.array_equal(found.draft_ids, calibration.draft_ids)
        assert found.predictor is not None and found.predictor.layers == (1, 2)
        assert found.exit_depths(3) == (1, 2) and found.exit_depths(4) == (1, 2, 3)
        for head, given in zip(found.heads, calibration.heads, strict=True):
            assert (head.name, head.depth, head.features) == (given.name, given.depth, given.features)
            assert head.tensors.keys() == given.tensors.keys()
            for name, values in head.tensors.items():
                assert values.dtype == np.float32 and values.shape == given.tensors[name].shape
                error = np.abs(values - given.tensors[name]).max()
                assert error <= np.abs(given.tensors[name]).max() * (0.006 if values.ndim == 2 else 0.0005)

    def test_written_again_it_is_the_same(self, folder: Path, tmp_path: Path) -> None:
        write_calibration(read_calibration(folder), tmp_path / "again")
        for name in (JSON_NAME, TENSORS_NAME):
            assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes()

    def test_a_byte_a_weight(self, calibration: Calibration, folder: Path) -> None:
        stored = load_file(folder / TENSORS_NAME)
        assert {str(values.dtype) for values in stored.values()} == {"int8", "float16", "int32"}
        trained = [head.tensors for head in calibration.heads]
        weights = sum(values.size for tensors in trained for values in tensors.values())
        assert (folder / TENSORS_NAME).stat().st_size < 1.4 * weights + 65_536  # and the predictor

    def test_nothing_but_heads(self, calibration: Calibration, tmp_path: Path) -> None:
        write_calibration(dataclasses.replace(calibration, predictor=None, thresholds=None), tmp_path / "heads")
        found = read_calibration(tmp_path / "heads")
        assert found.predictor is None and found.thresholds is None

    def test_no_threshold_for_the_previous_token(self, calibration: Calibration, tmp_path: Path) -> None:
        thresholds = Thresholds((0.0, 0.25), float("inf"), NUMERICS)
        write_calibration(dataclasses.replace(calibration, thresholds=thresholds), tmp_path / "calibration")
        assert "Infinity" not in (tmp_path / "calibration" / JSON_NAME).read_text(encoding="utf-8")
        assert read_calibration(tmp_path / "calibration").thresholds == thresholds

    def test_a_vector_too_large_for_fp16(self, calibration: Calibration, tmp_path: Path) -> None:
        norm = np.full(64, 1.0, np.float32)
        norm[3] = 70_001.0
        write_calibration(with_tensor(calibration, "norm.weight", norm), tmp_path / "calibration")
        assert np.array_equal(read_calibration(tmp_path / "calibration").heads[0].tensors["norm.weight"], norm)

    @pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
    @pytest.mark.parametrize("name", ["norm.weight", "mlp.up_proj.weight"])
    def test_what_cannot_be_stored(self, name: str, value: float, calibration: Calibration, tmp_path: Path) -> None:
        values = np.ones_like(calibration.heads[0].tensors[name])
        values[-1] = value
        with pytest.raises(CheckpointError, match=f"exit_01.{name} cannot be stored"):
            write_calibration(with_tensor(calibration, name, values), tmp_path / "calibration")
        assert not list(tmp_path.iterdir())


class TestGrid:
    """Matrices lie on the grid of int8 bundles."""

    @pytest.mark.parametrize("scale", [1e3, 1.0, 1e-2, 1e-3, 1e-4, 3e-5, 1e-6, 1e-12, 0.0])
    @pytest.mark.parametrize("width", [64, 100])
    def test_quantising_again_changes_nothing(
        self, width: int, scale: float, calibration: Calibration, tmp_path: Path
    ) -> None:
        """However small the weights are, as those of residual branches that began at zero."""
        random = np.random.default_rng(0).standard_normal((96, width)) * scale
        weight = (random * 10.0 ** np.random.default_rng(1).uniform(-3, 0, (96, 1))).astype(np.float32)
        write_calibration(with_tensor(calibration, "mlp.up_proj.weight", weight), tmp_path / "calibration")
        stored = read_calibration(tmp_path / "calibration").heads[0].tensors["mlp.up_proj.weight"]
        assert stored.shape == weight.shape
        peaks = np.abs(weight).max(-1, keepdims=True)
        assert (np.abs(stored - weight) <= np.maximum(peaks / 200, 1e-5)).all()
        padded = torch.nn.functional.pad(torch.from_numpy(stored), (0, -width % 32))
        for dtype in (torch.float32, torch.float16):
            assert torch.equal(quantize(padded, 8, 32, dtype).dequantize(), padded)


class TestFolder:
    def test_an_older_calibration_is_replaced_when_asked_for(self, calibration: Calibration, folder: Path) -> None:
        newer = dataclasses.replace(calibration, record={"seed": 1})
        with pytest.raises(CheckpointError, match="holds a calibration already"):
            write_calibration(newer, folder)
        assert read_calibration(folder).record["seed"] == 0
        write_calibration(newer, folder, force=True)
        assert read_calibration(folder).record == {"seed": 1}
        assert [path.name for path in folder.parent.iterdir()] == [folder.name]

    @pytest.mark.parametrize("force", [False, True])
    def test_anything_else_is_left_alone(self, force: bool, calibration: Calibration, tmp_path: Path) -> None:
        (tmp_path / "manifest.json").write_text("{}")
        with pytest.raises(CheckpointError, match="not a calibration"):
            write_calibration(calibration, tmp_path, force=force)
        assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]

    def test_a_failure_keeps_what_was_there(
        self, calibration: Calibration, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write = Path.write_text

        def fail(path: Path, text: str, **options: Any) -> int:
            if path.name == JSON_NAME:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            return write(path, text, **options)

        monkeypatch.setattr(Path, "write_text", fail)
        with pytest.raises(CheckpointError, match="No space left"):
            write_calibration(dataclasses.replace(calibration, record={}), folder, force=True)
        assert read_calibration(folder).record["seed"] == 0
        assert [path.name for path in folder.parent.iterdir()] == [folder.name]


class TestDamaged:
    def test_none_there(self, tmp_path: Path) -> None:
        assert "no such folder" in refusal(tmp_path / "absent")
        assert JSON_NAME in refusal(tmp_path)

    def test_another_version(self, folder: Path) -> None:
        edit_json(folder, lambda raw: raw.update(format_version=1))
        assert "format version 1" in refusal(folder)

    @pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", "\ufffd", "[" * 100_000])
    def test_broken_json(self, text: str, folder: Path) -> None:
        (folder / JSON_NAME).write_text(text, encoding="utf-8")
        assert "damaged" in refusal(folder)

    @pytest.mark.parametrize("value", [..., None, 3, "text", [], [1], {}, [{}], [None]])
    def test_any_part_missing_or_of_another_type(self, value: object, folder: Path) -> None:
        original = (folder / JSON_NAME).read_text(encoding="utf-8")
        for key in json.loads(original):
            (folder / JSON_NAME).write_text(original, encoding="utf-8")
            edit_json(folder, lambda raw, key=key: raw.pop(key) if value is ... else raw.update({key: value}))  # type: ignore[misc]
            if (key, value) in [("checkpoint", "text"), ("identity", "text"), ("record", {}), ("thresholds", None)]:
                read_calibration(folder)  # as good as another
            else:
                refusal(folder)

    def test_damaged_or_lost_tensors(self, folder: Path) -> None:
        path = folder / TENSORS_NAME
        content = path.read_bytes()
        middle = len(content) // 2
        for damaged in (content[:-1], b"", content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]):
            path.write_bytes(damaged)
            assert TENSORS_NAME in refusal(folder)
        path.unlink()
        assert TENSORS_NAME in refusal(folder)

    @pytest.mark.parametrize(
        "edit",
        [
            lambda tensors: tensors.pop("draft_ids"),
            lambda tensors: tensors.pop("heads.exit_01.mlp.up_proj.weight.scales"),
            lambda tensors: tensors.update({"heads.exit_09.norm.weight": np.ones(64, np.float16)}),
            lambda tensors: tensors.update({"draft_ids": np.ones(4, np.float32)}),
            lambda tensors: tensors.update({"predictor.hidden.weight.scales": np.ones((4, 4), np.float16)}),
        ],
    )
    def test_tensors_that_do_not_belong_together(self, edit: Callable[[Tensors], object], folder: Path) -> None:
        edit_tensors(folder, edit)
        assert "damaged" in refusal(folder)

    def test_a_file_that_is_no_safetensors(self, folder: Path) -> None:
        put_tensors(folder, b"text")
        assert "damaged" in refusal(folder)


class TestFit:
    def misfit(self, calibration: Calibration, checkpoint: Path) -> str:
        with pytest.raises(CheckpointError, match="^place: ") as caught:
            check_fits(calibration, open_checkpoint(checkpoint), "place")
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def test_its_own_checkpoint(self, calibration: Calibration, tiny_checkpoint: Make) -> None:
        check_fits(calibration, open_checkpoint(tiny_checkpoint("qwen2")), "place")

    def test_another_checkpoint(self, calibration: Calibration, tiny_checkpoint: Make) -> None:
        for other in (tiny_checkpoint("qwen2", seed=1), tiny_checkpoint("qwen2", hidden=128), tiny_checkpoint("llama")):
            message = self.misfit(calibration, other)
            assert calibration.identity[:12] in message and "calibrate this checkpoint" in message

    @pytest.mark.parametrize(
        ("head", "says"),
        [
            ({"depth": 4}, "depths [4, 2, 3]"),
            ({"depth": 2}, "depths [2, 2, 3]"),
            ({"depth": 0}, "depths [0, 2, 3]"),
            ({"name": "exit_02"}, "two heads have one name"),
            ({"name": "block_00"}, "'block_00' is no name"),
            ({"name": "draft"}, "'draft' is no name"),
            ({"name": "../exit"}, "is no name"),
            ({"features": ()}, "exit_01 cannot read nothing"),
            ({"features": ("hidden.2",)}, "exit_01 cannot read hidden.2 at depth 1"),
            ({"features": ("hidden", "hidden")}, "cannot read"),
            ({"features": ("logits",)}, "cannot read logits"),
            ({"features": ("hidden", "embedding")}, "exit_01 lacks fuse.weight"),
        ],
    )
    def test_heads(self, head: dict[str, Any], says: str, calibration: Calibration, tiny_checkpoint: Make) -> None:
        first = dataclasses.replace(calibration.heads[0], **head)
        changed = dataclasses.replace(calibration, heads=(first, *calibration.heads[1:]))
        assert says in self.misfit(changed, tiny_checkpoint("qwen2"))

    def test_tensors(self, calibration: Calibration, tiny_checkpoint: Make) -> None:
        checkpoint = tiny_checkpoint("qwen2")
        wide = with_tensor(calibration, "norm.weight", np.ones(65, np.float32))
        assert "norm.weight of exit_01 is (65,), this model needs (64,)" in self.misfit(wide, checkpoint)
        more = with_tensor(calibration, "self_attn.q_norm.weight", np.ones(16, np.float32))
        assert "self_attn.q_norm.weight that it does not use" in self.misfit(more, checkpoint)

    @pytest.mark.parametrize("layers", [(), (0,), (4,), (1, 5)])
    def test_predictor_layers(self, layers: tuple[int, ...], calibration: Calibration, tiny_checkpoint: Make) -> None:
        changed = dataclasses.replace(calibration, predictor=ExitPredictor(layers, {}))
        assert f"cannot read layers {list(layers)}" in self.misfit(changed, tiny_checkpoint("qwen2"))

    def test_a_predictor_of_other_exits(self, calibration: Calibration, tiny_checkpoint: Make) -> None:
        changed = dataclasses.replace(calibration, heads=calibration.heads[1:], thresholds=None)
        assert "output.weight of predictor is (3, 256)" in self.misfit(changed, tiny_checkpoint("qwen2"))

    @pytest.mark.parametrize(
        ("thresholds", "says"),
        [
            (Thresholds((0.5,), 1.0, NUMERICS), "1 entropy thresholds for 2 exits"),
            (Thresholds((0.5, -0.1), 1.0, NUMERICS), "not a number of 0 or more"),
            (Thresholds((0.5, float("nan")), 1.0, NUMERICS), "not a number of 0 or more"),
            (Thresholds((0.5, 0.5), float("nan"), NUMERICS), "not a number of 0 or more"),
        ],
    )
    def test_thresholds(
        self, thresholds: Thresholds, says: str, calibration: Calibration, tiny_checkpoint: Make
    ) -> None:
        changed = dataclasses.replace(calibration, thresholds=thresholds)
        assert says in self.misfit(changed, tiny_checkpoint("qwen2"))

    @pytest.mark.parametrize("ids", [[], [5, 4], [5, 5], [-1, 3], [3, 320]])
    def test_draft_vocabulary(self, ids: list[int], calibration: Calibration, tiny_checkpoint: Make) -> None:
        changed = dataclasses.replace(calibration, draft_ids=np.array(ids, np.int32))
        assert "draft vocabulary" in self.misfit(changed, tiny_checkpoint("qwen2"))


def test_shapes_of_a_head_that_reads_several(tiny_checkpoint: Make) -> None:
    spec = open_checkpoint(tiny_checkpoint("qwen3")).spec
    shapes = head_shapes(spec, ("hidden", "embedding", "previous"))
    assert shapes["fuse.weight"] == (64, 192) and shapes["fuse_norm.2.weight"] == (64,)
    assert shapes["self_attn.q_norm.weight"] == (16,) and shapes["norm.weight"] == (64,)
    assert head_shapes(spec, ("hidden",)).keys() == spec.layer_shapes().keys() | {"norm.weight"}
