"""Typed reading of configuration values: every complaint names the file and the field."""

from collections.abc import Mapping
from typing import Any

from eexport.models.errors import CheckpointError


class Fields:
    """A read-only view of a configuration whose getters check types.

    A field that is absent or null takes the default; without a default it is a `CheckpointError`.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        """Wrap `values`, read from the file that `where` names."""
        self.values = values
        self.where = where

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number, 1 or more."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, f"is {value!r}, expected a whole number of at least 1")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.error(name, f"is {value!r}, expected a positive number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """A boolean."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"is {value!r}, expected true or false")
        return value

    def ids(self, name: str) -> tuple[int, ...]:
        """Token ids: null, one id or a list of ids."""
        value = self.values.get(name)
        ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise self.error(name, f"is {value!r}, expected a token id or a list of them")
        return ids

    def error(self, name: str, complaint: str) -> CheckpointError:
        """The error to raise about field `name`."""
        return CheckpointError(f"{self.where}: {name} {complaint}")

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(name, "is missing")
        return value
