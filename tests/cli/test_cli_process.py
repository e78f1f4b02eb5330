"""The command line as a process: signals, full and read-only disks, encodings, pipes, missing packages."""

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import GRIN, Call, Process, Start, environment, finish
from tiny import make_checkpoint

from eexport.runtime import manifest as manifest_module

FACE = GRIN[0]


@pytest.fixture(scope="module")
def slow_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many layers: a build that there is time to end in the middle."""
    return make_checkpoint(tmp_path_factory.mktemp("slow") / "deep", layers=64)


def partial(out: Path) -> list[Path]:
    return list(out.parent.glob(f".{out.name}.partial-*/block_*.bin"))


def halfway(build: Process, out: Path) -> None:
    """Wait until the first blocks are being written."""
    deadline = time.monotonic() + 60
    while not partial(out):
        assert build.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_build_that_is_interrupted_leaves_nothing(
    start: Start, slow_checkpoint: Path, tmp_path: Path, number: int, code: int
) -> None:
    out = tmp_path / "out"
    build = start("build", slow_checkpoint, "-o", out, "--blocks", 64)
    halfway(build, out)
    build.send_signal(number)
    done = finish(build)
    assert (done.code, done.out, done.err.strip()) == (code, "", "")
    assert not list(tmp_path.iterdir())


def test_a_build_that_is_killed_leaves_nothing_that_counts(
    call: Call, start: Start, checkpoint: Path, slow_checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    build = start("build", slow_checkpoint, "-o", out, "--blocks", 64)
    halfway(build, out)
    build.kill()
    build.wait()
    assert partial(out)
    assert "no such folder" in call("run", out, "hello").error
    assert call("build", checkpoint, "-o", out).code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_a_run(start: Start, endless: Path, number: int, code: int) -> None:
    run = start("run", endless, "hi")
    assert run.stdout is not None and run.stdout.read(40)
    run.send_signal(number)
    began = time.monotonic()
    done = finish(run)
    assert (done.code, done.err.strip()) == (code, "")
    assert time.monotonic() - began < 10


def test_ctrl_c_stops_a_reply_and_the_chat_goes_on(start: Start, endless: Path) -> None:
    terminal, side = pty.openpty()
    chat = start("chat", endless, stdin=side, stdout=side, stderr=side)
    os.close(side)

    def wait_for(text: str, interrupt: bool = False) -> str:
        seen = ""
        deadline = time.monotonic() + 30
        while text not in seen:
            assert time.monotonic() < deadline
            if interrupt:  # again and again: between two system calls a signal may wait for the next key
                chat.send_signal(signal.SIGINT)
            if select.select([terminal], [], [], 0.5)[0]:
                seen += os.read(terminal, 65536).decode("utf-8", errors="replace")
        return seen

    assert "Ctrl-D" in wait_for(">>> ")
    os.write(terminal, b"hi\n")
    wait_for(FACE)
    chat.send_signal(signal.SIGINT)
    wait_for(">>> ")
    wait_for("(Ctrl-D or /exit leaves)", interrupt=True)
    os.write(terminal, b"/exit\n")
    assert chat.wait(timeout=30) == 0
    os.close(terminal)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "none", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_full_disk(call: Call, checkpoint: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = small_disk / "out"
    error = call("build", checkpoint, "-o", out, "--precision", "fp32").error
    assert "MB free and the bundle needs" in error
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real("/")._replace(free=1 << 40))
    error = call("build", checkpoint, "-o", out, "--precision", "fp32").error
    assert "No space left on device" in error and "nothing was kept" in error
    assert not list(small_disk.iterdir())


@pytest.fixture
def read_only(bundle: Path, tmp_path: Path) -> Iterator[Path]:
    """The bundle where nobody can write; root needs a mount for that."""
    place = Path(shutil.copytree(bundle, tmp_path / "read-only"))
    if os.geteuid():
        place.chmod(0o555)
        yield place
        place.chmod(0o755)
        return
    bind = ["mount", "--bind", str(place), str(place)]
    if shutil.which("mount") is None or subprocess.run(bind, capture_output=True).returncode:
        pytest.skip("no way to make a folder read-only for root")
    subprocess.run(["mount", "-o", "remount,ro,bind", str(place)], check=True)
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_read_only_bundle_and_folder_and_no_home(start: Start, call: Call, checkpoint: Path, read_only: Path) -> None:
    nowhere = environment(HOME=None, XDG_CACHE_HOME=None, PYTHONDONTWRITEBYTECODE="1")
    done = finish(start("run", ".", "hello", "--max-tokens", 3, cwd=read_only, env=nowhere))
    assert (done.code, done.err) == (0, "") and done.out.endswith("\n")
    assert "cannot be written" in call("build", checkpoint, "-o", read_only / "out").error


def test_accented_paths_everywhere(
    call: Call, start: Start, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "Modèle 模型 #1"
    shutil.copytree(checkpoint, home / "point de contrôle")
    monkeypatch.chdir(home)
    assert call("build", "point de contrôle", "-o", "paquet é", "--precision", "int8").code == 0
    assert sorted(path.name for path in home.iterdir()) == ["paquet é", "point de contrôle"]
    moved = (home / "paquet é").rename(home / "déplacé")
    expected = call("run", moved, "héllo", "--max-tokens", 4).out
    done = finish(start("run", moved, "héllo", "--max-tokens", 4, cwd="/", env=environment(LC_ALL="C", LANG="C")))
    assert (done.code, done.out, done.err) == (0, expected, "")
    (moved / "block_00.onnx").unlink()
    done = finish(start("verify", moved, cwd="/", env=environment(LC_ALL="C")))
    assert done.code == 1 and "déplacé" in done.err


def test_narrow_encodings_degrade(start: Start, endless: Path) -> None:
    ascii_only = environment(PYTHONIOENCODING="ascii")
    done = finish(start("run", endless, "hi", "--max-tokens", 5, env=ascii_only))
    assert (done.code, done.out, done.err) == (0, "?\n\n", "")
    done = finish(start("run", endless, "hi", "--max-tokens", 4, "--json", env=ascii_only))
    assert json.loads(done.out)["text"] == FACE


def test_closed_pipe_is_quiet(start: Start, endless: Path) -> None:
    run = start("run", endless, "hi")
    assert run.stdout is not None
    assert run.stdout.readline().decode() == GRIN
    run.stdout.close()
    assert run.stderr is not None and run.stderr.read() == b""
    assert run.wait(timeout=30) != 0


def test_full_standard_output_is_an_error(start: Start, bundle: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with open("/dev/full", "wb") as full:
        done = finish(start("inspect", bundle, stdout=full))
    assert "No space left" in done.error


def test_threads_follow_the_allowed_cpus(start: Start, bundle: Path) -> None:
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("no CPU affinity here")
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    try:
        process = start("run", bundle, "hello", "--max-tokens", 3, "--stats")
    finally:
        os.sched_setaffinity(0, cpus)
    done = finish(process)
    assert done.code == 0 and "1 threads" in done.err and "ffinity" not in done.err


WITHOUT_TORCH = """
import importlib, pkgutil, sys
HEAVY = {"torch", "transformers", "onnx", "gguf", "safetensors", "huggingface_hub"}
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HEAVY:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
import eexport.runtime
for module in pkgutil.iter_modules(eexport.runtime.__path__):
    importlib.import_module(f"eexport.runtime.{module.name}")
from eexport.export.cli import main
bundle, checkpoint, out = sys.argv[1:]
for command in (["run", bundle, "hi", "--max-tokens", "3"], ["inspect", bundle], ["verify", bundle]):
    assert main(command) == 0, command
assert main(["doctor"]) == 0
assert main(["build", checkpoint, "-o", out]) == 2
assert not HEAVY & sys.modules.keys()
"""


def test_the_device_side_needs_no_torch(bundle: Path, checkpoint: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, str(bundle), str(checkpoint), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == 1 and "pip install 'eexport[export]'" in done.stderr
    assert "pip install 'eexport[export]'" in done.stdout  # doctor says it too
    assert len(list(Path(manifest_module.__file__).parent.glob("*.py"))) > 10
