"""Errors of the runtime.

Exception
└── EexportError             something this package refuses to go on with; ``exit_code`` 2
    ├── BundleError          the bundle is damaged, altered, incomplete or not one of ours
    ├── DeviceError          the device or backend asked for cannot be used here
    └── RequestError         the request is wrong; ``field`` names the part (also a ValueError)
        └── ContextError     the prompt, or the tokens asked for, do not fit in the context

A message is one line that says what is wrong, where, and how to mend it.
"""


class EexportError(Exception):
    """Base of every error a user may see; its text is one line, shown without a traceback."""

    exit_code = 2


class BundleError(EexportError):
    """The bundle is damaged, altered, incomplete or made by something else."""


class DeviceError(EexportError):
    """A device or backend was asked for and cannot be used on this machine."""


class RequestError(EexportError, ValueError):
    """A request is wrong; ``field`` names the offending part, or is None when no single part is."""

    def __init__(self, message: str, field: str | None = None) -> None:
        """Say ``message``, which blames ``field`` of the request."""
        super().__init__(message)
        self.field = field


class ContextError(RequestError):
    """The prompt, or the prompt and the tokens asked for, do not fit in the context."""
