"""manifest.json: it comes back as it was written, and anything else is refused in one line."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eexport.runtime.engine import Engine
from eexport.runtime.errors import BundleError
from eexport.runtime.exits import ExitRule
from eexport.runtime.manifest import MANIFEST_NAME, SCHEMA_VERSION, check_files, read_manifest, sha256

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def bundle(tiny_checkpoint: Make, tiny_bundle: Make) -> Path:
    return tiny_bundle(tiny_checkpoint(layers=4), precision="int8", blocks="2")


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(bundle, tmp_path / "copy"))


def edit_manifest(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = folder / MANIFEST_NAME
    raw = json.loads(path.read_text(encoding="utf-8"))
    edit(raw)
    path.write_text(json.dumps(raw), encoding="utf-8")


def refusal(folder: Path) -> str:
    with pytest.raises(BundleError) as caught:
        check_files(folder, read_manifest(folder))
    message = str(caught.value)
    assert "\n" not in message and str(folder) in message
    return message


def test_round_trip(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    assert manifest.to_json() == (bundle / MANIFEST_NAME).read_text(encoding="utf-8")
    assert manifest.schema_version == SCHEMA_VERSION
    assert [stage.name for stage in manifest.stages] == ["embed", "block_00", "block_01", "head"]
    assert [block.layers for block in manifest.blocks] == [(0, 2), (2, 4)]
    assert manifest.boundaries == (2,)
    assert manifest.blocks[0].hidden_layers == (1,)
    assert manifest.blocks[1].hidden_layers == (3,)  # depths 1-4 feed the exit predictor, wherever the cuts are
    assert len(manifest.blocks[1].kv_inputs) == 4
    check_files(bundle, manifest)


def test_it_records_what_decides_the_tokens(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    assert (manifest.precision.weights, manifest.precision.vocab_weights) == ("int8", "int8")
    assert manifest.precision.block_size == 32
    assert manifest.kv_bytes_per_token() == 4 * 2 * 2 * 16 * 4  # layers, K and V, KV heads, width, fp32
    assert {"eexport", "torch", "onnx", "onnxruntime", "checkpoint", "options"} <= manifest.built_with.keys()
    assert [stage["stage"] for stage in manifest.parity["stages"]] == [
        *(stage.name for stage in manifest.stages),
        "chain",
    ]


def test_every_file_is_hashed(bundle: Path) -> None:
    names = {path.name for path in bundle.iterdir()}
    assert set(read_manifest(bundle).files) == names - {MANIFEST_NAME}
    infos = read_manifest(bundle).files
    assert all(sha256(bundle / name) == info.sha256 for name, info in infos.items())


def test_not_a_bundle(tmp_path: Path) -> None:
    assert "no such folder" in refusal(tmp_path / "absent")
    assert MANIFEST_NAME in refusal(tmp_path)


@pytest.mark.parametrize("version", [0, SCHEMA_VERSION + 1, "1", None])
def test_other_schema_version(copy: Path, version: object) -> None:
    edit_manifest(copy, lambda raw: raw.update(schema_version=version))
    assert f"schema version {version}" in refusal(copy)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '"text"', "\ufffd"])
def test_broken_json(copy: Path, text: str) -> None:
    (copy / MANIFEST_NAME).write_text(text, encoding="utf-8")
    assert "damaged" in refusal(copy)


def test_invalid_utf8(copy: Path) -> None:
    (copy / MANIFEST_NAME).write_bytes(b'{"schema_version": 1, "dialect": "\xff"}')
    assert "damaged" in refusal(copy)


@pytest.mark.parametrize("value", [..., None, 3, "text", [], [1], {}, [{}], [None]])
def test_any_part_missing_or_of_another_type(copy: Path, bundle: Path, value: object) -> None:
    """No damage ends in a traceback; what is read in full may be accepted."""
    original = (bundle / MANIFEST_NAME).read_text(encoding="utf-8")
    for key in json.loads(original):
        (copy / MANIFEST_NAME).write_text(original, encoding="utf-8")
        edit_manifest(copy, lambda raw, key=key: raw.pop(key) if value is ... else raw.update({key: value}))  # type: ignore[misc]
        try:
            check_files(copy, read_manifest(copy))
        except BundleError as error:
            assert "\n" not in str(error)
        else:
            assert value is not ..., f"{key} was not missed"


@pytest.mark.parametrize("name", ["../outside.bin", "/etc/hostname", "sub/inside.bin", "."])
def test_files_lie_in_the_bundle(copy: Path, name: str) -> None:
    edit_manifest(copy, lambda raw: raw["files"].update({name: raw["files"]["head.onnx"]}))
    assert "damaged" in refusal(copy)


@pytest.mark.parametrize("edit", ["graph", "chat_template"])
def test_only_hashed_files_are_read(copy: Path, edit: str) -> None:
    outside = copy.parent / "outside"
    outside.write_text("{{ messages }}")
    if edit == "graph":
        edit_manifest(copy, lambda raw: raw["stages"][0].update(graph="../outside"))
    else:
        edit_manifest(copy, lambda raw: raw["text"].update(chat_template="../outside"))
    assert "../outside" in refusal(copy)


def test_stages_out_of_order(copy: Path) -> None:
    edit_manifest(copy, lambda raw: raw["stages"].reverse())
    assert "embed" in refusal(copy)


@pytest.mark.parametrize("name", ["vocab.bin", "block_01.bin", "block_00.onnx", "tokenizer.json", "reference.npz"])
def test_damaged_file_is_named(copy: Path, name: str) -> None:
    path = copy / name
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    assert name in (message := refusal(copy)) and str(len(content)) in message
    middle = len(content) // 2
    path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    assert name in (message := refusal(copy)) and "sha256" in message
    path.unlink()
    assert "missing" in refusal(copy)
    with pytest.raises(BundleError, match=name):
        Engine.load(copy)


def test_exits_that_do_not_fit(
    tmp_path: Path, tiny_checkpoint: Make, tiny_calibration: Make, tiny_bundle: Make
) -> None:
    checkpoint = tiny_checkpoint()
    folder = tiny_bundle(checkpoint, calibration=tiny_calibration(checkpoint))
    manifest = read_manifest(folder)
    assert manifest.to_json() == (folder / MANIFEST_NAME).read_text(encoding="utf-8")
    exits = manifest.exits
    assert exits is not None

    def damaged(**changes: Any) -> str:
        (tmp_path / MANIFEST_NAME).write_text(dataclasses.replace(manifest, **changes).to_json(), encoding="utf-8")
        return refusal(tmp_path)

    fewer = dataclasses.replace(exits, rule=ExitRule((0.5,), 1.0))
    assert "1 thresholds for 2 exits" in damaged(exits=fewer)
    assert "predictor" in damaged(exits=dataclasses.replace(exits, heads=exits.heads[1:], rule=None))
    assert "no block ends" in damaged(stages=(*manifest.stages[:2], manifest.stages[-1]))
    assert "../ids.npy" in damaged(exits=dataclasses.replace(exits, draft_ids="../ids.npy"))
    edit_manifest(tmp_path, lambda raw: raw["exits"].pop("heads"))
    assert "damaged" in refusal(tmp_path)
