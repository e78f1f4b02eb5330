"""Putting a folder on disk so that it is whole or not there: a temporary folder beside it, then one rename."""

import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FolderKind:
    """What is put there: its name for messages, the file that one is known by, and the error that refuses."""

    noun: str
    marker: str
    error: type[Exception]


@contextmanager
def whole_folder(out: Path, kind: FolderKind, *, force: bool, needed_bytes: int) -> Iterator[Path]:
    """A folder to write in; it becomes ``out`` when the block ends well and is removed when it does not.

    Args:
        out: Where the folder goes.
        kind: What it is.
        force: Replace one of this kind that is there. It stays untouched until the new one is complete.
        needed_bytes: Estimated size, checked against the free space before anything is written.

    Raises:
        Exception: ``kind.error``: ``out`` is in use, or the disk is full or read-only.
    """
    out = out.resolve()  # "." has no name, and a link is to stay one
    parent = out.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(out)
        check_target(out, kind, force)
        free = shutil.disk_usage(parent).free
        if free < needed_bytes:
            raise kind.error(
                f"{parent} has {free / 1e6:.0f} MB free and the {kind.noun} needs about {needed_bytes / 1e6:.0f} MB: "
                "free some space or give another -o"
            )
        partial = _partial(out, os.getpid())
        partial.mkdir()
    except OSError as error:
        raise kind.error(f"{out}: cannot be written ({error.strerror})") from None
    try:
        yield partial
        _publish(partial, out)
    except OSError as error:
        raise kind.error(
            f"{error.filename or out}: writing the {kind.noun} failed ({error.strerror}); nothing was kept"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_target(out: Path, kind: FolderKind, force: bool) -> None:
    """Raise ``kind.error`` unless ``out`` is free, or may be replaced."""
    if not out.exists():
        return
    if not out.is_dir():
        raise kind.error(f"{out} is a file: give a folder with -o")
    if not any(out.iterdir()):
        return
    noun = kind.noun
    if not (out / kind.marker).is_file():
        raise kind.error(f"{out} is not empty and not a {noun}: give another -o (--force replaces only {noun}s)")
    if not force:
        raise kind.error(f"{out} holds a {noun} already: give another -o, or --force to replace it")


def _publish(partial: Path, out: Path) -> None:
    for path in partial.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    if not out.exists():
        os.rename(partial, out)
        return
    old = out.with_name(f".{out.name}.replaced-{os.getpid()}")
    os.rename(out, old)
    try:
        os.rename(partial, out)
    except OSError:
        os.rename(old, out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _partial(out: Path, pid: int) -> Path:
    return out.with_name(f".{out.name}.partial-{pid}")


def _remove_abandoned(out: Path) -> None:
    """Clear what a killed process left; one that still runs keeps its folder.

    One killed between the two renames had moved the old folder aside: that one is put back.
    """
    for kind in ("replaced", "partial"):
        for path in out.parent.glob(f".{glob.escape(out.name)}.{kind}-*"):
            pid = path.name.rpartition("-")[2]
            if not pid.isdecimal() or _runs(int(pid)):
                continue
            if kind == "replaced" and not out.exists():
                os.rename(path, out)
            else:
                shutil.rmtree(path, ignore_errors=True)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
