"""The probe's report as files: report.json with everything, report.html to read, charts/ with every figure as PNG."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eexport.calibration import words
from eexport.calibration.page import render
from eexport.runtime.files import write_whole

CHARTS = "charts"
ENTROPY_STEPS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Nats at which the heat map's colour changes."""


def write_report(report: Mapping[str, Any], folder: Path) -> None:
    """Write ``report``, plain JSON values as ``probe`` returns them, into ``folder``; the same input, the same bytes.

    Raises:
        EexportError: A file cannot be written.
        ModuleNotFoundError: matplotlib is not installed.
    """
    from eexport.calibration import figures

    text = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    # Half a surrogate pair, which JSON may hold and UTF-8 may not, is escaped.
    write_whole(folder / "report.json", text.encode("utf-8", "backslashreplace"), "the report")
    drawn = figures.draw(report)
    pictures = {f"{chart.name}.png": chart.png for section in drawn.values() for chart in section}
    for name, png in pictures.items():
        write_whole(folder / CHARTS / name, png, "the report")
    for path in (folder / CHARTS).glob("*.png"):
        if path.name not in pictures:  # of an earlier report on other data
            path.unlink()
    page = render(
        "report.html.jinja",
        report=report,
        kinds=words.kinds_of(report),
        groups=[*([words.ALL] if len(words.kinds_of(report)) > 1 else []), *words.kinds_of(report)],
        whole=words.ALL,
        charts=drawn,
        heatmaps=[heat_rows(heatmap, report["depths"]) for heatmap in report["heatmaps"]],
        entropy_steps=ENTROPY_STEPS,
        paper_layer_use=words.PAPER_LAYER_USE,
        **words.verdict(report),
    )
    write_whole(folder / "report.html", page, "the report")


def heat_rows(heatmap: Mapping[str, Any], depths: list[int]) -> dict[str, Any]:
    """A sample text for the page: per token its readable form and, per depth, colour level, agreement and words."""
    rows = []
    for token, shown, agrees, entropy in zip(
        heatmap["tokens"], heatmap["shown"], heatmap["agrees"], heatmap["entropy"], strict=True
    ):
        cells = [
            {
                "level": _level(nats),
                "agrees": bool(same),
                "title": f"layer {depth}: {words.token_text(said)}  {words.number(nats)} nats",
            }
            for depth, said, same, nats in zip(depths, shown, agrees, entropy, strict=True)
        ]
        rows.append({"token": words.token_text(token), "cells": cells})
    return {"kind": heatmap["kind"], "prompt": heatmap["prompt"], "rows": rows}


def _level(nats: float | None) -> int | None:
    """0 for the least entropy; None where it is not known."""
    return None if nats is None else sum(nats > step for step in ENTROPY_STEPS)
