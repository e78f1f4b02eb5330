"""Running code that a model wrote: in a process with limits on time, memory, file sizes and, where possible, network.

That is no sandbox against malice: the process sees the files that its user sees. Hence it is done only when asked for.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from eexport.runtime.errors import EexportError

SECONDS = 10
MEMORY = 1 << 30  # bytes of address space
FILE_SIZE = 1 << 20  # bytes

_PASSED = 42  # an exit status of its own: `exit(0)` half way must not look like the end
# The limits are set in the new process and not by `preexec_fn`, which may hang where this one has threads.
_DRIVER = f"""
import resource, runpy, sys
for name, value in dict(AS={MEMORY}, CPU=int(sys.argv[2]), FSIZE={FILE_SIZE}, CORE=0).items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
runpy.run_path(sys.argv[1], run_name="candidate")
raise SystemExit({_PASSED})
"""
_UNSHARE = ("unshare", "--net", "--map-root-user")
# The most that this system may allow. A process namespace also ends what a candidate starts and detaches.
_PREFIXES = ((*_UNSHARE, "--pid", "--fork", "--kill-child"), _UNSHARE, ("unshare", "--net"), ())


def run_limited(code: str, seconds: int = SECONDS) -> str | None:
    """Run a script in a process with limits.

    Args:
        code: Python source. It runs under the name ``candidate``, so no ``if __name__ == "__main__"`` does.
        seconds: Most time that it may take, by the clock.

    Returns:
        The last line of its error, or None where the script ran to its end.

    Raises:
        EexportError: This system cannot set the limits.
    """
    return _run(code, seconds, _prefix())


def isolation() -> str | None:
    """What is missing of the limits here, in words; None where nothing is. Raises EexportError as ``run_limited``."""
    if _prefix():
        return None
    return "`unshare` does not work here, so code under test can reach the network"


@cache
def _prefix() -> tuple[str, ...]:
    """The command that takes the network away, () where none works. Each is tried with the limits and no code."""
    error: str | None = "it has no processes with limits"
    if os.name == "posix":
        for prefix in _PREFIXES:
            with contextlib.suppress(OSError):  # no such command
                error = _run("", SECONDS, prefix)
                if error is None:
                    return prefix
    raise EexportError(f"code under test cannot be run within limits on this system ({error}): leave out --run-code")


def _run(code: str, seconds: int, prefix: tuple[str, ...]) -> str | None:
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as errors:
        script = Path(folder) / "candidate.py"
        script.write_text(code, encoding="utf-8", errors="replace")
        # Errors go to a file: a pipe stays open, and would be waited for, as long as any child lives.
        process = subprocess.Popen(
            [*prefix, sys.executable, "-I", "-B", "-c", _DRIVER, str(script), str(seconds)],
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"timed out after {seconds} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        errors.seek(0)
        lines = errors.read().decode("utf-8", "replace").strip().splitlines()
    if status == _PASSED:
        return None
    return lines[-1][:200] if lines else f"exit status {status}"
