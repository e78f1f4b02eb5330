"""The output folder: a whole bundle or nothing, whatever happens while it is written."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from eexport.export.bundle import bundle_folder, file_infos
from eexport.runtime.errors import BundleError
from eexport.runtime.manifest import MANIFEST_NAME, read_manifest


def write_bundle(out: Path, text: str = "new", *, force: bool = False) -> None:
    with bundle_folder(out, force=force, needed_bytes=1) as folder:
        (folder / MANIFEST_NAME).write_text(text)
        (folder / "weights.bin").write_text(text)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def refusal(out: Path, *, force: bool = False, needed_bytes: int = 1) -> str:
    with pytest.raises(BundleError) as caught, bundle_folder(out, force=force, needed_bytes=needed_bytes):
        pytest.fail("the target was accepted")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    """A target; in the end nothing lies beside it."""
    yield tmp_path / "bundle"
    assert {path.name for path in tmp_path.iterdir()} <= {"bundle"}


def test_it_appears_when_it_is_whole(out: Path) -> None:
    with bundle_folder(out, force=False, needed_bytes=1) as folder:
        assert folder.parent == out.parent and folder != out
        (folder / MANIFEST_NAME).write_text("new")
        assert not out.exists()
    assert contents(out) == {MANIFEST_NAME: "new"}


def test_missing_parents_and_an_empty_folder(tmp_path: Path) -> None:
    write_bundle(tmp_path / "a" / "b" / "bundle")
    (tmp_path / "empty").mkdir()
    write_bundle(tmp_path / "empty")
    assert contents(tmp_path / "empty") == contents(tmp_path / "a" / "b" / "bundle")


@pytest.mark.parametrize("place", [".", "bundle", "./sub/../bundle", "sub/"])
def test_relative_targets(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "sub").mkdir() if place != "." else None
    monkeypatch.chdir(tmp_path / "here")
    write_bundle(Path(place))
    assert contents((tmp_path / "here" / place).resolve())[MANIFEST_NAME] == "new"
    assert not [path for path in tmp_path.rglob(".*")]


def test_a_link_to_a_folder_is_kept(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    for text in ("old", "new"):
        write_bundle(tmp_path / "link", text, force=True)
    assert (tmp_path / "link").is_symlink() and contents(tmp_path / "disk")[MANIFEST_NAME] == "new"
    assert {path.name for path in tmp_path.iterdir()} == {"disk", "link"}


def test_force_replaces_a_bundle_whole(out: Path) -> None:
    write_bundle(out, "old")
    (out / "stray.bin").write_text("old")
    assert "--force" in refusal(out)
    assert contents(out) == {MANIFEST_NAME: "old", "weights.bin": "old", "stray.bin": "old"}
    write_bundle(out, force=True)
    assert contents(out) == {MANIFEST_NAME: "new", "weights.bin": "new"}


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_of_something_else_is_never_touched(out: Path, force: bool) -> None:
    out.mkdir()
    (out / "thesis.tex").write_text("text")
    assert "not a bundle" in refusal(out, force=force)
    assert contents(out) == {"thesis.tex": "text"}


def test_a_file_in_the_way(out: Path) -> None:
    out.write_text("text")
    assert "is a file" in refusal(out, force=True)
    assert "cannot be written" in refusal(out / "below")
    assert out.read_text() == "text"


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), ValueError("x"), MemoryError()])
def test_a_failure_leaves_nothing(out: Path, failure: BaseException) -> None:
    with pytest.raises(type(failure)), bundle_folder(out, force=False, needed_bytes=1) as folder:
        (folder / MANIFEST_NAME).write_text("new")
        raise failure
    assert not out.exists()


def test_a_failure_keeps_the_bundle_that_was_there(out: Path) -> None:
    write_bundle(out, "old")
    with pytest.raises(ValueError, match="x"), bundle_folder(out, force=True, needed_bytes=1):
        raise ValueError("x")
    assert contents(out)[MANIFEST_NAME] == "old"


def test_a_rename_that_fails_keeps_the_bundle_that_was_there(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_bundle(out, "old")
    rename = os.rename

    def fail(source: Path, target: Path) -> None:
        if ".partial-" in str(source):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(source))
        rename(source, target)

    monkeypatch.setattr("os.rename", fail)
    with pytest.raises(BundleError, match="Input/output error"):
        write_bundle(out, force=True)
    assert contents(out)[MANIFEST_NAME] == "old"


def test_a_full_disk_is_said(out: Path) -> None:
    with pytest.raises(BundleError) as caught, bundle_folder(out, force=False, needed_bytes=1) as folder:
        (folder / "weights.bin").write_text("some")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / "weights.bin"))
    assert "No space left on device" in str(caught.value) and "weights.bin" in str(caught.value)
    assert not out.exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_disk_that_fills_up(out: Path) -> None:
    with pytest.raises(BundleError, match="No space left"), bundle_folder(out, force=False, needed_bytes=1):
        with open("/dev/full", "wb") as stream:
            stream.write(b"some")
    assert not out.exists()


def test_space_is_checked_first(out: Path) -> None:
    message = refusal(out, needed_bytes=10**18)
    assert "MB free" in message and "-o" in message
    assert not out.exists()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "Permission denied" in refusal(tmp_path / "bundle")
    tmp_path.chmod(0o700)


KILLED = """
import os, signal, sys
from pathlib import Path
from eexport.export.bundle import bundle_folder
with bundle_folder(Path(sys.argv[1]), force=True, needed_bytes=1) as folder:
    (folder / "manifest.json").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_build_leaves_is_no_bundle(out: Path) -> None:
    process = subprocess.run([sys.executable, "-c", KILLED, str(out)], timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert not out.exists()
    with pytest.raises(BundleError, match="not an eexport bundle"):
        read_manifest(out)
    (abandoned,) = out.parent.iterdir()
    assert abandoned.name.startswith(".bundle.partial-")
    write_bundle(out)
    assert contents(out)[MANIFEST_NAME] == "new"  # and `out` sees that the rest is gone


def test_a_build_that_still_runs_keeps_its_folder(out: Path) -> None:
    with bundle_folder(out, force=False, needed_bytes=1) as first:
        (first / MANIFEST_NAME).write_text("first")
        running = out.with_name(f".{out.name}.partial-{os.getppid()}")
        running.mkdir()
        gone = out.with_name(f".{out.name}.partial-{_free_pid()}")
        gone.mkdir()
        with pytest.raises(BundleError):  # this process builds there already
            write_bundle(out)
        assert running.is_dir() and not gone.exists() and first.is_dir()
        running.rmdir()
    assert contents(out) == {MANIFEST_NAME: "first"}


def test_other_bundles_partials_are_left_alone(tmp_path: Path) -> None:
    other = tmp_path / f".bundle2.partial-{_free_pid()}"
    other.mkdir()
    write_bundle(tmp_path / "bundle")
    write_bundle(tmp_path / "b[u]ndle")
    assert other.is_dir()


def test_file_infos(tmp_path: Path) -> None:
    (tmp_path / "b.bin").write_bytes(b"abc")
    (tmp_path / "a.bin").write_bytes(b"")
    infos = file_infos(tmp_path)
    assert list(infos) == ["a.bin", "b.bin"]
    assert infos["b.bin"].bytes == 3
    assert infos["b.bin"].sha256 == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def _free_pid() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen([shutil.which("true") or sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_bundle_that_a_killed_build_moved_aside_is_put_back(tmp_path: Path) -> None:
    aside = tmp_path / f".bundle.replaced-{2**22 + 1}"  # above any process id
    aside.mkdir()
    (aside / MANIFEST_NAME).write_text("{}")
    with pytest.raises(BundleError, match="holds a bundle already"):
        with bundle_folder(tmp_path / "bundle", force=False, needed_bytes=0):
            pass
    assert (tmp_path / "bundle" / MANIFEST_NAME).is_file() and not aside.exists()
