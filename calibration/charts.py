"""How the report's figures look: one drawing, saved as PNG (light) and as SVG that takes its colours from the page.

The light theme's colours stand for names: in the SVG each becomes ``var(--name)``, which the page sets for both themes.
"""

import io
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

PALETTE = {
    "ink": ("#1d2126", "#e8eaed"),
    "muted": ("#5c6470", "#a3abb6"),
    "grid": ("#dfe3e8", "#363c45"),
    # Kinds of text, after Okabe and Ito; told apart with any colour vision.
    "kind-0": ("#0072b2", "#56a9e8"),
    "kind-1": ("#d55e00", "#ff8f3f"),
    "kind-2": ("#009e73", "#35d0a3"),
    "kind-3": ("#b8568c", "#e79bc6"),
    "kind-4": ("#c98500", "#f5c04a"),
    "kind-5": ("#56b4e9", "#8fd3ff"),
    "kind-6": ("#7a5c3e", "#c9a27e"),
    "kind-7": ("#6b6b6b", "#b0b0b0"),
    # Anything else that has to be told apart, after Tol's muted scheme.
    "part-0": ("#332288", "#9f92f0"),
    "part-1": ("#2f8f83", "#5fd0c3"),
    "part-2": ("#8a7d1f", "#d3c65a"),
    "part-3": ("#882255", "#e07aab"),
    "part-4": ("#5b6b7d", "#a9b8c8"),
    # Depth, from shallow to deep.
    "deep-0": ("#8fb0d4", "#41689b"),
    "deep-1": ("#6690c1", "#5c86bd"),
    "deep-2": ("#4474ae", "#80a8dc"),
    "deep-3": ("#265493", "#a8c8f0"),
    "deep-4": ("#123a70", "#d6e6ff"),
}
"""Colours by name: light and dark theme. No two light ones are equal."""

STYLES = ("-", "--", "-.", ":", (0, (5, 1.5, 1, 1.5, 1, 1.5)))
KNOWN_KINDS = ("code", "json", "math", "text")
Bars = tuple[str, Sequence[float | None], str]
"""A series of bars: label, values, and the name of a colour."""
WIDTH = 4.6  # inches; 331 points, so that text keeps its size on a phone 360 pixels wide
_RC = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so PNGs are the same everywhere
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.edgecolor": PALETTE["muted"][0],
    "axes.labelcolor": PALETTE["ink"][0],
    "axes.titlecolor": PALETTE["ink"][0],
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": PALETTE["grid"][0],
    "grid.linewidth": 0.7,
    "text.color": PALETTE["ink"][0],
    "text.parse_math": False,  # a kind of text may hold dollar signs
    "xtick.color": PALETTE["muted"][0],
    "ytick.color": PALETTE["muted"][0],
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "legend.fontsize": 9.5,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "svg.fonttype": "none",
}
PERCENT = FuncFormatter(lambda value, _: f"{100 * value:.4g}%")
_DPI = 200
_SVG = "http://www.w3.org/2000/svg"
_XLINK = "http://www.w3.org/1999/xlink"


@dataclass(frozen=True, eq=False)
class Chart:
    """A figure: ``name`` is its file's stem and the prefix of its ids, ``caption`` says what it shows."""

    name: str
    title: str
    caption: str
    svg: str
    figure: Figure

    @property
    def png(self) -> bytes:
        """The same as PNG, rendered anew each time."""
        png = io.BytesIO()
        with _style(self.name):
            self.figure.savefig(png, format="png", dpi=_DPI, metadata={"Software": None})
        return png.getvalue()


def chart(name: str, title: str, caption: str, draw: Callable[[Axes], None], height: float = 2.9) -> Chart:
    """Draw a figure of ``height`` inches; the same input gives the same bytes."""
    with _style(name):
        figure = Figure(figsize=(WIDTH, height), dpi=_DPI, layout="constrained")
        axes = figure.subplots()
        axes.set_title(title)
        draw(axes)
        handles, labels = axes.get_legend_handles_labels()
        if handles:
            figure.legend(handles, labels, loc="outside lower center", ncols=_columns(labels))
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # it is laid out; once is enough
        svg = io.BytesIO()
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
    return Chart(name, title, caption, _themed(svg.getvalue(), name, f"{title}. {caption}"), figure)


@contextmanager
def _style(name: str) -> Iterator[None]:
    settings: Any = {**_RC, "svg.hashsalt": name}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # in PNGs a kind's name may show as boxes
        yield


def colour(name: str) -> str:
    """The colour to draw with."""
    return PALETTE[name][0]


def kind_colours(kinds: Iterable[str]) -> dict[str, str]:
    """One name of a colour per kind of text, always the same for the four usual kinds."""
    given = set(kinds)
    result = {kind: f"kind-{place}" for place, kind in enumerate(KNOWN_KINDS) if kind in given}
    free = [4, 5, 6, 7, *(place for place, kind in enumerate(KNOWN_KINDS) if kind not in given)]
    for index, kind in enumerate(sorted(given - set(KNOWN_KINDS))):
        result[kind] = f"kind-{free[index % len(free)]}"
    return result


def label(text: str, longest: int = 24) -> str:
    """A string from the data as a label: printable, short, and with nothing that matplotlib takes for a sign."""
    clean = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
    clean = clean if len(clean) <= longest else clean[: longest - 1] + "…"
    return f" {clean}" if clean.startswith("_") else clean  # a leading underscore would hide it from the legend


def layers_axis(axes: Axes, num_layers: int) -> None:
    """The depth as x axis."""
    axes.set_xlabel(f"layer (of {num_layers})")
    axes.set_xlim(0.4, num_layers + 0.6)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def percent_axis(axes: Axes) -> None:
    """Shares shown as percent on the y axis."""
    axes.yaxis.set_major_formatter(PERCENT)


def depth_colour(index: int, count: int) -> str:
    """The name of the colour of one of ``count`` depths, counted from the shallowest."""
    return f"deep-{round(index * 4 / max(1, count - 1))}"


def grouped_bars(
    axes: Axes, groups: Sequence[str], bars: Sequence[Bars], start: float = 0, marks: Sequence[float | None] = ()
) -> None:
    """Lying bars from ``start`` on, a bar of each series for every group from the top down.

    Args:
        axes: Where to draw.
        groups: G of them by name.
        bars: The series, G values each.
        start: Where bars begin.
        marks: A diamond for each group, or none.
    """
    height = 0.8 / len(bars)
    for number, (text, values, name) in enumerate(bars):
        places = [place + (number - (len(bars) - 1) / 2) * height for place in range(len(groups))]
        lengths = [value - start for value in numbers(values)]
        axes.barh(places, lengths, 0.85 * height, left=start, color=colour(name), label=text)
    if marks:
        axes.plot(numbers(marks), range(len(groups)), "D", color=colour("ink"), markersize=4.5)
    groups_axis(axes, groups)


def groups_axis(axes: Axes, groups: Sequence[str]) -> None:
    """Groups of lying bars by name, from the top down."""
    axes.set_yticks(range(len(groups)), groups)
    axes.tick_params(axis="y", labelcolor=colour("ink"), length=0)
    axes.invert_yaxis()
    axes.grid(False, axis="y")


def bars_height(groups: int, bars: int) -> float:
    """Inches that a figure of ``grouped_bars`` takes."""
    return 0.9 + 0.13 * (bars + 1) * groups


def errorbars(axes: Axes, points: Sequence[Mapping[str, Any]], key: str, scale: float, tint: str, text: str) -> None:
    """The values at ``key`` of points with their intervals, over the share of layers that each skips."""
    values = [point[key]["value"] for point in points]
    bounds = [
        [scale * abs(value - (value if (bound := point[key][side]) is None else bound)) for value, point in pairs]
        for side in ("low", "high")
        for pairs in [list(zip(values, points, strict=True))]
    ]
    axes.errorbar(
        [100 * point["skip"] for point in points],
        [scale * value for value in values],
        yerr=bounds,
        fmt="o-",
        color=tint,
        linewidth=1.1,
        elinewidth=0.6,
        capsize=2,
        label=text,
    )


def numbers(values: Sequence[float | None]) -> list[float]:
    """With what is missing as NaN, which is not drawn."""
    return [float("nan") if value is None else value for value in values]


def _columns(labels: Sequence[str]) -> int:
    """The most columns in which a legend fits the width; labels are filled in column by column."""
    for count in range(len(labels), 1, -1):
        widest = [max(map(len, part)) for part in np.array_split(labels, count)]
        if sum(42 + 5.6 * length for length in widest) < 72 * WIDTH:  # points: the sign, and the letters
            return count
    return 1


def _themed(svg: bytes, name: str, description: str) -> str:
    """The SVG for inlining: colours by name, ids that are unique on the page, no metadata."""
    names = {light: f"var(--{key})" for key, (light, _) in PALETTE.items()}
    colours = re.compile("|".join(names))
    root = ElementTree.fromstring(svg)
    for child in list(root):
        if child.tag == f"{{{_SVG}}}metadata":
            root.remove(child)
        elif child.tag == f"{{{_SVG}}}defs":
            for style in child.findall(f"{{{_SVG}}}style"):
                child.remove(style)  # it would apply to the whole page, which has its own
    for element in root.iter():
        kept = {}
        for key, value in element.attrib.items():
            if key == "id":
                if element.tag == f"{{{_SVG}}}g":
                    continue  # nothing refers to groups
                value = f"{name}-{value}"
            elif key in (f"{{{_XLINK}}}href", "href"):
                key, value = "href", f"#{name}-{value.removeprefix('#')}"
            elif key in ("style", "fill", "stroke", "clip-path"):
                value = value.replace("url(#", f"url(#{name}-")
                value = colours.sub(lambda match: names[match[0]], value)
            kept[key] = value
        element.attrib.clear()
        element.attrib.update(kept)
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.attrib.update({"role": "img", "aria-label": description})
    ElementTree.register_namespace("", _SVG)
    return ElementTree.tostring(root, encoding="unicode")
