"""What a probe works on, from what the user names: model, tokenizer, prompts, records, and the device's costs.

Everything that can be refused is looked at before anything is measured, and before anything is replaced.
"""

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tokenizers import Tokenizer

from eexport.calibration.data import Encoded, Rows, Skipped, builtin_prompts, encode, interleave, read_prompts
from eexport.calibration.probe import Inputs, Settings
from eexport.calibration.sandbox import isolation
from eexport.calibration.store import TraceStore, holds_records
from eexport.calibration.traced import SLOTS, TracedModel
from eexport.calibration.traced_bundle import BundleModel, bundle_identity
from eexport.runtime.console import Progress
from eexport.runtime.costs import CostTable, measure_costs
from eexport.runtime.device import available_memory, default_threads, open_backend
from eexport.runtime.engine import Engine, load_codec
from eexport.runtime.errors import EexportError
from eexport.runtime.manifest import MANIFEST_NAME, check_files, read_manifest
from eexport.runtime.text import TextCodec

if TYPE_CHECKING:
    from eexport.models.checkpoint import Checkpoint

TRACES = "traces"
COSTS_NAME = "costs.json"

TimeBuild = Callable[["Checkpoint", Path, Progress], CostTable]


@dataclass(frozen=True)
class Request:
    """What to probe with.

    Attributes:
        data: Files of prompts; none is the built-in set.
        prompt_tokens: Longer prompts are cut.
        costs: A cost table of the device to predict for; None measures this one.
        precision: Of the bundle that is built from a checkpoint to measure costs; None is int8.
        force: Replace another probe's records.
        device: To measure costs on, and to run a bundle on.
        threads: CPU threads; None is all that this process may use.
    """

    data: Sequence[Path] = ()
    prompt_tokens: int = 1024
    costs: Path | None = None
    precision: str | None = None
    force: bool = False
    device: str = "auto"
    threads: int | None = None


class _Source(Protocol):
    """A model to be probed, before it is in memory."""

    name: str
    num_layers: int
    context_length: int
    bos_token_id: int | None
    codec: TextCodec

    def identity(self) -> str:
        """A hash of what it computes."""
        ...

    def costs(self, out: Path, progress: Progress) -> CostTable:
        """This device's costs for it, which are kept in ``out``."""
        ...

    def model(self, identity: str) -> TracedModel:
        """It, in memory."""
        ...


def open_inputs(
    source: str,
    out: Path,
    request: Request,
    settings: Settings,
    time_build: TimeBuild,
    progress: Progress = lambda *_: None,
) -> Inputs:
    """Open all that a probe needs.

    Args:
        source: What to probe; a name or path as for ``open_checkpoint``, or a bundle's folder.
        out: For the report and what is measured; a probe of the same source goes on from what is there.
        request: What to probe with.
        settings: What to measure.
        time_build: Builds a bundle of a checkpoint in a folder that is gone afterwards, and measures its costs.
        progress: Called with (what, done, total).

    Raises:
        EexportError: ``source``, the data, the options or the folder cannot be used.
    """
    import eexport.calibration.figures  # noqa: F401  what draws the report is missed before hours of measuring

    started = time.monotonic()
    if settings.run_code:
        isolation()
    rows = read_prompts(request.data) if request.data else builtin_prompts()
    given = None if request.costs is None else CostTable.read(request.costs)
    if out.exists() and not out.is_dir():
        raise EexportError(f"{out}: is a file; give a folder with -o")
    is_bundle = (Path(source) / MANIFEST_NAME).is_file()
    if request.precision is not None and (is_bundle or given is not None):
        raise EexportError("--precision: is of the bundle that times a checkpoint, and none is built here")
    opened: _Source = _Bundle(Path(source), request) if is_bundle else _Checkpoint(source, request, time_build)
    if given is not None and given.num_layers != opened.num_layers:
        raise EexportError(
            f"--costs: the table is of {given.model} with {given.num_layers} layers, {opened.name} has "
            f"{opened.num_layers}: measure it with this model, on that device"
        )
    prompts, skipped = _prompts(rows, opened, request.prompt_tokens, settings.seed)
    progress("reading the model", 0, 1)
    identity = opened.identity()
    if request.force and holds_records(out / TRACES):
        shutil.rmtree(out / TRACES)
        (out / COSTS_NAME).unlink(missing_ok=True)
    recorded_with = {"model": identity, "tokens": settings.tokens, "thresholds": list(settings.thresholds)}
    store = TraceStore(out / TRACES, recorded_with)
    costs = opened.costs(out, progress) if given is None else given
    return Inputs(opened.model(identity), opened.codec.decode, prompts, skipped, costs, store, started)


class _Bundle:
    def __init__(self, folder: Path, request: Request) -> None:
        manifest = self._manifest = read_manifest(folder)
        check_files(folder, manifest)
        self._folder, self._request = folder, request
        self.name, self.num_layers = manifest.model.name, manifest.model.num_layers
        self.context_length, self.bos_token_id = manifest.model.context_length, manifest.model.bos_token_id
        self.codec = load_codec(folder, manifest)

    def identity(self) -> str:
        return bundle_identity(self._manifest)

    def costs(self, out: Path, progress: Progress) -> CostTable:
        engine = Engine.load(self._folder, self._request.device, self._request.threads, check_hashes=False)
        table = measure_costs(engine, progress=progress)
        table.write(out / COSTS_NAME)
        return table

    def model(self, identity: str) -> BundleModel:
        backend = open_backend(self._request.device, self._request.threads)
        return BundleModel(self._folder, self._manifest, backend, self.context_length)


class _Checkpoint:
    def __init__(self, source: str, request: Request, time_build: TimeBuild) -> None:
        # What a bundle is probed without, on a device that has no torch.
        from eexport.models.checkpoint import open_checkpoint
        from eexport.models.errors import CheckpointError

        try:
            self._checkpoint = open_checkpoint(source)
        except CheckpointError as error:
            raise EexportError(str(error)) from None
        spec, text = self._checkpoint.spec, self._checkpoint.tokenizer
        self._slots = _slots(
            weight_bytes=4 * sum(math.prod(shape) for shape in spec.tensor_shapes().values()),
            token_bytes=4 * 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim,
        )
        self._request, self._time_build = request, time_build
        self.name, self.num_layers = self._checkpoint.source["name"], spec.num_layers
        self.context_length, self.bos_token_id = spec.context_length, spec.bos_token_id
        self.codec = TextCodec(
            Tokenizer.from_str(text.tokenizer_json), chat_template=text.chat_template, special=text.special
        )

    def identity(self) -> str:
        from eexport.models.checkpoint import checkpoint_identity

        return checkpoint_identity(self._checkpoint)

    def costs(self, out: Path, progress: Progress) -> CostTable:
        if (kept := self._kept_costs(out / COSTS_NAME)) is not None:
            return kept
        with tempfile.TemporaryDirectory(dir=out, prefix=".timing-") as place:
            table = self._time_build(self._checkpoint, Path(place) / "bundle", progress)
        table.write(out / COSTS_NAME)
        return table

    def model(self, identity: str) -> TracedModel:
        from eexport.calibration.traced_checkpoint import CheckpointModel

        threads = self._request.threads or default_threads()
        return CheckpointModel(self._checkpoint, identity, slots=self._slots, threads=threads)

    def _kept_costs(self, path: Path) -> CostTable | None:
        """What an earlier run measured in the same way, as a build takes minutes."""
        if not path.is_file():
            return None
        table, request = CostTable.read(path), self._request
        wanted = (self.name, request.precision or "int8", request.threads or default_threads())
        same = (table.model, table.precision, table.threads) == wanted
        return table if same and request.device in ("auto", table.device) else None


def _slots(weight_bytes: int, token_bytes: int) -> int:
    """How many tokens of keys and values fit in a quarter of the memory that fp32 weights leave free."""
    free, needed = available_memory(), int(weight_bytes * 1.2)
    if free is None:
        return SLOTS
    if needed > free:
        raise EexportError(
            f"probing this checkpoint takes {needed / 1e9:.1f} GB for its weights in fp32 and {free / 1e9:.1f} GB are "
            "free: build a bundle of it and probe that, or use a machine with more memory"
        )
    return min(SLOTS, (free - needed) // 4 // token_bytes)


def _prompts(rows: Rows, opened: _Source, longest: int, seed: int) -> tuple[list[Encoded], list[Skipped]]:
    """The prompts in their order, and every row that cannot be used."""
    limit = min(longest, opened.context_length - 2)
    encoded, unusable = encode(rows.prompts, opened.codec, opened.bos_token_id, limit)
    skipped = [*rows.skipped, *unusable]
    if not encoded:
        raise EexportError(
            f"none of the {len(skipped)} prompts can be used; the first: {skipped[0].source}: {skipped[0].reason}"
        )
    return interleave(encoded, seed), skipped
