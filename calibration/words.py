"""The report's numbers and names in words, without drawing anything."""

import re
import unicodedata
from collections.abc import Mapping
from typing import Any

ALL = "all"
PAPER_LAYER_USE = (1.0, 0.65, 0.35, 0.2)
"""Shares of tokens that the method's paper reports for layers 1-8, 9-12, 13-24 and 25-32 of 32."""
PAPER_WITHIN_TWO_LAYERS = 0.913
"""Share of tokens whose exit that paper's predictor names within two layers."""

_NAMES = {
    "full": "Every layer",
    "lookup": "n-gram lookup",
    "exit": "Exit drafts",
    "hybrid": "Lookup, then exit drafts",
}
_BUDGET = re.compile(r"([\d.]+)(pp|%rel|%tokens)")
_SIGNS = {"\n": "↵", "\r": "␍", "\t": "⇥", " ": "·"}


def kinds_of(report: Mapping[str, Any]) -> list[str]:
    """The kinds of text, without the group of all of them."""
    return [kind for kind in report["kinds"] if kind != ALL]


def forecast_name(name: str) -> str:
    """A forecast's name for the reader."""
    if name.startswith("budget "):
        return f"Unverified exits, at most {float(name.removeprefix('budget ').removesuffix('%')):g}% wrong"
    return _NAMES.get(name, name)


def policy_words(policy: Mapping[str, Any]) -> str:
    """A policy's parameters as a phrase."""
    tau = "" if policy["tau"] is None else f" while entropy is at most {policy['tau']:g} nats"
    lookup = f"look up {_count(policy['lookup'])}" if policy["lookup"] else ""
    if policy["mode"] == "budget":
        return f"leave after layer {policy['depth']} where entropy is at most {policy['tau']:g} nats"
    if policy["depth"] is None:
        return lookup or "none"
    draft = f"draft {_count(policy['length'])} after layer {policy['depth']}{tau}"
    return f"{lookup}; else {draft}" if lookup else draft


def _count(tokens: int) -> str:
    return "1 token" if tokens == 1 else f"at most {tokens} tokens"


def percent(value: float | None, digits: int = 0) -> str:
    """A share as percent; a dash for None."""
    return "–" if value is None else f"{100 * value:.{digits}f}%"


def number(value: float | None, digits: int = 2) -> str:
    """A number; a dash for None."""
    return "–" if value is None else f"{value:.{digits}f}"


def times(value: float | None) -> str:
    """A speed-up."""
    return "–" if value is None else f"{value:.2f}×"


def points(value: Mapping[str, float | None] | float | None, scale: float = 100, digits: int = 1) -> str:
    """A loss or an accuracy with its 95% interval where there is one, in percentage points."""
    if value is None or isinstance(value, int | float):
        return "–" if value is None else f"{scale * value:.{digits}f}"
    centre, low, high = (value[key] for key in ("value", "low", "high"))
    text = "–" if centre is None else f"{scale * centre:.{digits}f}"
    return text if low is None or high is None else f"{text} [{scale * low:.{digits}f}, {scale * high:.{digits}f}]"


def duration(seconds: float) -> str:
    """Seconds in the unit that a person would use: "8.0 s", "12 min", "2.5 h"."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"


def size(mb: float) -> str:
    """Mebibytes in the unit that a person would use."""
    return f"{mb:.0f} MB" if mb < 1000 else f"{mb / 1024:.1f} GB"


def budget_words(budget: str) -> str:
    """What a budget such as "0.5pp" allows."""
    amount, of = _BUDGET.fullmatch(budget).groups()  # type: ignore[union-attr]
    return f"{amount} points" if of == "pp" else f"{amount}% of {'accuracy' if of == '%rel' else 'tokens'}"


def token_text(token: str) -> str:
    """A token so that each of its characters can be seen: spaces, line ends, controls."""
    if not token:
        return "(special)"
    return "".join(_SIGNS.get(char) or (char if _shown(char) else f"<{ord(char):04X}>") for char in token)


def _shown(char: str) -> bool:
    # Controls, and format characters such as those that turn the direction of text
    return unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def verdict(report: Mapping[str, Any]) -> dict[str, Any]:
    """The page's first lines: ``headline``, ``outcome`` ("pays" or "does not pay"), ``reasons``."""
    said = report["predictions"][0]["verdict"]
    skip = percent(report["depth"][ALL]["decided"]["skip"])
    late = f"left exactly where its answer no longer changes, which nothing can know in time, a token would skip {skip}"
    return {
        "headline": said["headline"],
        "outcome": "pays" if said["pays"] else "does not pay",
        "reasons": [reason[:1].upper() + reason[1:] for reason in (*said["reasons"], f"{late} of the layers")],
    }
