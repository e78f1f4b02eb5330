"""What the tests of ``eexport calibrate`` have in common."""

from pathlib import Path
from typing import Any

import pytest

from eexport.models.exits_file import read_calibration

OPTIONS = ("--prompts", 60, "--tokens", 8, "--epochs", 1, "--seed", 1, "--budget", "1%tokens")
LEFT = ["out", "out.html"]  # by a calibration into "out"
MEASURED = (("heads", "agreement"), ("heads", "losses"), ("thresholds", "budgets"), ("predictor", "test"), ("data",))
"""What is recorded and no time."""


def hurry(patch: pytest.MonkeyPatch) -> None:
    """No charts, which have tests of their own, and no waiting for the disk."""
    patch.setattr("os.fsync", lambda _: None)
    patch.setattr("eexport.calibration.exit_report.write_exit_report", lambda _, name, path: path.write_text(name))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def files(folder: Path) -> dict[str, bytes]:
    """What is in it, but for the record of seconds spent."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "seconds.json")
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def same(one: Path, other: Path) -> bool:
    """Whether two calibrations are the same but for when and how fast they were made."""
    first, second = read_calibration(one), read_calibration(other)
    if any(_found(first.record, *at) != _found(second.record, *at) for at in MEASURED):
        return False
    tensors = "calibration.safetensors"
    return (one / tensors).read_bytes() == (other / tensors).read_bytes() and (
        (first.thresholds, first.identity) == (second.thresholds, second.identity)
    )


def _found(record: Any, *at: str) -> Any:
    """What stands at a path of keys, of each where there is a list."""
    if not at:
        return record
    return [_found(one, *at) for one in record] if isinstance(record, list) else _found(record[at[0]], *at[1:])
