"""What a user can get wrong: one line, exit code 2, no traceback, nothing left behind."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from command import Call
from tiny import edit_config, edit_tensors, make_checkpoint
from tiny_exits import make_calibration

from eexport.models.exits_file import write_calibration


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle, tmp_path / "copy"))


def test_usage_errors_are_one_line(call: Call, bundle: Path) -> None:
    assert "No such command 'ru" in call("rum").error
    assert "eexport run --help" in call("run").error
    assert "--threads" in call("run", bundle, "x", "--threads", 0).error
    assert "ID=VALUE" in call("run", bundle, "x", "--logit-bias", "7:3").error
    assert "'int9'" in call("build", "x", "-o", "y", "--precision", "int9").error


def test_checkpoint_errors(call: Call, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "no such file or folder" in call("build", tmp_path / "nowhere", "-o", out).error
    (tmp_path / "empty").mkdir()
    assert "config.json" in call("build", tmp_path / "empty", "-o", out).error
    folder = make_checkpoint(tmp_path / "c", layers=1)
    edit_config(folder, model_type="mamba")
    assert "mamba" in call("build", folder, "-o", out).error
    edit_config(folder, model_type="llama")
    edit_tensors(folder, lambda tensors: tensors.pop("model.norm.weight"))
    assert "model.norm.weight" in call("build", folder, "-o", out).error
    assert not out.exists()


@pytest.mark.parametrize("blocks", ["0", "5", "3,2", "x"])
def test_block_plans_that_do_not_fit(call: Call, checkpoint: Path, tmp_path: Path, blocks: str) -> None:
    assert f"--blocks {blocks}" in call("build", checkpoint, "-o", tmp_path / "out", "--blocks", blocks).error
    assert not list(tmp_path.iterdir())


def test_calibrations_that_do_not_fit(call: Call, checkpoint: Path, tmp_path: Path) -> None:
    other, exits, out = make_checkpoint(tmp_path / "other", layers=4, seed=1), tmp_path / "exits", tmp_path / "out"
    write_calibration(make_calibration(other), exits)
    told = call("build", checkpoint, "-o", out, "--calibration", exits).error
    assert "is a calibration of other (" in told and "not of tiny (" in told
    assert "no such folder" in call("build", checkpoint, "-o", out, "--calibration", tmp_path / "nowhere").error
    assert "after layer 1" in call("build", other, "-o", out, "--calibration", exits, "--blocks", "2").error
    assert not out.exists()


def test_widths_that_the_precision_cannot_take(call: Call, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "c", layers=1, hidden=48, heads=3, kv_heads=1)
    assert "--precision fp16" in call("build", folder, "-o", tmp_path / "out").error


def test_weights_that_overflow_are_refused(call: Call, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "c", layers=1)
    edit_tensors(folder, lambda t: t["model.layers.0.mlp.down_proj.weight"].mul_(1e6))
    done = call("build", folder, "-o", tmp_path / "out", "--precision", "fp16", "--dialect", "standard")
    assert "parity failed" in done.error and "fp32" in done.error
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_output_folder_that_is_in_use(call: Call, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("mine")
    assert "not empty" in call("build", checkpoint, "-o", tmp_path).error
    assert "not empty" in call("build", checkpoint, "-o", tmp_path, "--force").error
    assert "is a file" in call("build", checkpoint, "-o", tmp_path / "letter.txt").error
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


@pytest.mark.parametrize("name", ["run", "chat", "bench", "inspect", "verify"])
def test_what_is_not_a_bundle(call: Call, tmp_path: Path, name: str) -> None:
    prompt = ["hello"] if name == "run" else []
    assert "no such folder" in call(name, tmp_path / "nowhere", *prompt).error
    assert "manifest.json" in call(name, tmp_path, *prompt).error


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        ("block_01.bin", flip, "sha256"),
        ("tokenizer.json", lambda path: path.write_bytes(path.read_bytes()[:-9]), "bytes"),
        ("head.onnx", Path.unlink, "missing"),
    ],
)
def test_damaged_bundles_name_the_file(
    call: Call, copy: Path, name: str, damage: Callable[[Path], object], says: str
) -> None:
    damage(copy / name)
    error = call("run", copy, "hello").error
    assert name in error and says in error
    checked = call("verify", copy)
    assert checked.code == 1 and name in checked.err and "Traceback" not in checked.err
    told = call("verify", copy, "--json")
    assert told.code == 1 and name in json.loads(told.out)["failures"][0]


def test_damaged_manifest(call: Call, copy: Path) -> None:
    path = copy / "manifest.json"
    path.write_text(path.read_text()[:500])
    assert "manifest.json is damaged" in call("inspect", copy).error


def test_verify_fails_where_the_stages_are_not_the_reference(call: Call, copy: Path) -> None:
    path = copy / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["parity"]["least_cosine"] = 1.1
    path.write_text(json.dumps(manifest))
    done = call("verify", copy)
    assert done.code == 1 and "block_00 has a mean cosine" in done.err and "chain" not in done.err


def test_requests_that_cannot_be(call: Call, bundle: Path) -> None:
    assert "temperature" in call("run", bundle, "x", "--temperature", "nan").error
    assert "max_tokens" in call("run", bundle, "x", "--max-tokens", 0).error
    assert "top_p" in call("run", bundle, "x", "--top-p", 1.5).error
    assert "logit_bias" in call("run", bundle, "x", "--logit-bias", "7=1e9").error
    assert "the context 512" in call("run", bundle, "long " * 600).error
    assert "--context" in call("run", bundle, "x", "--context", 513).error
    assert call("run", bundle, "", "--max-tokens", 2).code == 0


def test_devices_that_are_not_there(call: Call, bundle: Path) -> None:
    for name in ("run", "bench", "verify", "chat"):
        prompt = ["hello"] if name == "run" else []
        assert "--device cuda" in call(name, bundle, *prompt, "--device", "cuda").error
    assert "auto, cpu, cuda" in call("run", bundle, "x", "--device", "tpu").error


def test_no_chat_template(call: Call, copy: Path) -> None:
    path = copy / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["text"]["chat_template"] = None
    path.write_text(json.dumps(manifest))
    assert "eexport run" in call("chat", copy).error
    assert "no chat template" in call("run", copy, "hi", "--chat").error
    assert call("run", copy, "hi", "--max-tokens", 2).code == 0
