"""Everything that a probe needs, from what the user names: model, tokenizer, prompts and the device's costs."""

import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from eexport.calibration.data import Encoded, Rows, Skipped, builtin_prompts, encode, interleave, read_prompts
from eexport.calibration.probe import TRACES, Settings, probe
from eexport.calibration.report import write_report
from eexport.calibration.sandbox import isolation
from eexport.calibration.traced import TracedModel
from eexport.calibration.traced_bundle import BundleModel
from eexport.runtime.costs import CostTable, measure_costs
from eexport.runtime.device import available_memory, default_threads, open_backend
from eexport.runtime.engine import Engine, load_codec
from eexport.runtime.errors import EexportError
from eexport.runtime.manifest import MANIFEST_NAME, check_files, read_manifest
from eexport.runtime.text import TextCodec

if TYPE_CHECKING:
    from eexport.models.checkpoint import Checkpoint

COSTS_NAME = "costs.json"

Progress = Callable[[str, int, int], None]
TimeBuild = Callable[["Checkpoint", Path, Progress], CostTable]


@dataclass(frozen=True)
class Request:
    """What to probe with.

    Attributes:
        data: Files of prompts; none is the built-in set.
        prompt_tokens: Longer prompts are cut.
        costs: A cost table of the device to predict for; None measures this one.
        force: Replace another probe's records.
        device: To measure costs on, and to run a bundle on.
        threads: CPU threads; None is all that this process may use.
    """

    data: Sequence[Path] = ()
    prompt_tokens: int = 1024
    costs: Path | None = None
    force: bool = False
    device: str = "auto"
    threads: int | None = None


def probe_source(
    source: str,
    out: Path,
    request: Request,
    settings: Settings,
    time_build: TimeBuild,
    progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Probe a bundle or checkpoint and write the report to the folder ``out``; the report's content.

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
    if settings.run_code:
        isolation()  # where code cannot be run in limits, that is said before hours of measuring
    rows = read_prompts(request.data) if request.data else builtin_prompts()
    given = None if request.costs is None else CostTable.read(request.costs)
    if out.exists() and not out.is_dir():
        raise EexportError(f"{out}: is a file; give a folder with -o")
    out.mkdir(parents=True, exist_ok=True)
    if request.force:
        shutil.rmtree(out / TRACES, ignore_errors=True)
        (out / COSTS_NAME).unlink(missing_ok=True)
    if (Path(source) / MANIFEST_NAME).is_file():
        opened = _open_bundle(Path(source), out, request, given, progress)
    else:
        opened = _open_checkpoint(source, out, request, given, time_build, progress)
    _check_costs(opened.costs, opened.model)
    prompts, skipped = _prompts(rows, opened, request, settings)
    decode = opened.codec.decode
    report = probe(opened.model, decode, prompts, skipped, opened.costs, out, settings, progress)
    progress("drawing", 0, 1)
    write_report(report, out)
    return report


@dataclass(frozen=True)
class _Opened:
    model: TracedModel
    codec: TextCodec
    bos_token_id: int | None
    costs: CostTable


def _open_bundle(folder: Path, out: Path, request: Request, costs: CostTable | None, progress: Progress) -> _Opened:
    manifest = read_manifest(folder)
    if costs is None:
        costs = measure_costs(Engine.load(folder, request.device, request.threads), progress=progress)
        costs.write(out / COSTS_NAME)
    else:
        check_files(folder, manifest)
    backend = open_backend(request.device, request.threads)
    model = BundleModel(folder, manifest, backend, manifest.model.context_length)
    return _Opened(model, load_codec(folder, manifest), manifest.model.bos_token_id, costs)


def _open_checkpoint(
    source: str, out: Path, request: Request, costs: CostTable | None, time_build: TimeBuild, progress: Progress
) -> _Opened:
    # What a bundle is probed without, on a device that has no torch.
    from eexport.calibration.traced_checkpoint import CheckpointModel
    from eexport.models.checkpoint import open_checkpoint
    from eexport.models.errors import CheckpointError

    try:
        checkpoint = open_checkpoint(source)
        _check_memory(sum(math.prod(shape) for shape in checkpoint.spec.tensor_shapes().values()))
        if costs is None:
            costs = _kept_costs(out, checkpoint.source["name"])
        if costs is None:
            with tempfile.TemporaryDirectory(dir=out, prefix=".timing-") as place:
                costs = time_build(checkpoint, Path(place) / "bundle", progress)
            costs.write(out / COSTS_NAME)
        progress("reading the model", 0, 1)
        model = CheckpointModel(checkpoint, threads=request.threads or default_threads())
    except CheckpointError as error:
        raise EexportError(str(error)) from None
    text = checkpoint.tokenizer
    codec = TextCodec(Tokenizer.from_str(text.tokenizer_json), chat_template=text.chat_template, special=text.special)
    return _Opened(model, codec, checkpoint.spec.bos_token_id, costs)


def _kept_costs(out: Path, name: str) -> CostTable | None:
    """What an earlier run for this model measured here, as a build takes minutes."""
    if not (out / COSTS_NAME).is_file():
        return None
    table = CostTable.read(out / COSTS_NAME)
    if table.model != name:
        raise EexportError(f"{out}: holds a probe of {table.model}: give another -o, or --force to replace it")
    return table


def _check_memory(parameters: int) -> None:
    """Refuse what would not fit: fp32 weights, and a fifth more for what is computed with them."""
    free, needed = available_memory(), int(parameters * 4 * 1.2)
    if free is not None and needed > free:
        raise EexportError(
            f"probing this checkpoint takes {needed / 1e9:.1f} GB for its weights in fp32 and {free / 1e9:.1f} GB are "
            "free: build a bundle of it and probe that, or use a machine with more memory"
        )


def _check_costs(costs: CostTable, model: TracedModel) -> None:
    if costs.num_layers != model.num_layers:
        raise EexportError(
            f"--costs: the table is of {costs.model} with {costs.num_layers} layers, {model.name} has "
            f"{model.num_layers}: measure it with this model, on that device"
        )


def _prompts(rows: Rows, opened: _Opened, request: Request, settings: Settings) -> tuple[list[Encoded], list[Skipped]]:
    """The prompts in their order, and every row that cannot be used."""
    limit = min(request.prompt_tokens, opened.model.context_length - 2)
    encoded, unusable = encode(rows.prompts, opened.codec, opened.bos_token_id, limit)
    skipped = [*rows.skipped, *unusable]
    if not encoded:
        raise EexportError(
            f"none of the {len(skipped)} prompts can be used; the first: {skipped[0].source}: {skipped[0].reason}"
        )
    return interleave(encoded, settings.seed), skipped
