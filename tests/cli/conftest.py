"""Bundles and calibrations for the tests of the command line, and ways to call it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from calibrating import OPTIONS, hurry
from command import GRIN, Call, Outcome, Process, Start, start_process
from tiny import byte_id, edit_tensors, make_checkpoint, make_scripted
from torch import Tensor

from eexport.export.cli import main


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Call:
    """Run the command line in this process."""

    def run(*arguments: object) -> Outcome:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        return Outcome(code, *capfd.readouterr())

    return run


@pytest.fixture
def start() -> Iterator[Start]:
    """Start the command line as a process; it is gone when the test is."""
    running: list[Process] = []

    def begin(*arguments: object, **options: object) -> Process:
        running.append(start_process(*arguments, **options))
        return running[-1]

    yield begin
    for process in running:
        process.kill()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        process.wait()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", layers=4)


@pytest.fixture(scope="session")
def bundle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It as an int8 bundle of two blocks; not to be changed."""
    return _built(checkpoint, tmp_path_factory.mktemp("bundles") / "tiny", "--precision", "int8")


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that answers anything with a grinning face on a line, over and over, up to 60,000 tokens."""
    folder = tmp_path_factory.mktemp("endless")
    grin = [byte_id(byte) for byte in GRIN.encode()]
    follows = dict(zip(grin, [*grin[1:], grin[0]], strict=True))
    make_scripted(folder / "checkpoint", follows, default=grin[0], layers=2, context=60_000)
    return _built(folder / "checkpoint", folder / "bundle", "--precision", "fp32")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


@pytest.fixture(scope="session")
def six(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of six layers, of which those after the second change little: exits often agree."""

    def weaken(tensors: dict[str, Tensor]) -> None:
        for layer in range(2, 6):
            for name in ("self_attn.o_proj", "mlp.down_proj"):
                tensors[f"model.layers.{layer}.{name}.weight"].mul_(0.2)

    return edit_tensors(make_checkpoint(tmp_path_factory.mktemp("six") / "tiny", layers=6), weaken)


@pytest.fixture(scope="session")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts to test on, with a task among them."""
    path = tmp_path_factory.mktemp("data") / "held.jsonl"
    rows = [
        {"kind": "text", "prompt": "hello there"},
        {"kind": "math", "prompt": "What is 1 + 2?", "answer": "3"},
        {"kind": "code", "prompt": "a shared one"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def calibrate(call: Call, six: Path, held: Path) -> Callable[..., Outcome]:
    """Calibrate the tiny model into a folder; its exits are given, so that what is kept does not hang on timings."""

    def run(output: Path, *more: object, exits: str | None = "2,4") -> Outcome:
        chosen = () if exits is None else ("--exits", exits)
        return call("calibrate", six, "-o", output, "--test-data", held, *OPTIONS, *chosen, *more)

    return run


@pytest.fixture(scope="session")
def whole(six: Path, held: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same calibration in one go, with its work folder beside it; not to be changed."""
    out = tmp_path_factory.mktemp("whole") / "out"
    options = ["--test-data", held, *OPTIONS, "--exits", "2,4", "--work", out.with_name("work"), "--json"]
    with pytest.MonkeyPatch.context() as patch:
        hurry(patch)
        assert main([str(argument) for argument in ["calibrate", six, "-o", out, *options]]) == 0
    return out


@pytest.fixture
def work(whole: Path) -> Path:
    """Its work folder, in which all is done but the thresholds; goes on with other budgets, and is not changed."""
    return whole.with_name("work")


def _built(checkpoint: Path, out: Path, *options: str) -> Path:
    assert main(["build", str(checkpoint), "-o", str(out), "--blocks", "2", *options]) == 0
    return out
