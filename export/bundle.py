"""The folder of a bundle, and what its manifest says of the files in it."""

from contextlib import AbstractContextManager
from pathlib import Path

from eexport.models.folders import FolderKind, check_target, whole_folder
from eexport.runtime.errors import BundleError
from eexport.runtime.manifest import MANIFEST_NAME, FileInfo, sha256

_BUNDLE = FolderKind("bundle", MANIFEST_NAME, BundleError)


def bundle_folder(out: Path, *, force: bool, needed_bytes: int) -> AbstractContextManager[Path]:
    """A folder to build in that becomes ``out``; see ``models.folders.whole_folder``. Raises BundleError."""
    return whole_folder(out, _BUNDLE, force=force, needed_bytes=needed_bytes)


def check_free(out: Path, *, force: bool) -> None:
    """Raise BundleError where ``bundle_folder`` would for what is there, before there is anything to write."""
    check_target(out, _BUNDLE, force)


def file_infos(folder: Path) -> dict[str, FileInfo]:
    """Size and hash of every file in ``folder``."""
    return {path.name: FileInfo(path.stat().st_size, sha256(path)) for path in sorted(folder.iterdir())}
