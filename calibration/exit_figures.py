"""The figures of a calibration's report, each from the calibration's record; ``draw`` makes all of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter

from eexport.calibration.charts import (
    PERCENT,
    STYLES,
    Chart,
    bars_height,
    chart,
    colour,
    depth_colour,
    errorbars,
    grouped_bars,
    groups_axis,
    kind_colours,
    label,
    numbers,
    percent_axis,
)
from eexport.calibration.exit_words import asked_budget, class_names, exits_of, groups_of, kinds_of, skipped_layers
from eexport.calibration.speed_figures import cost_by_rows, cost_ratio, speed_axis
from eexport.calibration.words import ALL

Record = Mapping[str, Any]

_STRONGEST = 0.55  # of a cell's colour, so that its number can be read in both themes


def draw(record: Record) -> dict[str, list[Chart]]:
    """All figures that the record has numbers for, by section."""
    trials = record["trials"]  # none where the exits were asked for
    sections: dict[str, list[Chart | None]] = {
        "heads": [*agreements(record), *acceptances(record), speedups(record)],
        "trials": [draft_yield(trials)] if trials else [],
        "learning": [
            losses("learning", "Loss of the heads", record["heads"]),
            losses("learning_trials", "Loss in the trials", trials) if trials else None,
        ],
        "predictor": [*confusions(record), reliability(record)],
        "thresholds": [trade(record), *leaving(record)],
        "data": [coverage(record)],
        "costs": [cost_by_rows(record), cost_ratio(record)],
    }
    return {name: [made for made in charts if made is not None] for name, charts in sections.items()}


def agreements(record: Record) -> list[Chart]:
    """How often each head says what the full model says, a figure for each source."""
    caption = "Share of tokens of the test prompts' answers on which a head's likeliest token is the full model's."
    return _by_source(record, "agreement", "Agreement with the full model", caption, "share of tokens")


def acceptances(record: Record) -> list[Chart]:
    """How many of three drafted tokens are accepted, a figure for each source."""
    caption = "Mean over all places in the test prompts' answers at which a draft may begin."
    return _by_source(record, "accepted_of_3", "Accepted of 3 drafted", caption, "accepted tokens")


def _by_source(record: Record, key: str, title: str, caption: str, unit: str) -> list[Chart]:
    heads = record["heads"]
    made = []
    for index, source in enumerate(heads[0][key]):
        found = [head[key][source] for head in heads]
        made.append(_by_head(heads, found, f"{key}_{index}", f"{title}: {label(source)}", caption, unit))
    return made


def draft_yield(trials: Sequence[Record]) -> Chart:
    """Accepted tokens for the time that a draft takes, for every candidate."""
    title = "Accepted tokens for a millisecond of draft"
    found = [{kind: pays["per_ms"] for kind, pays in trial["payoff"].items()} for trial in trials]
    caption = "Of drafts of 3 tokens after the short courses of the trials, on prompts that no head was trained on."
    return _by_head(trials, found, "draft_yield", title, caption, "accepted tokens a millisecond")


def _by_head(
    heads: Sequence[Record], found: Sequence[Mapping[str, float]], name: str, title: str, caption: str, unit: str
) -> Chart:
    """A group of bars for each head, a bar for each kind of text; diamonds for all kinds where there are several."""
    kinds = kinds_of(found[0])
    whole = [of_head[ALL] for of_head in found] if ALL in found[0] and len(kinds) > 1 else []

    def paint(axes: Axes) -> None:
        names = kind_colours(kinds)
        bars = [(label(kind), [of_head[kind] for of_head in found], names[kind]) for kind in kinds]
        grouped_bars(axes, [label(head["name"]) for head in heads], bars, marks=whole)
        axes.set_xlabel(unit)
        axes.set_xlim(left=0)
        if unit == "share of tokens":
            axes.set_xlim(0, 1)
            axes.xaxis.set_major_formatter(PERCENT)

    caption += " Diamonds: all kinds." if whole else ""
    return chart(name, title, caption, paint, bars_height(len(heads), len(kinds)))


def speedups(record: Record) -> Chart:
    """What drafting with each head alone is expected to give."""
    heads, kinds = record["heads"], list(record["heads"][0]["payoff"])

    def paint(axes: Axes) -> None:
        names = kind_colours(kinds)
        bars = [(label(kind), [head["payoff"][kind]["speedup"] for head in heads], names[kind]) for kind in kinds]
        means = [head["speedup"] for head in heads] if len(kinds) > 1 else []
        grouped_bars(axes, [label(head["name"]) for head in heads], bars, start=1, marks=means)
        axes.set_xlim(0.98, max(1.1, axes.get_xlim()[1]))
        speed_axis(axes)

    caption = (
        "Verified drafts of the best length for each kind, from acceptance and this device's times; 1 is no draft."
    )
    caption += " Diamonds: geometric mean over the kinds." if len(kinds) > 1 else ""
    return chart("drafting", "Expected speed-up of drafting", caption, paint, bars_height(len(heads), len(kinds)))


def losses(name: str, title: str, courses: Sequence[Record]) -> Chart:
    """Loss along each course."""
    exits = [course for course in courses if course["features"] == ["hidden"]]

    def paint(axes: Axes) -> None:
        for index, course in enumerate(courses):
            tint = depth_colour(exits.index(course), len(exits)) if course in exits else "part-3"
            tokens = [
                (at + 1) * course["trained_tokens"] / len(course["losses"]) for at in range(len(course["losses"]))
            ]
            style = STYLES[index % len(STYLES)]
            values = numbers(course["losses"])
            axes.plot(tokens, values, linestyle=style, marker="o", color=colour(tint), label=label(course["name"]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1000:g}"))
        axes.set_xlabel("tokens trained on (thousands)")
        axes.set_xlim(left=0)
        axes.set_ylabel("loss (nats)")
        axes.set_ylim(bottom=0)

    return chart(name, title, "Mean of each tenth of a course, or of each step of a shorter one.", paint)


def confusions(record: Record) -> list[Chart]:
    """Which exit was required and which was named, a figure for each source."""
    names = class_names(record)
    return [
        _confusion(f"confusion_{index}", f"Required and named exit: {label(source)}", found["confusion"], names)
        for index, (source, found) in enumerate(record["predictor"]["test"].items())
    ]


def _confusion(name: str, title: str, counts: Sequence[Sequence[int]], names: Sequence[str]) -> Chart:
    def paint(axes: Axes) -> None:
        for required, row in enumerate(counts):
            for named, count in enumerate(row):
                share = count / max(1, sum(row))
                corner = named - 0.48, required - 0.48
                tint = colour("kind-0")
                axes.add_patch(Rectangle(corner, 0.96, 0.96, color=tint, alpha=_STRONGEST * share, linewidth=0))
                axes.text(named, required, f"{share:.0%}" if sum(row) else "–", ha="center", va="center", fontsize=9)
        axes.set_xlim(-0.5, len(names) - 0.5)
        axes.set_ylim(-0.5, len(names) - 0.5)
        axes.set_xticks(range(len(names)), names)
        groups_axis(axes, [f"{name} ({sum(row)})" for name, row in zip(names, counts, strict=True)])
        axes.tick_params(axis="x", labelcolor=colour("ink"), length=0)
        axes.grid(False)
        axes.spines[:].set_visible(False)
        axes.set_xlabel("named")
        axes.set_ylabel("required")

    caption = "By layers; each row adds up to the tokens in brackets. Left of the diagonal is too shallow."
    return chart(name, title, caption, paint, height=1.0 + 0.36 * len(names))


def reliability(record: Record) -> Chart:
    """How sure the predictor is against how often it is right."""
    test = record["predictor"]["test"]

    def paint(axes: Axes) -> None:
        axes.plot([0, 1], [0, 1], ":", color=colour("muted"), linewidth=1)
        for index, (source, found) in enumerate(test.items()):
            sure, right, tokens = zip(*found["reliability"], strict=True)
            tint, style = colour(f"part-{index % 5}"), STYLES[index % len(STYLES)]
            axes.plot(sure, right, linestyle=style, color=tint, linewidth=1.1, label=label(source))
            axes.scatter(sure, right, [6 + 90 * count / found["tokens"] for count in tokens], color=tint, linewidth=0)
        axes.set_xlim(0, 1.03)
        axes.set_ylim(0, 1.03)
        axes.xaxis.set_major_formatter(PERCENT)
        percent_axis(axes)
        axes.set_xlabel("probability of the exit that is named")
        axes.set_ylabel("share that is right")

    caption = "On the dotted line it is as sure as it should be. The larger a point, the more tokens."
    return chart("reliability", "Reliability of the exit predictor", caption, paint, height=3.4)


def trade(record: Record) -> Chart | None:
    """Layers left out and tokens changed at every budget that exits."""
    budgets = [row for row in record["thresholds"]["budgets"] if row["exits"]]
    if not budgets:
        return None

    def paint(axes: Axes) -> None:
        for index, source in enumerate(budgets[0]["held_out"]):
            points = sorted(
                (
                    {"skip": skipped_layers(record, use), "disagreement": use["disagreement"], "budget": row["budget"]}
                    for row in budgets
                    for use in [row["held_out"][source][ALL]]
                ),
                key=lambda point: float(point["skip"]),
            )
            errorbars(axes, points, "disagreement", 100, colour(f"part-{index % 5}"), label(source))
            last = -1.0
            for point in points if index == 0 else ():
                if point["skip"] - last > 0.02:
                    place = 100 * point["skip"], 100 * point["disagreement"]["value"]
                    axes.annotate(point["budget"], place, xytext=(4, 4), textcoords="offset points", fontsize=8.5)
                    last = point["skip"]
        axes.set_xlabel("layers left out (%)")
        axes.set_ylabel("tokens that differ (%)")
        axes.set_ylim(bottom=0)
        axes.margins(x=0.12)

    caption = "On the test prompts, one point for each budget; 95% intervals over prompts."
    return chart("trade", "Layers left out and tokens that differ", caption, paint)


def leaving(record: Record) -> list[Chart]:
    """Where tokens leave at the budget that was asked for, a figure for each source."""
    row = asked_budget(record)
    if not row["exits"]:
        return []
    return [_leaving(record, row["budget"], i, source) for i, source in enumerate(row["held_out"])]


def _leaving(record: Record, budget: str, index: int, source: str) -> Chart:
    found = asked_budget(record)["held_out"][source]
    groups, exits = groups_of(found), exits_of(record)

    def paint(axes: Axes) -> None:
        before = [0.0] * len(groups)
        for place, head in enumerate(exits):
            shares = [found[group]["by_exit"][place] for group in groups]
            tint = colour(depth_colour(place, len(exits)))
            axes.barh(range(len(groups)), shares, 0.7, before, color=tint, label=label(head["name"]))
            before = [a + b for a, b in zip(before, shares, strict=True)]
        groups_axis(axes, [label(group) for group in groups])
        axes.set_xlim(0, max(0.1, 1.05 * max(before)))
        axes.xaxis.set_major_formatter(PERCENT)
        axes.set_xlabel("share of tokens that leave")

    caption = "Tokens of the test prompts that leave at each exit without verification."
    title = f"Where tokens leave at {budget}: {label(source, 16)}"
    return chart(f"leaving_{index}", title, caption, paint, height=1.1 + 0.26 * len(groups))


def coverage(record: Record) -> Chart:
    """How many of the model's own tokens a draft vocabulary holds."""
    found = {int(size): share for size, share in record["draft_vocabulary"]["coverage"].items()}
    chosen = record["draft_vocabulary"]["size"]

    def paint(axes: Axes) -> None:
        sizes = sorted(found)
        axes.plot(sizes, [found[size] for size in sizes], "-o", color=colour("part-0"))
        axes.axvline(chosen, color=colour("part-3"), linewidth=1, linestyle="--", label=f"chosen: {chosen}")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [f"{size / 1000:.0f}" for size in sizes])
        axes.minorticks_off()
        axes.set_ylim(0, 1.03)
        percent_axis(axes)
        axes.set_xlabel("tokens in the draft vocabulary (thousands)")
        axes.set_ylabel("share of tokens")

    caption = (
        "Share of what the model says on prompts that no head was trained on; what is not in it cannot be drafted."
    )
    return chart("coverage", "Coverage of the draft vocabulary", caption, paint)
