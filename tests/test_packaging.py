"""What is shipped, and that imports point one way: the device runtime needs neither torch nor the exporter."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS = sorted(path.parent for path in ROOT.glob("*/__init__.py"))
FILES = [path for folder in FOLDERS for path in sorted(folder.rglob("*.py"))]

RUNTIME = {"click", "jinja2", "numpy", "onnxruntime", "rich", "tokenizers"}
PROBE = {"matplotlib"}
EXPORT = RUNTIME | {"gguf", "huggingface_hub", "onnx", "safetensors", "torch"}
# What a folder may import: third-party modules, and folders of this project.
ALLOWED = {
    "runtime": (RUNTIME, {"runtime"}),
    "models": (EXPORT - {"onnxruntime", "onnx", "click", "rich", "jinja2"}, {"models"}),
    "export": (EXPORT, {"export", "models", "runtime"}),
    "calibration": (EXPORT | PROBE, {"calibration", "models", "runtime"}),
}
HEAVY = ["torch", "transformers", "onnx", "gguf", "safetensors", "huggingface_hub", "psutil", "pytest", *PROBE]


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            yield str(node.module)


def test_packages_are_the_folders() -> None:
    names = [folder.name for folder in FOLDERS]
    assert names == ["calibration", "export", "models", "runtime"]
    setuptools = PROJECT["tool"]["setuptools"]
    assert setuptools["packages"] == [f"eexport.{name}" for name in names]
    assert setuptools["package-dir"] == {f"eexport.{name}": name for name in names}
    for folder in FOLDERS:
        assert (folder / "py.typed").is_file()
        nested = {path.parent for path in folder.rglob("*.py")} - {folder}
        assert not nested, "a package that is not listed would be left out of the wheel"


def test_files_are_short() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert not {path: length for path, length in lengths.items() if length >= 400}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports(path: Path) -> None:
    libraries, folders = ALLOWED[path.parent.name]
    if path.match("export/cli*.py"):  # the command line is the one place that knows every folder
        folders = {*folders, "calibration"}
    for module in imports(path):
        top, _, rest = module.partition(".")
        if top == "eexport":
            assert rest.partition(".")[0] in folders, f"{module} is not for {path.parent.name}/"
        else:
            assert top in libraries | sys.stdlib_module_names, f"{module} is not for {path.parent.name}/"


def test_dependencies_are_declared() -> None:
    def names(requirements: list[str]) -> set[str]:
        return {requirement.partition(">=")[0] for requirement in requirements}

    assert names(PROJECT["project"]["dependencies"]) == RUNTIME
    assert names(PROJECT["project"]["optional-dependencies"]["export"]) == EXPORT - RUNTIME
    assert names(PROJECT["project"]["optional-dependencies"]["probe"]) == PROBE


def test_the_runtime_and_the_command_load_without_torch() -> None:
    modules = [f"eexport.runtime.{path.stem}" for path in FILES if path.parent.name == "runtime"]
    modules = [module.removesuffix(".__init__") for module in modules] + ["eexport.export.cli"]
    code = (
        f"import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({HEAVY}))\n"  # importing any of them now fails
        f"for module in {modules}: importlib.import_module(module)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_version() -> None:
    assert version("eexport") == PROJECT["project"]["version"]
