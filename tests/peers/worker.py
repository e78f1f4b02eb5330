"""The loop of every benchmark worker: one JSON request a line on stdin, one JSON answer a line on stdout.

Requests (``op``), their fields and answers; ``prompt_ids`` and ``token_ids`` are lists of token ids:

    load     path, threads, context   version
    decode   prompt_ids, n            seconds_per_token of n greedy tokens after the first; token_ids
    prefill  prompt_ids               seconds from an empty cache to the first token; token_id
    memory                            rss_mb: resident now; peak_mb: its high-water mark

EOS does not end a decode. A failed request answers ``{"error": ...}`` and the worker lives on. stdout belongs
to the protocol: what a library prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, Protocol


class PeerEngine(Protocol):
    """One engine under test; a worker process holds exactly one."""

    version: str

    def decode(self, prompt_ids: list[int], n: int) -> tuple[float, list[int]]:
        """Generate ``n + 1`` greedy tokens; returns seconds per token of the last n, and all the tokens."""

    def prefill(self, prompt_ids: list[int]) -> tuple[float, int]:
        """Prefill; returns the seconds from an empty cache to the first token, and that token."""


def memory_mb() -> dict[str, float]:
    """Resident memory of this process, now and at its highest, in MiB."""
    with open("/proc/self/status", encoding="ascii") as status:
        fields = dict(line.split(":", 1) for line in status)
    kib = {key: float(fields[key].split()[0]) for key in ("VmRSS", "VmHWM")}
    return {"rss_mb": round(kib["VmRSS"] / 1024, 1), "peak_mb": round(kib["VmHWM"] / 1024, 1)}


def serve(load: Callable[..., PeerEngine]) -> None:
    """Answer requests until stdin closes; ``load(**fields)`` builds the PeerEngine of the first request."""
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    engine: PeerEngine | None = None
    for line in sys.stdin:
        request = json.loads(line)
        op = request.pop("op")
        try:
            if op == "load":
                engine = load(**request)
                answer: dict[str, Any] = {"version": engine.version}
            elif op == "memory":
                answer = memory_mb()
            elif engine is None:
                raise RuntimeError(f"{op} before load")
            elif op == "decode":
                seconds, ids = engine.decode(request["prompt_ids"], request["n"])
                answer = {"seconds_per_token": seconds, "token_ids": ids}
            elif op == "prefill":
                seconds, token = engine.prefill(request["prompt_ids"])
                answer = {"seconds": seconds, "token_id": token}
            else:
                raise ValueError(f"unknown op {op!r}")
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)
