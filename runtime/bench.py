"""How fast a bundle runs here: prefill and decode apart, real tokens only, the warm-up left out."""

import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from eexport.runtime.device import default_threads
from eexport.runtime.engine import Engine
from eexport.runtime.errors import RequestError

# Prose, code and data that do not repeat themselves: drafting from repetitions must not flatter a figure.
TEXT = """\
The lighthouse at Kvalnes had been dark for eleven years when the municipality decided to sell it. Nobody
expected much interest: the road ends four kilometres short of the cape, there is no running water, and
in January the sun does not rise at all. Yet by the end of the first week thirty-two letters had arrived,
among them one from a retired baker in Lyon, one from a school class, and one that contained nothing but
a drawing of a whale.

Three things were asked of every buyer. The lamp must be lit on the last night of the year. The logbook,
which goes back to 1884, stays in the tower. And whoever lives there measures wind, pressure and
temperature each morning at six and sends the numbers to the weather office, as keepers have always done,
because a gap in a series is worse than an error: an error can be found and corrected, while a missing
day is missing for ever.

def smooth(readings: list[float], width: int = 5) -> list[float]:
    \"\"\"Centred moving average; the window shrinks at both ends.\"\"\"
    result = []
    for index in range(len(readings)):
        low = max(0, index - width // 2)
        high = min(len(readings), index + width // 2 + 1)
        result.append(sum(readings[low:high]) / (high - low))
    return result

{"station": "Kvalnes", "height_m": 37.5, "instruments": ["anemometer", "barometer"], "days": [
 {"date": "2019-02-11", "wind_ms": 14.2, "pressure_hpa": 987.1, "gust": true},
 {"date": "2019-02-12", "wind_ms": 9.8, "pressure_hpa": 991.6, "gust": false},
 {"date": "2019-02-13", "wind_ms": 21.0, "pressure_hpa": 974.3, "gust": true}]}

If a storm lowers the pressure by 27.3 hPa within nine hours and then half of that is regained in the
following six, the barometer rises at 2.275 hPa an hour. Multiply by the length of the coast that lies in
its path and you know how many boats should stay in harbour; in practice the fishermen look at the gulls,
which have read no tables and are seldom wrong. "They walk inland," said the last keeper, "and so should
you."

The bread that the baker sent with his letter was, by the time it reached the council, as hard as slate.
They kept it on the window sill. When the vote came, it was four against three, and the whale won: the
class moved in that summer, nineteen children, two teachers and a goat, to find out how long a light can
be kept burning by people who have to be in bed by nine. Their answer, painted over the door in uneven
blue capitals, reads: longer than you would think.
"""


@dataclasses.dataclass(frozen=True)
class Result:
    """What was measured; rates in tokens a second and their medians over the repeats, memory in bytes."""

    model: str
    precision: str
    dialect: str
    blocks: int
    backend: str
    device: str
    threads: int
    prompt_tokens: int
    tokens: int
    repeats: int
    load_seconds: float
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    token_ms_p50: float
    token_ms_p95: float
    rss_bytes: int | None
    peak_rss_bytes: int | None
    kv_bytes: int


def bench(
    bundle: Path,
    device: str = "auto",
    threads: int | None = None,
    *,
    prompt_tokens: int = 512,
    tokens: int = 128,
    repeats: int = 5,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> Result:
    """Load ``bundle`` and generate greedily from a fixed text, once to warm up and then ``repeats`` times.

    Args:
        bundle: Its folder.
        device: As for ``Engine.load``.
        threads: As for ``Engine.load``.
        prompt_tokens: Length of the prompt.
        tokens: How many to generate, 2 or more; an end token does not stop them.
        repeats: Requests that count.
        progress: Called before each request with (what, done, total).

    Raises:
        RequestError: Prompt and output do not fit in the model's context.
    """
    started = time.perf_counter()
    engine = Engine.load(bundle, device, threads)
    load_seconds = time.perf_counter() - started
    if prompt_tokens + tokens > engine.context:
        raise RequestError(
            f"{prompt_tokens} prompt tokens and {tokens} more do not fit in the context of {engine.context}: "
            "give smaller --prompt-tokens and --tokens"
        )
    ids = _prompt(engine, prompt_tokens)
    prefills, decodes, gaps = [], [], []
    for index in range(repeats + 1):
        progress("measuring" if index else "warming up", index, repeats + 1)
        prefill, latencies = _request(engine, ids, tokens)
        if index:
            prefills.append(prompt_tokens / prefill)
            decodes.append(len(latencies) / sum(latencies))
            gaps += latencies
    p50, p95 = np.percentile(gaps, [50, 95]) * 1000
    manifest = engine.manifest
    rss, peak = _resident_bytes()
    return Result(
        model=manifest.model.name,
        precision=manifest.precision.weights,
        dialect=manifest.dialect,
        blocks=len(manifest.blocks),
        backend=engine.backend.name,
        device=engine.backend.device,
        threads=threads or default_threads(),
        prompt_tokens=prompt_tokens,
        tokens=tokens,
        repeats=repeats,
        load_seconds=load_seconds,
        prefill_tokens_per_second=float(np.median(prefills)),
        decode_tokens_per_second=float(np.median(decodes)),
        token_ms_p50=float(p50),
        token_ms_p95=float(p95),
        rss_bytes=rss,
        peak_rss_bytes=peak,
        kv_bytes=manifest.kv_bytes_per_token() * (prompt_tokens + tokens),
    )


def _prompt(engine: Engine, length: int) -> list[int]:
    ids = engine.codec.encode(TEXT)
    return (ids * -(-length // len(ids)))[:length]


def _request(engine: Engine, ids: list[int], tokens: int) -> tuple[float, list[float]]:
    """Seconds to the first token, and from each token to the next, everything included."""
    latencies = []
    started = last = time.perf_counter()
    prefill = 0.0
    for index, _ in enumerate(engine.generate(ids, max_tokens=tokens, ignore_eos=True, reuse_cache=False)):
        now = time.perf_counter()
        if index:
            latencies.append(now - last)
        else:
            prefill = now - started
        last = now
    return prefill, latencies


def _resident_bytes() -> tuple[int | None, int | None]:
    """Resident memory of this process, now and at its peak; None where the system does not tell."""
    try:
        status = Path("/proc/self/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        return int(fields["VmRSS"].split()[0]) * 1024, int(fields["VmHWM"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    try:
        import resource
    except ImportError:  # Windows
        return None, None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return None, peak if sys.platform == "darwin" else peak * 1024
