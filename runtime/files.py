"""Writing a file whole or not at all."""

import os
from contextlib import suppress
from pathlib import Path

from eexport.runtime.errors import EexportError


def write_whole(path: Path, content: bytes, what: str) -> None:
    """Write ``content``, making the folder if need be; a reader sees the old file or the new one.

    Raises:
        EexportError: It cannot be written; ``what`` names it for the user.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as error:
        raise EexportError(f"{path}: {what} cannot be written ({error.strerror})") from None
    finally:
        with suppress(OSError):  # it is gone when all went well
            temporary.unlink()
