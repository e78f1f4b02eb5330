"""The subcommand ``calibrate``: train exits for a checkpoint and choose thresholds with a stated risk."""

import math
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eexport.export.cli_options import JSON, PATH, PRECISION, export_extra, option
from eexport.runtime.console import note, print_json, print_table, progress
from eexport.runtime.errors import EexportError

if TYPE_CHECKING:
    from eexport.models.checkpoint import Checkpoint
    from eexport.runtime.console import Progress
    from eexport.runtime.manifest import Manifest

_GB = 10**9


def _depths(_context: click.Context, _option: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        depths = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter("give depths with commas, e.g. 4,8") from None
    if list(depths) != sorted(set(depths)):
        raise click.BadParameter("depths must rise")
    return depths


class _Number(click.FloatRange):
    """A number that is one."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return found


@click.command()
@click.argument("checkpoint")
@click.option("-o", "--output", type=PATH, required=True, help="Folder for the calibration.")
@option("--data", "JSONL of prompts to calibrate with, plain or .gz.", PATH, multiple=True, metavar="FILE")
@option("--test-data", "Prompts to report on only; by default a set of 128.", PATH, multiple=True, metavar="FILE")
@option("--prompts", "To be written by the model itself.", click.IntRange(0), default=3000, show_default=True)
@option("--tokens", "Longest answer.", click.IntRange(2), default=160, show_default=True)
@option("--prompt-tokens", "Longer prompts are cut.", click.IntRange(1), default=512, show_default=True)
@option("--exits", "Depths of exits; by default those that pay.", callback=_depths, metavar="A,B,…")
@option("--epochs", "Passes over the texts.", _Number(0, min_open=True), default=4.0, show_default=True)
@option(
    "--budget", "What unverified exits may lose: 0.5pp, 0.5%rel or 2%tokens.", default="2%tokens", show_default=True
)
@option("--confidence", "That it is kept.", _Number(0, 1, True, True), default=0.95, show_default=True)
@option("--precision", "Of the bundle that writes and tests.", PRECISION, default="int8", show_default=True)
@option("--run-code", "Run code that the model wrote, in limits, to score it.", is_flag=True)
@option("--seed", "Of everything that is random.", click.IntRange(0, 2**32 - 1), default=0, show_default=True)
@option("--work", "For texts and states; by default beside the output, removed at the end.", PATH)
@option("--max-disk", "Most that the texts may take, in GB.", _Number(0), default=12.0, show_default=True)
@option("--threads", "CPU threads; by default all that this process may use.", click.IntRange(1))
@option("--force", "Replace a calibration that is there.", is_flag=True)
@JSON
def calibrate(checkpoint: str, output: Path, as_json: bool, **options: Any) -> None:
    """Train early exits for a checkpoint, and choose when to trust them.

    The model writes texts; exit heads learn what it says; a predictor learns which exit a token needs; thresholds are
    chosen so that what unverified exits lose stays within a budget. Interrupted, the same command goes on.
    """
    record = run_calibration(checkpoint, output, options)
    if as_json:
        print_json(record)
        return
    _print(output, record)


def run_calibration(checkpoint: str, output: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Calibrate as the options of ``calibrate`` say; the record."""
    with export_extra("calibrate", "probe"):
        import eexport.calibration.exit_figures  # noqa: F401, TID251  missed before hours of training, not after
    with export_extra("calibrate"):
        # The command line is the one place that knows both calibration and export.
        from eexport.calibration.calibrate import Settings, calibrate  # noqa: TID251
        from eexport.calibration.exit_report import write_exit_report  # noqa: TID251
        from eexport.calibration.generate import Lengths  # noqa: TID251
        from eexport.calibration.sandbox import isolation  # noqa: TID251
        from eexport.calibration.texts import Request, open_texts  # noqa: TID251
        from eexport.calibration.thresholds import Budget  # noqa: TID251
        from eexport.export.blocks import plan_blocks
        from eexport.models.checkpoint import open_checkpoint
        from eexport.models.errors import CheckpointError
        from eexport.models.exits_file import check_free, write_calibration

        if options["run_code"]:
            isolation()
        settings = Settings(
            budget=Budget.parse(options["budget"]),
            **{name: options[name] for name in ("epochs", "exits", "confidence", "run_code", "seed")},
        )
        work = _work_folder(output, options["work"])
        try:
            check_free(output, force=options["force"])
            _check_report(report_path(output), force=options["force"])
            opened = open_checkpoint(checkpoint)
            blocks = _blocks(opened, options["exits"])
            names = ("data", "test_data", "prompts", "prompt_tokens", "precision", "seed", "threads")
            request = Request(
                lengths=Lengths(answer=options["tokens"]),
                max_disk=int(options["max_disk"] * _GB),
                boundaries=tuple(end for _, end in plan_blocks(opened.spec.num_layers, blocks)[:-1]),
                **{name: options[name] for name in names},
            )

            def build_bundle(
                source: "Checkpoint", folder: Path, calibration: Path | None, step: "Progress"
            ) -> "Manifest":
                from eexport.export.build import BuildOptions, build

                chosen = BuildOptions(
                    options["precision"], blocks="auto" if calibration else blocks, calibration=calibration
                )
                return build(source, folder, chosen, step)

            with progress("opening") as step:
                texts = open_texts(opened, request)
                try:
                    found = calibrate(texts, request, settings, work, build_bundle, step)
                except KeyboardInterrupt:
                    note(f"what is done so far is kept in {work}: the same command goes on from there")
                    raise
            write_calibration(found, output, force=options["force"])
            write_exit_report(found.record, found.checkpoint, report_path(output))
        except CheckpointError as error:
            raise EexportError(str(error)) from None
    if options["work"] is None:
        shutil.rmtree(work.resolve(), ignore_errors=True)
    return found.record


def report_path(output: Path) -> Path:
    """Where the report of a calibration goes: beside its folder."""
    place = output.resolve()
    return place.with_name(f"{place.name}.html")


def calibrate_for(checkpoint: str, output: Path, options: dict[str, Any]) -> Path:
    """Calibrate with defaults for a build with ``options``; the folder, which is used again if it is there."""
    place = output.resolve()
    folder = place.with_name(f"{place.name}.calibration")
    if not folder.exists():
        arguments = [checkpoint, "-o", str(folder), "--precision", options["precision"]]
        given = calibrate.make_context("calibrate", arguments).params
        run_calibration(given.pop("checkpoint"), given.pop("output"), given)
    return folder


def _blocks(checkpoint: "Checkpoint", exits: tuple[int, ...] | None) -> str:
    """Where blocks end, as ``plan_blocks`` reads it. Raises EexportError where there can be no exit."""
    from eexport.export.blocks import plan_blocks

    name, layers = checkpoint.source["name"], checkpoint.spec.num_layers
    if exits is None:
        if len(plan_blocks(layers)) < 2:
            hint = f": give --exits, of 1 to {layers - 1}" if layers > 1 else ""
            raise EexportError(f"{name}: {layers} layers leave no room for an exit{hint}")
        return "auto"
    text = ",".join(map(str, exits))
    if not 0 < exits[0] <= exits[-1] < layers:
        raise EexportError(f"--exits {text}: {name} has {layers} layers, so exits lie at depths of 1 to {layers - 1}")
    return f"{text},{layers}"  # a lone number would be one of blocks


def _work_folder(output: Path, given: Path | None) -> Path:
    """Where texts and states go. Raises EexportError where something else is, or is to be."""
    place = output.resolve()  # "." has no name
    if given is None:
        work = place.with_name(f"{place.name}.work")
        empty = work.is_dir() and not any(path.is_file() for path in work.rglob("*"))
        if work.exists() and not empty and not (work / "texts" / "settings.json").is_file():
            raise EexportError(f"{work}: is in the way of what is kept meanwhile: move it, or give a --work")
        return work
    if place in (given.resolve(), *given.resolve().parents):
        raise EexportError(f"--work {given}: lies in the output {output}: give another folder")
    return given


def _check_report(path: Path, *, force: bool) -> None:
    if path.is_dir() or (path.exists() and not force):
        mend = "move it" if path.is_dir() else "move it, or give --force to replace it"
        raise EexportError(f"{path}: is where the report goes: {mend}")


def _print(output: Path, record: dict[str, Any]) -> None:
    """What a person wants to know of it."""
    splits = record["data"]["splits"]
    counts = ", ".join(f"{split} {found['texts']}" for split, found in splits.items())
    click.echo(f"texts  {counts}; {splits['train']['tokens']} tokens to train on\n")
    for source in sorted(splits["test"]["sources"]):
        kinds = [kind for kind in record["heads"][0]["agreement"][source] if kind != "all"]
        rows = [
            (
                head["name"],
                *(f"{head['agreement'][source][kind]:.1%}" for kind in (*kinds, "all")),
                f"{head['accepted_of_3'][source]['all']:.2f}",
                f"{head['ms']:.2f} ms",
            )
            for head in record["heads"]
        ]
        click.echo(f"agreement with the full model, test prompts ({source})")
        print_table(("head", *kinds, "all", "of 3", "takes"), rows)
        click.echo()
    chosen = record["thresholds"]["chosen"]
    if chosen["exits"]:
        entropies = ", ".join(f"{value:.3g}" for value in chosen["entropy"])
        click.echo(f"thresholds for {chosen['budget']} at {chosen['confidence']:.0%}: entropy under {entropies} nats")
    else:
        click.echo(f"thresholds for {chosen['budget']}: no token leaves unverified: {chosen['reason']}")
    skipped = record["data"]["skipped"]
    if skipped:
        click.echo(f"{len(skipped)} rows of the data skipped")
    for row in skipped[:3]:
        click.echo(f"  {row['source']}: {row['reason']}")
    for line in record["data"]["notes"]:
        click.echo(f"note: {line}")
    click.echo(f"\nreport  {report_path(output)}")
    click.echo(f"build it in  eexport build CHECKPOINT --calibration {shlex.quote(str(output))} -o BUNDLE")
