"""The wheel as a device gets it: an empty environment, no torch, and the commands that belong there."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tiny import make_checkpoint

from eexport.export.build import BuildOptions, build
from eexport.models.checkpoint import open_checkpoint

ROOT = Path(__file__).parents[1]
PACKAGES = ("calibration", "export", "models", "runtime")


def _run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a copy: building in place leaves files that a later wheel would pick up
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name)
    _run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, source, cwd=folder)
    (found,) = folder.glob("eexport-*.whl")
    return found


def test_the_wheel_holds_the_four_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert all(name.startswith(("eexport/", "eexport-")) for name in names)
    for folder in PACKAGES:
        inside = (path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file())
        ours = {path for path in inside if not {"ruff.toml", "__pycache__", ".ruff_cache"} & {*path.parts}}
        assert {f"eexport/{path}" for path in ours} - set(names) == set()
    assert "eexport/models/recipes/smollm2-135m-instruct.json" in names


def test_the_runtime_works_where_only_the_wheel_is_installed(wheel: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    build(open_checkpoint(make_checkpoint(tmp_path / "checkpoint")), bundle, BuildOptions(precision="int8"))
    _run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python, eexport = (tmp_path / "venv/bin" / name for name in ("python", "eexport"))
    _run(python, "-m", "pip", "install", "-q", wheel, cwd=tmp_path)

    installed = _run(python, "-m", "pip", "list", "--format=freeze", cwd=tmp_path)
    names = {line.partition("==")[0] for line in installed.splitlines()}
    assert not names & {"torch", "transformers", "onnx", "safetensors", "gguf"}
    assert _run(eexport, "run", bundle, "Hello", "--max-tokens", "3", "--raw", cwd=tmp_path)
    assert "block_00" in _run(eexport, "inspect", bundle, cwd=tmp_path)
    assert "onnxruntime" in _run(eexport, "doctor", cwd=tmp_path)
    refused = subprocess.run([eexport, "build", "x", "-o", "y"], cwd=tmp_path, capture_output=True, text=True)
    assert refused.returncode == 2 and "eexport[export]" in refused.stderr
