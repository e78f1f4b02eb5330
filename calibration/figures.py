"""The report's figures of quality, each from the report's plain JSON values; ``draw`` makes all figures."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from eexport.calibration.charts import (
    STYLES,
    Chart,
    chart,
    colour,
    errorbars,
    kind_colours,
    label,
    layers_axis,
    numbers,
    percent_axis,
)
from eexport.calibration.speed_figures import breakeven, cost_by_rows, cost_ratio, drafts, drafts_by_depth, speedups
from eexport.calibration.words import ALL, PAPER_LAYER_USE, kinds_of

Report = Mapping[str, Any]
Series = Mapping[str, tuple[Sequence[float | None], str]]
"""By label: values and the name of a colour."""

_SIMILARITY = {
    "hidden_cosine": "hidden-state cosine",
    "logit_cosine": "logit cosine",
    "top_overlap": "top-10 overlap",
    "top_order": "top-10, same place",
    "agreement": "same likeliest token",
}
_EAS = {"logits": "logits", "hidden": "hidden states", "top": "top-10 overlap"}


def draw(report: Report) -> dict[str, list[Chart]]:
    """All figures that the report has numbers for, by section."""
    sections: dict[str, list[Chart | None]] = {
        "predictions": [*speedups(report), breakeven(report)],
        "curves": [similarity(report), agreement(report), entropy(report), eas_by_depth(report), eas_by_alpha(report)],
        "oracle": [*losses(report), divergence(report), perplexity(report)],
        "depth": [exit_points(report, "confident"), exit_points(report, "decided"), layer_use(report)],
        "drafts": [drafts(report), drafts_by_depth(report)],
        "costs": [cost_by_rows(report), cost_ratio(report)],
    }
    return {name: [made for made in charts if made is not None] for name, charts in sections.items()}


def _over_depth(report: Report, name: str, title: str, caption: str, unit: str, series: Series) -> Chart:
    def paint(axes: Axes) -> None:
        marker = "o" if len(report["depths"]) <= 12 else ""
        for index, (text, (values, name_)) in enumerate(series.items()):
            style = STYLES[index % len(STYLES)]
            axes.plot(
                report["depths"], numbers(values), linestyle=style, marker=marker, label=text, color=colour(name_)
            )
        layers_axis(axes, report["model"]["num_layers"])
        axes.set_ylabel(unit)
        if unit == "share of tokens":
            axes.set_ylim(0, 1.03)
            percent_axis(axes)
        elif unit != "similarity":
            axes.set_ylim(bottom=0)

    return chart(name, title, caption, paint)


def _kind_series(report: Report, quantity: str) -> Series:
    names = kind_colours(kinds_of(report))
    return {label(kind): (report["curves"][kind][quantity], names[kind]) for kind in kinds_of(report)}


def similarity(report: Report) -> Chart:
    """How alike each depth and the last one are, over all tokens."""
    curves = report["curves"][ALL]
    series = {text: (curves[key], f"part-{index}") for index, (key, text) in enumerate(_SIMILARITY.items())}
    caption = "Each layer against the last one, mean over all tokens. 1 is the same."
    return _over_depth(report, "similarity", "Similarity to the last layer", caption, "similarity", series)


def agreement(report: Report) -> Chart:
    """Share of tokens on which a depth already says what the last one says."""
    caption = "Share of tokens whose likeliest token at that layer is the last layer's."
    made = _kind_series(report, "agreement")
    return _over_depth(report, "agreement", "Agreement with the last layer", caption, "share of tokens", made)


def entropy(report: Report) -> Chart:
    """Entropy over depth."""
    caption = "Mean entropy of the distribution that the model's own norm and head give at that layer."
    made = _kind_series(report, "entropy")
    return _over_depth(report, "entropy", "Entropy over depth", caption, "entropy (nats)", made)


def eas_by_depth(report: Report) -> Chart:
    """The score of each depth."""
    found = report["eas"][ALL]["by_depth"]
    series = {text: (found[key], f"part-{index}") for index, (key, text) in enumerate(_EAS.items())}
    alpha = report["settings"]["alpha"]
    caption = f"Similarity to the power {alpha:g} times the share of layers skipped to the power {1 - alpha:g}."
    return _over_depth(report, "eas_depth", f"Adaptability score by layer, α = {alpha:g}", caption, "score", series)


def eas_by_alpha(report: Report) -> Chart | None:
    """The model's score over α."""
    if (found := report["eas"][ALL]["by_alpha"]) is None:
        return None

    def paint(axes: Axes) -> None:
        for index, (key, text) in enumerate(_EAS.items()):
            steps = [step / (len(found[key]) - 1) for step in range(len(found[key]))]
            axes.plot(steps, numbers(found[key]), linestyle=STYLES[index], label=text, color=colour(f"part-{index}"))
        axes.set_xlabel("α, the weight of similarity")
        axes.set_ylabel("EAS")
        axes.set_xlim(0, 1)
        axes.set_ylim(bottom=0)

    caption = "Mean of the layers' scores. α = 0 counts only what is skipped, α = 1 only how similar it is."
    return chart("eas_alpha", "Adaptability score over α", caption, paint)


def losses(report: Report) -> list[Chart]:
    """The oracle's loss of accuracy against skipped layers, a figure for each kind with scored answers."""
    names = kind_colours(kinds_of(report))
    made = []
    for index, kind in enumerate(kinds_of(report)):
        found = report["oracle"][kind]
        if not found["scored"]:
            continue

        def paint(axes: Axes, found: Report = found, name: str = names[kind]) -> None:
            points = [point for point in found["points"] if point["loss"]]
            axes.axhline(0, color=colour("muted"), linewidth=0.8)
            for number, budget in enumerate(found["budgets"]):
                text = "budgets: " + ", ".join(row["budget"] for row in found["budgets"]) if number == 0 else None
                axes.axhline(100 * budget["allowed"], color=colour("part-3"), linewidth=0.8, linestyle=":", label=text)
            errorbars(axes, points, "loss", 100, colour(name), "oracle, 95% interval")
            last = -1.0
            for point in points:
                if point["skip"] - last > 0.02:
                    place = 100 * point["skip"], 100 * point["loss"]["value"]
                    text = f"δ {point['threshold']:g}"
                    axes.annotate(text, place, xytext=(4, 4), textcoords="offset points", fontsize=8.5)
                    last = point["skip"]
            axes.set_xlabel("layers skipped (%)")
            axes.set_ylabel("loss (points)")
            axes.margins(x=0.12)

        caption = f"Accuracy lost on {found['scored']} prompts, in percentage points, as the oracle's δ falls."
        made.append(chart(f"loss_{index}", f"Oracle: {label(kind)}, loss and skipped layers", caption, paint))
    return made


def divergence(report: Report) -> Chart:
    """How far the oracles' distributions are from the full model's."""
    names = kind_colours(kinds_of(report))

    def paint(axes: Axes) -> None:
        for kind in kinds_of(report):
            errorbars(axes, report["oracle"][kind]["points"], "divergence", 1, colour(names[kind]), label(kind))
        axes.set_xlabel("layers skipped (%)")
        axes.set_ylabel("KL divergence (nats a token)")
        axes.set_ylim(bottom=0)

    caption = "From the full model's distribution to that at the oracle's exits; 95% intervals over prompts."
    return chart("divergence", "Oracle: divergence and skipped layers", caption, paint)


def perplexity(report: Report) -> Chart:
    """The full model's perplexity on the oracles' texts."""
    names = kind_colours(kinds_of(report))

    def paint(axes: Axes) -> None:
        for index, kind in enumerate(kinds_of(report)):
            found = report["oracle"][kind]
            skip = [0.0, *(100 * point["skip"] for point in found["points"])]
            values = [found["perplexity"], *(point["perplexity"] for point in found["points"])]
            style = STYLES[index % len(STYLES)]
            axes.plot(skip, numbers(values), linestyle=style, marker="o", color=colour(names[kind]), label=label(kind))
        axes.set_xlabel("layers skipped (%)")
        axes.set_ylabel("perplexity")

    caption = "The full model's perplexity on the text that the oracle's exits made; 0% is its own text."
    return chart("perplexity", "Oracle: perplexity and skipped layers", caption, paint)


def exit_points(report: Report, rule: str) -> Chart:
    """Where tokens could leave, by entropy or by the answer itself."""
    names, depths = kind_colours(kinds_of(report)), report["depths"]
    tau = report["settings"]["tau"]
    total = max(1, sum(report["kinds"][kind]["tokens"] for kind in kinds_of(report)))

    def paint(axes: Axes) -> None:
        below = [0.0] * len(depths)
        for kind in kinds_of(report):
            shares = [count / total for count in report["depth"][kind][rule]["histogram"]]
            axes.bar(depths, shares, width=0.8, bottom=below, color=colour(names[kind]), label=label(kind), linewidth=0)
            below = [a + b for a, b in zip(below, shares, strict=True)]
        layers_axis(axes, report["model"]["num_layers"])
        percent_axis(axes)
        axes.set_ylabel("share of tokens")

    if rule == "decided":
        title, caption = (
            "Layer at which the answer is decided",
            "From there on, every layer's likeliest token is the last's.",
        )
    else:
        never = report["depth"][ALL][rule]["never"]
        title = f"Layer at which entropy stays under {tau:g} nats"
        caption = f"Tokens that never get there are left out: {never:.0%} of all."
    return chart(f"exits_{rule}", title, caption, paint)


def layer_use(report: Report) -> Chart:
    """What share of tokens would run each range of layers."""
    found = report["depth"][ALL]
    ranges = [f"{first}-{last}" for first, last in found["layer_ranges"]]
    series = {"until entropy stays under τ": (found["confident"]["layer_use"], "part-0")}
    series["until the answer is decided"] = (found["decided"]["layer_use"], "part-1")
    if len(ranges) == len(PAPER_LAYER_USE):
        series["the method's paper, 32 layers"] = (list(PAPER_LAYER_USE), "part-4")

    def paint(axes: Axes) -> None:
        width = 0.8 / len(series)
        for index, (text, (values, name)) in enumerate(series.items()):
            places = [place + (index - (len(series) - 1) / 2) * width for place in range(len(ranges))]
            axes.bar(places, values, width=0.9 * width, color=colour(name), label=text)
        axes.set_xticks(range(len(ranges)), ranges)
        axes.grid(False, axis="x")
        axes.set_xlabel("layers")
        axes.set_ylabel("share of tokens")
        percent_axis(axes)

    caption = "Share of tokens that still run each range of layers."
    return chart("layer_use", "Use of layers", caption, paint, height=3.3)
