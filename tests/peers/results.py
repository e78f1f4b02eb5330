"""What one run measured, as figures, a table and JSON."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
from dataclasses import dataclass, field
from typing import Any

from client import Worker

MEASURES = ("decode", "prefill")
PEER_BITS = ("int4", "int8")


@dataclass(frozen=True)
class Turn:
    """One worker's turn: its speeds in tokens per second, and the CPU others took meanwhile, in cores."""

    decode: float
    prefill: float
    waiting: float  # by the workers whose turn it was not
    foreign: float  # by everything else on the machine


@dataclass
class Row:
    """One worker's figures, a turn per round."""

    worker: Worker
    memory: dict[str, float]
    agreement: float | None
    turns: list[Turn] = field(default_factory=list)

    def speeds(self, measure: str) -> list[float]:
        """Every round's "decode" or "prefill" speed."""
        return [turn.decode if measure == "decode" else turn.prefill for turn in self.turns]

    def median(self, measure: str) -> float:
        """Median speed over the rounds."""
        return statistics.median(self.speeds(measure))

    def ratio(self, measure: str, other: Row) -> float:
        """Median over the rounds of this row's speed to the other's."""
        pairs = zip(self.speeds(measure), other.speeds(measure), strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)


def best(rows: list[Row], bits: str, measure: str) -> Row | None:
    """The fastest onnxruntime-genai row whose form starts with ``bits``."""
    peers = [row for row in rows if row.worker.engine == "genai" and row.worker.form.startswith(bits)]
    return max(peers, key=lambda row: row.median(measure), default=None)


def ratios(row: Row, rows: list[Row], measure: str) -> dict[str, float | None]:
    """``row`` against onnxruntime-genai's best of each precision in ``rows``."""
    peers = {bits: best(rows, bits, measure) for bits in PEER_BITS}
    return {bits: None if peer is None else row.ratio(measure, peer) for bits, peer in peers.items()}


def machine() -> dict[str, str]:
    """Where and when."""
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} CPUs",
        "memory": f"{memory:.0f} GiB",
        "system": platform.platform(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def table(rows: list[Row]) -> str:
    """The results, fastest decode first."""
    header = ["engine", "form"]
    for measure in MEASURES:
        header += [f"{measure} tok/s", "min-max", "x genai int4", "x int8"]
    cells = [[*header, "RSS MiB", "= fp32"]]
    for row in sorted(rows, key=lambda row: row.median("decode"), reverse=True):
        line = [row.worker.engine, row.worker.form]
        for measure in MEASURES:
            speeds = row.speeds(measure)
            line += [f"{row.median(measure):.1f}", f"{min(speeds):.0f}-{max(speeds):.0f}"]
            line += ["-" if x is None else f"{x:.2f}" for x in ratios(row, rows, measure).values()]
        agreement = "-" if row.agreement is None else f"{row.agreement:.0%}"
        cells.append([*line, f"{row.memory['rss_mb']:.0f}", agreement])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for line in cells:
        left = [text.ljust(width) for text, width in zip(line[:2], widths[:2], strict=True)]
        right = [text.rjust(width) for text, width in zip(line[2:], widths[2:], strict=True)]
        lines.append("  ".join(left + right))
    return "\n".join(lines)


def as_json(rows: list[Row]) -> list[dict[str, Any]]:
    """Every figure of every row."""
    return [
        {
            "engine": row.worker.engine,
            "form": row.worker.form,
            "version": row.worker.version,
            "agreement": row.agreement,
            **row.memory,
            "others_cpu": [{"waiting": turn.waiting, "foreign": turn.foreign} for turn in row.turns],
            **{
                measure: {
                    "median": row.median(measure),
                    "rounds": row.speeds(measure),
                    "to_genai": ratios(row, rows, measure),
                }
                for measure in MEASURES
            },
        }
        for row in rows
    ]
