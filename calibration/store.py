"""What a probe has recorded, a file a prompt, so that it can be interrupted, resumed and predicted from again."""

import io
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from eexport.calibration.decode import Continuation, Written
from eexport.calibration.measures import Measures
from eexport.runtime.errors import EexportError
from eexport.runtime.files import write_whole

_META = "recorded.json"
_SCHEMA_VERSION = 1  # of what is measured: records of another version are not for reading


class TraceStore:
    """A folder of recorded continuations that all came from the same model with the same settings."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        """Open or create ``folder``.

        Raises:
            EexportError: It holds the records of another model or of other ``settings``, which are left alone.
        """
        self._folder = folder
        wanted = json.loads(json.dumps({"schema_version": _SCHEMA_VERSION, **settings}))
        found = _read_meta(folder / _META)
        if found is None:
            write_whole(folder / _META, (json.dumps(wanted, indent=1) + "\n").encode(), "the record")
        elif found != wanted:
            differing = next(key for key in {**wanted, **found} if found.get(key) != wanted.get(key))
            raise EexportError(
                f"{folder}: holds records made with another {differing}: give another -o, or --force to replace them"
            )

    def load(self, key: str) -> Continuation | None:
        """The record of a prompt; None where there is none, or half a one."""
        try:
            with np.load(self._folder / f"{key}.npz") as arrays:
                measures = Measures(**{field.name: arrays[field.name] for field in fields(Measures)})
                paths = {
                    int(policy): Written(
                        **{field.name: arrays[f"{field.name}.{policy}"].tolist() for field in fields(Written)}
                    )
                    for policy in arrays["policies"]
                }
        except Exception:  # a damaged archive can fail in any way
            return None
        return Continuation(measures, paths)

    def save(self, key: str, continuation: Continuation) -> None:
        """Record a prompt, whole or not at all."""
        arrays: dict[str, Any] = {field.name: getattr(continuation.measures, field.name) for field in fields(Measures)}
        for policy, path in continuation.paths.items():
            for field in fields(Written):
                kind = np.int32 if field.name in ("tokens", "exits") else np.float64
                arrays[f"{field.name}.{policy}"] = np.array(getattr(path, field.name), kind)
        content = io.BytesIO()
        np.savez_compressed(content, policies=np.array(list(continuation.paths)), **arrays)
        write_whole(self._folder / f"{key}.npz", content.getvalue(), "the record")


def holds_records(folder: Path) -> bool:
    """Whether ``folder`` is what a ``TraceStore`` has written."""
    return (folder / _META).is_file()


def _read_meta(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("not an object")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise EexportError(f"{path}: cannot be read ({error}): give another -o, or --force to replace it") from None
    return found
