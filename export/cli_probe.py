"""The subcommand ``probe``: is there room for early exit? Measuring comes before building."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eexport.export.cli_options import JSON, PATH, PRECISION, WHERE, export_extra, option
from eexport.runtime.console import Progress, note, print_json, print_table, progress

if TYPE_CHECKING:
    from eexport.models.checkpoint import Checkpoint
    from eexport.runtime.costs import CostTable


def _thresholds(_context: click.Context, _option: click.Parameter, text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        values = tuple(sorted({float(value) for value in text.split(",")}))
    except ValueError:
        raise click.BadParameter("give cosines with commas, e.g. 0.8,0.9,0.95") from None
    if not all(-1 <= value <= 1 for value in values):
        raise click.BadParameter("cosines lie between -1 and 1")
    return values


@click.command()
@click.argument("source", metavar="CHECKPOINT_OR_BUNDLE")
@click.option("-o", "--output", type=PATH, required=True, help="Folder for the report, and to go on from.")
@option("--data", "JSONL of prompts, plain or .gz; by default a set of 128.", PATH, multiple=True, metavar="FILE")
@option("--tokens", "Longest continuation of a prompt.", click.IntRange(2), default=192, show_default=True)
@option("--prompt-tokens", "Longer prompts are cut.", click.IntRange(1), default=1024, show_default=True)
@option("--max-tokens", "To measure over all prompts.", click.IntRange(1), default=20_000, show_default=True)
@option("--minutes", "Begin no prompt after this long.", click.FloatRange(0, min_open=True))
@option("--costs", "Predict for the device of this cost table instead of this one.", PATH, metavar="FILE")
@option("--precision", "Of the build that times a checkpoint; by default int8.", PRECISION)
@option("--thresholds", "The oracles' logit cosines.", callback=_thresholds, metavar="A,B,…")
@option("--alpha", "Weight of similarity in the EAS.", click.FloatRange(0, 1), default=0.5, show_default=True)
@option("--tau", "Entropy of a sure layer, in nats.", click.FloatRange(0), default=0.5, show_default=True)
@option("--seed", "Of the prompts' order.", int, default=0, show_default=True)
@option("--run-code", "Run code that the model wrote, in limits, to score it.", is_flag=True)
@option("--force", "Replace what another probe left in the folder.", is_flag=True)
@WHERE
@JSON
def probe(source: str, output: Path, as_json: bool, **options: Any) -> None:
    """Measure whether early exit can pay, before anything is built.

    The model continues prompts of several kinds; every layer is compared with the last one; measured times of this
    device turn that into predicted speed-ups. A checkpoint shows every layer, a bundle those where a block ends.
    """
    with export_extra("probe", "probe"):
        # The command line is the one place that knows both calibration and export.
        from eexport.calibration.inputs import Request, open_inputs  # noqa: TID251
        from eexport.calibration.probe import Settings, run_probe  # noqa: TID251
        from eexport.calibration.report import write_report  # noqa: TID251

        names = ("data", "prompt_tokens", "costs", "precision", "force", "device", "threads")
        request = Request(**{name: options.pop(name) for name in names})
        settings = Settings(**{name: value for name, value in options.items() if value is not None})

        def time_build(checkpoint: "Checkpoint", bundle: Path, step: Progress) -> "CostTable":
            from eexport.export.build import BuildOptions, build
            from eexport.runtime.costs import measure_costs
            from eexport.runtime.engine import Engine

            precision: Any = request.precision or "int8"
            build(checkpoint, bundle, BuildOptions(precision=precision), step)
            return measure_costs(Engine.load(bundle, request.device, request.threads), progress=step)

        with progress("opening") as step:
            try:
                report = run_probe(open_inputs(source, output, request, settings, time_build, step), settings, step)
            except KeyboardInterrupt:
                note(f"what was measured so far is kept in {output}: the same command goes on from there")
                raise
            step("drawing", 0, 1)
            write_report(report, output)
    if as_json:
        print_json(report)
        return
    data = report["data"]
    click.echo(f"{report['model']['name']} ({report['model']['form']}), {data['used']} prompts")
    for prediction in report["predictions"][:1]:
        verdict = prediction["verdict"]
        click.echo(f"\n{verdict['headline']}")
        for reason in verdict["reasons"]:
            click.echo(f"- {reason}")
        click.echo()
        kinds = [kind for kind in report["kinds"] if kind != "all"]
        rows = [
            (row["name"], *(f"{row['speedup'][kind]:.2f}x" for kind in (*kinds, "all")), f"{row['wrong']:.1%}")
            for row in prediction["forecasts"]
        ]
        print_table(("policy", *kinds, "mean", "left wrong"), rows)
    if data["skipped"] or data["cut"]:
        click.echo(f"\n{len(data['skipped'])} rows skipped, {data['cut']} prompts cut")
    for row in data["skipped"][:3]:
        click.echo(f"  {row['source']}: {row['reason']}")
    for caveat in report["caveats"]:
        click.echo(f"note: {caveat}")
    if data["stopped_by"]:
        click.echo(f"stopped by --{data['stopped_by']}: {data['left_out']} prompts left out")
    click.echo(f"\nreport  {output / 'report.html'}")
