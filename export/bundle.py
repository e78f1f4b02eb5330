"""Putting a bundle on disk so that it is whole or not there: a temporary folder beside it, then one rename."""

import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eexport.runtime.errors import BundleError
from eexport.runtime.manifest import MANIFEST_NAME, FileInfo, sha256


@contextmanager
def bundle_folder(out: Path, *, force: bool, needed_bytes: int) -> Iterator[Path]:
    """A folder to build in; it becomes ``out`` when the block ends well and is removed when it does not.

    Args:
        out: Where the bundle goes.
        force: Replace a bundle that is there. It stays untouched until the new one is complete.
        needed_bytes: Estimated size, checked against the free space before anything is written.

    Raises:
        BundleError: ``out`` is in use, or the disk is full or read-only.
    """
    out = out.resolve()  # "." has no name, and a link is to stay one
    parent = out.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(out)
        _check_target(out, force)
        free = shutil.disk_usage(parent).free
        if free < needed_bytes:
            raise BundleError(
                f"{parent} has {free / 1e6:.0f} MB free and the bundle needs about {needed_bytes / 1e6:.0f} MB: "
                "free some space or give another -o"
            )
        partial = _partial(out, os.getpid())
        partial.mkdir()
    except OSError as error:
        raise BundleError(f"{out}: cannot be written ({error.strerror})") from None
    try:
        yield partial
        _publish(partial, out)
    except OSError as error:
        raise BundleError(
            f"{error.filename or out}: writing the bundle failed ({error.strerror}); nothing was kept"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def file_infos(folder: Path) -> dict[str, FileInfo]:
    """Size and hash of every file in ``folder``."""
    return {path.name: FileInfo(path.stat().st_size, sha256(path)) for path in sorted(folder.iterdir())}


def _check_target(out: Path, force: bool) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise BundleError(f"{out} is a file: give a folder with -o")
    if not any(out.iterdir()):
        return
    if not (out / MANIFEST_NAME).is_file():
        raise BundleError(f"{out} is not empty and not a bundle: give another -o (--force replaces only bundles)")
    if not force:
        raise BundleError(f"{out} holds a bundle already: give another -o, or --force to replace it")


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
    """Clear what a killed build left; one that still runs keeps its folder.

    A build killed between its two renames had moved the old bundle aside: that one is put back.
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
