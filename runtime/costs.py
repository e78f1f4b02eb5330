"""The cost table: how long each stage of a bundle's chain takes on one device, for 1 to 8 rows at once.

Drafting pays where several rows cost little more than one, which differs from device to device. Whether it does is
worked out from this table; acceptance of drafts does not depend on the device, so tables can be exchanged.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

from eexport.runtime.bench import TEXT
from eexport.runtime.engine import Engine
from eexport.runtime.errors import ContextError, EexportError
from eexport.runtime.files import write_whole
from eexport.runtime.manifest import StageKind

_WARM_UP = 3  # rounds that do not count: buffers are bound and pages touched in them


@dataclasses.dataclass(frozen=True)
class StageCost:
    """What one stage takes.

    Attributes:
        name: The stage's.
        kind: "embed", "block" or "head".
        layers: Half-open range of a block, empty (n, n) elsewhere.
        ms: Milliseconds for each entry of ``CostTable.rows``.
    """

    name: str
    kind: StageKind
    layers: tuple[int, int]
    ms: tuple[float, ...]

    def at(self, rows: int) -> float:
        """Milliseconds for ``rows`` rows: 0 for none, and beyond the table on the line through its last two entries."""
        if rows < 0:
            raise ValueError(f"{rows} rows")
        if rows <= len(self.ms):
            return self.ms[rows - 1] if rows else 0.0
        slope = self.ms[-1] - (self.ms[-2] if len(self.ms) > 1 else 0.0)
        return self.ms[-1] + max(0.0, slope) * (rows - len(self.ms))


@dataclasses.dataclass(frozen=True)
class CostTable:
    """Costs of a bundle's stages on a device; times in milliseconds, medians.

    Attributes:
        model: Its name.
        num_layers: Its depth.
        precision: Of the weights, e.g. "int8".
        dialect: Of the graphs.
        device: What it was measured on, e.g. "cpu".
        backend: What executed it.
        threads: CPU threads of the backend.
        past: Tokens in the cache when the measurement began; attention costs more the more there are.
        rows: Row counts M that were measured, 1 … n.
        stages: The chain in its order: embedding, blocks, head. The head's times are for M rows of logits.
        host_ms: What a decode step of one token takes beyond its stages: Python, sampling, text.
    """

    model: str
    num_layers: int
    precision: str
    dialect: str
    device: str
    backend: str
    threads: int
    past: int
    rows: tuple[int, ...]
    stages: tuple[StageCost, ...]
    host_ms: float

    def embed_ms(self, rows: int) -> float:
        """The embedding's time for ``rows`` rows."""
        return self.stages[0].at(rows)

    def head_ms(self, rows: int) -> float:
        """The head's time for logits of ``rows`` rows."""
        return self.stages[-1].at(rows)

    def layers_ms(self, first: int, end: int, rows: int) -> float:
        """Time of the layers [first, end); within a block, layers cost the same. Raises ValueError."""
        if not 0 <= first <= end <= self.num_layers:
            raise ValueError(f"layers {first} to {end} of {self.num_layers}")
        total = 0.0
        for block in self.stages[1:-1]:
            start, stop = block.layers
            inside = max(0, min(end, stop) - max(first, start))
            total += block.at(rows) * inside / (stop - start)
        return total

    def step_ms(self, rows: int) -> float:
        """Time of a step through the whole chain with logits for every row, what the host takes included."""
        return sum(stage.at(rows) for stage in self.stages) + self.host_ms if rows else 0.0

    def to_json(self) -> str:
        """The table as text."""
        return json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False) + "\n"

    def write(self, path: Path) -> None:
        """Write it to ``path``, whole or not at all. Raises EexportError."""
        write_whole(path, self.to_json().encode(), "the cost table")

    @classmethod
    def read(cls, path: Path) -> "CostTable":
        """Read what ``write`` wrote. Raises EexportError that names the field when the table makes no sense."""
        try:
            return _parse(json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise EexportError(f"{path}: no cost table can be read there ({error.strerror})") from None
        except (ValueError, RecursionError) as error:
            raise EexportError(f"{path}: not a cost table ({error}): measure it again") from None


def measure_costs(
    engine: Engine,
    rows: Sequence[int] = range(1, 9),
    past: int = 256,
    repeats: int = 15,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> CostTable:
    """Measure every stage for each of ``rows``, between the tokens of a greedy request.

    Row counts take turns, so that a device that gets slower or faster meanwhile does so for all of them. The cache
    grows by one token a round and is empty afterwards; a running request is ended.

    Args:
        engine: What to measure; nothing else should run on the device.
        rows: 1 … n.
        past: Tokens in the cache at the start, fewer where the context is too short.
        repeats: Rounds that count, 1 or more.
        progress: Called before each round with (what, done, total).

    Raises:
        ContextError: The context is too short for the measurement itself.
    """
    counts, rounds = tuple(rows), _WARM_UP + repeats
    if repeats < 1 or not counts or counts != tuple(range(1, len(counts) + 1)):
        raise ValueError(f"{repeats} repeats of the row counts {counts}: these must be 1 to n, 1 repeat or more")
    past = min(past, engine.context - rounds - counts[-1])
    if past < 1:
        raise ContextError(
            f"measuring costs takes {rounds + counts[-1] + 1} tokens, the context is {engine.context}: raise --context"
        )
    text = list(islice(cycle(engine.codec.encode(TEXT)), past + counts[-1]))
    times: list[list[list[float]]] = []  # seconds by round, row count and stage
    steps: list[float] = []  # seconds of the engine's whole step
    decoded = 0.0
    for index, _ in enumerate(engine.generate(text[:past], max_tokens=rounds, ignore_eos=True, reuse_cache=False)):
        progress("measuring" if index >= _WARM_UP else "warming up", index, rounds)
        steps.append(engine.stats().decode_seconds - decoded)
        decoded += steps[-1]
        times.append([engine.time_stages(text[past : past + count]) for count in counts])
    engine.clear()
    counted = times[_WARM_UP:]
    host = median(step - sum(of_rows[0]) for step, of_rows in zip(steps[_WARM_UP:], counted, strict=True))
    manifest, backend = engine.manifest, engine.backend
    return CostTable(
        model=manifest.model.name,
        num_layers=manifest.model.num_layers,
        precision=manifest.precision.weights,
        dialect=manifest.dialect,
        device=backend.device,
        backend=backend.name,
        threads=backend.threads,
        past=past,
        rows=counts,
        stages=tuple(
            StageCost(
                stage.name,
                stage.kind,
                stage.layers,
                tuple(1000 * median(round_[row][number] for round_ in counted) for row in range(len(counts))),
            )
            for number, stage in enumerate(manifest.stages)
        ),
        host_ms=1000 * max(0.0, host),
    )


def _parse(raw: Any) -> CostTable:
    """The table, checked. Raises ValueError that names the field."""
    texts = {key: _text(raw, key) for key in ("model", "precision", "dialect", "device", "backend")}
    num_layers, threads, past = _count(raw, "num_layers", 1), _count(raw, "threads", 1), _count(raw, "past", 0)
    rows = tuple(range(1, len(_list(raw, "rows")) + 1))
    if not rows or tuple(raw["rows"]) != rows:
        raise ValueError("rows: expected 1, 2, … n")
    stages = tuple(_stage(stage, f"stages[{index}]", len(rows)) for index, stage in enumerate(_list(raw, "stages")))
    if [stage.kind for stage in stages] != ["embed", *["block"] * (len(stages) - 2), "head"]:
        raise ValueError("stages: expected one embed, the blocks and one head")
    depth = 0
    for stage in stages[1:-1]:
        if stage.layers[0] != depth or stage.layers[1] <= depth:
            raise ValueError(f"layers of {stage.name}: expected to begin at {depth}, got {list(stage.layers)}")
        depth = stage.layers[1]
    if depth != num_layers:
        raise ValueError(f"layers: the blocks end at {depth} of {num_layers}")
    host_ms = _milliseconds(_field(raw, "host_ms"), "host_ms")
    if not any(stage.ms[0] for stage in stages):
        raise ValueError("ms: every stage takes no time")
    return CostTable(
        num_layers=num_layers, threads=threads, past=past, rows=rows, stages=stages, host_ms=host_ms, **texts
    )


def _stage(raw: Any, where: str, rows: int) -> StageCost:
    layers, ms = _list(raw, "layers", where), _list(raw, "ms", where)
    if len(layers) != 2 or not all(type(layer) is int for layer in layers):
        raise ValueError(f"{where}.layers: expected two integers")
    if len(ms) != rows:
        raise ValueError(f"{where}.ms: expected {rows} times, one for each entry of rows, got {len(ms)}")
    times = tuple(_milliseconds(value, f"{where}.ms") for value in ms)
    return StageCost(_text(raw, "name", where), _text(raw, "kind", where), (layers[0], layers[1]), times)  # type: ignore[arg-type]


def _field(raw: Any, key: str, where: str = "") -> Any:
    if not isinstance(raw, dict) or key not in raw:
        raise ValueError(f"{where}.{key} is missing".removeprefix("."))
    return raw[key]


def _text(raw: Any, key: str, where: str = "") -> str:
    if not isinstance(value := _field(raw, key, where), str):
        raise ValueError(f"{where}.{key}: expected text".removeprefix("."))
    return value


def _list(raw: Any, key: str, where: str = "") -> list[Any]:
    if not isinstance(value := _field(raw, key, where), list):
        raise ValueError(f"{where}.{key}: expected a list".removeprefix("."))
    return value


def _count(raw: Any, key: str, least: int) -> int:
    value = _field(raw, key)
    if type(value) is not int or value < least:
        raise ValueError(f"{key}: expected a whole number of {least} or more, got {value!r}")
    return value


def _milliseconds(value: Any, where: str) -> float:
    if type(value) not in (int, float) or not 0 <= value <= sys.float_info.max:  # NaN is neither
        raise ValueError(f"{where}: expected milliseconds of 0 or more, got {value!r}")
    return float(value)
