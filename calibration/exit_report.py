"""A calibration's report: one page that says what came out, how well it does and what it rests on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eexport.calibration import exit_words, words
from eexport.calibration.page import render
from eexport.runtime.files import write_whole


def write_exit_report(record: Mapping[str, Any], name: str, path: Path) -> None:
    """Write a page on a calibration to ``path``; it loads nothing.

    Args:
        record: As ``calibrate`` returns it, or as JSON gives it back.
        name: Of the checkpoint.
        path: Of the HTML file.

    Raises:
        EexportError: It cannot be written.
        ModuleNotFoundError: matplotlib is not installed.
    """
    from eexport.calibration import exit_figures

    page = render(
        "exit_report.html.jinja",
        record=record,
        name=name,
        whole=words.ALL,
        paper_within_two_layers=words.PAPER_WITHIN_TWO_LAYERS,
        charts=exit_figures.draw(record),
        budgets=exit_words.budget_rows(record),
        exits=exit_words.exits_of(record),
        classes=exit_words.class_names(record),
        groups_of=exit_words.groups_of,
        reads=exit_words.reads,
        verdict=exit_words.verdict,
        **exit_words.findings(record),
    )
    write_whole(path, page, "the report")
