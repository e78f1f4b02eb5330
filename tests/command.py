"""The command line as tests call it: in this process, or as one of its own."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

GRIN = "\N{GRINNING FACE}\n"
"""What the ``endless`` bundle says over and over."""

_COMMAND = [sys.executable, "-c", "import sys; from eexport.export.cli import main; sys.exit(main())"]


@dataclass(frozen=True)
class Outcome:
    """What a call gave back."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that a refusal prints."""
        assert self.code == 2 and self.out == ""
        assert self.err.count("\n") == 1 and self.err.startswith("eexport: error: ")
        return self.err.strip()


Process = subprocess.Popen[bytes]
Call = Callable[..., Outcome]
Start = Callable[..., Process]


def start_process(*arguments: object, **options: Any) -> Process:
    pipes: dict[str, Any] = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }
    command = [*_COMMAND, *(str(argument) for argument in arguments)]
    return subprocess.Popen(command, preexec_fn=_heed_interrupts, **(pipes | options))


def finish(process: Process) -> Outcome:
    out, err = process.communicate(timeout=60)
    # What was read before may have ended within a character.
    return Outcome(process.returncode, (out or b"").decode(errors="replace"), (err or b"").decode())


def environment(**changes: str | None) -> dict[str, str]:
    """This process's environment with some variables set, or unset where None."""
    merged: dict[str, str | None] = {**os.environ, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def _heed_interrupts() -> None:
    # A shell may have started the tests with SIGINT ignored, which children inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
