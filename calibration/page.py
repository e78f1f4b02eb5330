"""Pages of HTML that load nothing, from the templates beside this file."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from eexport.calibration import words

SKIPPED_SHOWN = 20
"""Rows of data that were skipped and are named on a page."""


def render(template: str, **values: Any) -> bytes:
    """A page as UTF-8; every string among ``values`` is escaped, only drawn SVG is not.

    Raises:
        ModuleNotFoundError: matplotlib, which a page's colours come with, is not installed.
    """
    from eexport.calibration.charts import PALETTE

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        percent=words.percent,
        number=words.number,
        times=words.times,
        points=words.points,
        duration=words.duration,
        size=words.size,
        policy=words.policy_words,
        forecast=words.forecast_name,
        budget=words.budget_words,
    )
    page = environment.get_template(template).render(palette=PALETTE, skipped_shown=SKIPPED_SHOWN, **values)
    # Half a surrogate pair, which JSON may hold and UTF-8 may not, is escaped.
    return page.encode("utf-8", "xmlcharrefreplace")
