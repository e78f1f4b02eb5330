"""The report's figures of speed: drafts, costs, predicted speed-ups and what an exit must reach."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from eexport.calibration.charts import (
    STYLES,
    Chart,
    bars_height,
    chart,
    colour,
    depth_colour,
    grouped_bars,
    kind_colours,
    label,
    layers_axis,
    numbers,
    percent_axis,
)
from eexport.calibration.words import ALL, forecast_name, kinds_of

Report = Mapping[str, Any]

_EXITS_SHOWN = 5


def drafts(report: Report) -> Chart:
    """Expected accepted tokens of a draft."""
    found = report["drafts"][ALL]
    shown = _exits_shown(report)

    def paint(axes: Axes) -> None:
        axes.plot(found["lengths"], numbers(found["lookup"]), "--s", label="n-gram lookup", color=colour("part-3"))
        for index, depth in enumerate(shown):
            tint = colour(depth_colour(index, len(shown)))
            axes.plot(found["lengths"], numbers(found["exits"][depth]), "-o", label=f"layer {depth}", color=tint)
        axes.set_xlabel("tokens drafted")
        axes.set_ylabel("accepted tokens")
        axes.set_ylim(bottom=0)

    caption = "Mean tokens accepted of a draft, replayed round by round on all texts."
    return chart("drafts", "Accepted tokens of a draft", caption, paint)


def drafts_by_depth(report: Report) -> Chart | None:
    """Accepted tokens over the exit's depth, by kind."""
    names, length = kind_colours(kinds_of(report)), 4
    depths = report["depths"][:-1]
    if not depths or length not in report["drafts"][ALL]["lengths"]:
        return None
    place = report["drafts"][ALL]["lengths"].index(length)

    def paint(axes: Axes) -> None:
        for index, kind in enumerate(kinds_of(report)):
            values = [report["drafts"][kind]["exits"][str(depth)][place] for depth in depths]
            style = STYLES[index % len(STYLES)]
            axes.plot(depths, numbers(values), linestyle=style, color=colour(names[kind]), label=label(kind))
        layers_axis(axes, report["model"]["num_layers"])
        axes.set_ylabel("accepted tokens")
        axes.set_ylim(bottom=0)

    return chart("drafts_depth", f"Accepted of {length} drafted, by exit", "Mean over rounds, by kind of text.", paint)


def _exits_shown(report: Report) -> list[str]:
    """A few exits, evenly from shallow to deep, as keys of the report."""
    depths = [str(depth) for depth in report["depths"][:-1]]
    if len(depths) <= _EXITS_SHOWN:
        return depths
    return [depths[round(step * (len(depths) - 1) / (_EXITS_SHOWN - 1))] for step in range(_EXITS_SHOWN)]


def cost_by_rows(report: Report) -> Chart:
    """Milliseconds by number of rows."""
    costs = report["costs"]
    parts = {"embedding": "embed", "blocks": "block", "head": "head"}

    def paint(axes: Axes) -> None:
        below = [0.0] * len(costs["rows"])
        for index, (text, kind) in enumerate(parts.items()):
            stages = [stage["ms"] for stage in costs["stages"] if stage["kind"] == kind]
            ms = [sum(column) for column in zip(*stages, strict=True)]
            axes.bar(costs["rows"], ms, 0.7, below, color=colour(f"part-{index}"), label=text)
            below = [a + b for a, b in zip(below, ms, strict=True)]
        axes.bar(costs["rows"], costs["host_ms"], 0.7, below, color=colour("part-4"), label="host")
        axes.set_xticks(costs["rows"])
        axes.grid(False, axis="x")
        axes.set_xlabel("rows M")
        axes.set_ylabel("time (ms)")

    caption = "Time of one step through the whole chain with M positions at once, by part."
    return chart("costs", "Time of a step by rows", caption, paint)


def cost_ratio(report: Report) -> Chart:
    """What M rows cost against one."""
    costs = report["costs"]
    step = [sum(stage["ms"][row] for stage in costs["stages"]) + costs["host_ms"] for row in range(len(costs["rows"]))]

    def paint(axes: Axes) -> None:
        axes.plot(costs["rows"], [ms / step[0] for ms in step], "-o", color=colour("part-0"), label="measured")
        axes.plot(costs["rows"], costs["rows"], ":", color=colour("muted"), label="M single steps")
        axes.set_xticks(costs["rows"])
        axes.set_ylim(0, 1.35 * max(ms / step[0] for ms in step))
        axes.set_xlabel("rows M")
        axes.set_ylabel("time against M = 1")

    caption = "The lower this line, the more a draft can save: M positions are verified in one step."
    return chart("cost_ratio", "Cost of M rows against one", caption, paint)


def speedups(report: Report) -> list[Chart]:
    """Predicted speed-ups by policy and kind, a figure for each device."""
    names, kinds = kind_colours(kinds_of(report)), kinds_of(report)
    made = []
    for index, prediction in enumerate(report["predictions"]):
        rows = [row for row in prediction["forecasts"] if row["name"] != "full"]

        def paint(axes: Axes, rows: Sequence[Report] = rows) -> None:
            bars = [(label(kind), [row["speedup"][kind] for row in rows], names[kind]) for kind in kinds]
            means = [row["speedup"]["all"] for row in rows] if len(kinds) > 1 else []
            policies = [forecast_name(row["name"]).replace(", ", ",\n") for row in rows]
            grouped_bars(axes, policies, bars, start=1, marks=means)
            speed_axis(axes)

        title = "Predicted speed-up" if index == 0 else "Predicted, rows nearly free"
        caption = f"{prediction['device']}. Left of 1 is slower than running every layer."
        caption += " Diamonds: geometric mean over the kinds." if len(kinds) > 1 else ""
        made.append(chart(f"speedup_{index}", title, caption, paint, height=bars_height(len(rows), len(kinds))))
    return made


def speed_axis(axes: Axes) -> None:
    """Speeds on the x axis, with a line where nothing is won."""
    axes.axvline(1, color=colour("muted"), linewidth=1)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))  # with 1 among them
    axes.set_xlabel("speed against every layer for every token")


def breakeven(report: Report) -> Chart | None:
    """Needed against measured agreement over depth."""
    predictions = report["predictions"]
    if not (rows := predictions[0]["breakeven"]):
        return None

    def paint(axes: Axes) -> None:
        depths = [row["depth"] for row in rows]
        measured = numbers([row["measured"] for row in rows])
        marker = "o" if len(depths) <= 12 else ""
        axes.plot(depths, measured, "-", marker=marker, color=colour("part-1"), label="measured")
        texts = ("needed here", "needed, rows nearly free")
        for prediction, style, text, name in zip(predictions, ("--", ":"), texts, ("part-3", "part-0"), strict=False):
            needed = numbers([row["needed"] for row in prediction["breakeven"]])
            axes.plot(depths, needed, linestyle=style, marker=marker, color=colour(name), label=text)
        layers_axis(axes, report["model"]["num_layers"])
        axes.set_ylim(0, 1.03)
        percent_axis(axes)
        axes.set_ylabel("agreement")

    caption = "Needed if it drafts for every token and errs at random; where no line is, no agreement would be enough."
    return chart("breakeven", "Agreement that an exit needs to break even", caption, paint)
