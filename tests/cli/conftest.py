"""Bundles for the tests of the command line, and ways to call it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from command import GRIN, Call, Outcome, Process, Start, start_process
from tiny import byte_id, make_checkpoint, make_scripted

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


def _built(checkpoint: Path, out: Path, *options: str) -> Path:
    assert main(["build", str(checkpoint), "-o", str(out), "--blocks", "2", *options]) == 0
    return out
