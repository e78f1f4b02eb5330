"""The benchmark's end of a worker process: requests, and what the machine did meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

TICK = os.sysconf("SC_CLK_TCK")
HERE = Path(__file__).parent


def busy_seconds() -> float:
    """CPU seconds that all processes of this machine have used, stolen time included."""
    with open("/proc/stat", encoding="ascii") as stat:
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, stat.readline().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / TICK


class Worker:
    """One engine with one model, in its own process."""

    def __init__(self, engine: str, form: str, python: str, log: Path, **load: Any) -> None:
        """Start ``worker_<engine>.py`` under ``python`` and load the model."""
        self.engine = engine
        self.form = form
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [python, str(HERE / f"worker_{engine}.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.version: str = self.ask("load", **load)["version"]

    @property
    def name(self) -> str:
        """Engine and form, for people."""
        return f"{self.engine} {self.form}"

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        """Send one request and wait for its answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, **fields}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise SystemExit(f"{self.name}: the worker died during {op}; see {self._log}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise SystemExit(f"{self.name}: {op} failed: {answer['error']}; see {self._log}")
        return answer

    def cpu_seconds(self) -> float:
        """CPU seconds that this worker has used, over all its threads."""
        stat = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="ascii")
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / TICK

    def settle(self, quiet: float = 0.05, limit: float = 5.0) -> None:
        """Wait until the thread pool has stopped spinning: no CPU time used for ``quiet`` seconds."""
        deadline = time.monotonic() + limit
        used = self.cpu_seconds()
        while time.monotonic() < deadline:
            time.sleep(quiet)
            before, used = used, self.cpu_seconds()
            if used == before:
                return

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
