"""Tiny checkpoints, bundles and engines, made once each for the whole session."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import edit_tensors, make_checkpoint
from tiny_exits import make_calibration

from eexport.export.build import BuildOptions, build
from eexport.models.checkpoint import open_checkpoint
from eexport.models.exits_file import write_calibration
from eexport.runtime.backend_ort import OrtBackend
from eexport.runtime.chain import Chain
from eexport.runtime.engine import Engine
from eexport.runtime.manifest import read_manifest

# One onnxruntime pool serves the whole process, so every test has to ask for the same number of threads: the
# default, which is the number of allowed CPUs.
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def backend() -> OrtBackend:
    return OrtBackend()


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`make_checkpoint` into a folder of its own.

    With `soft`, layers change the hidden state less and attention is less sharp than random weights make it,
    which would turn the error of int4 weights into a build that is refused.
    """
    made: dict[str, Path] = {}

    def make(arch: str = "llama", *, soft: bool = False, **options: Any) -> Path:
        key = repr((arch, soft, sorted(options.items())))
        if key not in made:
            made[key] = make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", arch, **options)
            if soft:
                edit_tensors(made[key], _soften)
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_calibration(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`make_calibration` for a checkpoint, written into a folder of its own."""
    made: dict[str, Path] = {}

    def make(checkpoint: Path, **options: Any) -> Path:
        key = repr((checkpoint, sorted(options.items())))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("calibration") / "tiny"
            write_calibration(make_calibration(checkpoint, **options), made[key])
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A checkpoint folder built with some `BuildOptions`; not to be changed."""
    made: dict[str, Path] = {}

    def make(checkpoint: Path, **options: Any) -> Path:
        key = repr((checkpoint, sorted(options.items())))
        if key not in made:
            folder = tmp_path_factory.mktemp("bundle") / "tiny"
            build(open_checkpoint(checkpoint), folder, BuildOptions(**{"precision": "fp32"} | options))
            made[key] = folder
        return made[key]

    return make


@pytest.fixture
def tiny_engine(backend: OrtBackend) -> Callable[..., Engine]:
    """An engine on a bundle."""

    def load(bundle: Path, **options: Any) -> Engine:
        return Engine.load(bundle, **{"backend": backend} | options)

    return load


@pytest.fixture
def tiny_chain(backend: OrtBackend) -> Callable[..., Chain]:
    """The bare chain of a bundle."""

    def load(bundle: Path, context: int = 512) -> Chain:
        return Chain(bundle, read_manifest(bundle), backend, context)

    return load


def _soften(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.embed_tokens.weight"].mul_(4)
    for name, tensor in tensors.items():
        if name.endswith(("q_proj.weight", "q_norm.weight", "q_proj.bias")):
            tensor.mul_(0.2)
