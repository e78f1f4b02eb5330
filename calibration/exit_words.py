"""A calibration's record in words and rows, without drawing anything."""

from collections.abc import Mapping, Sequence
from typing import Any

from eexport.calibration.words import ALL, budget_words, percent, points

Record = Mapping[str, Any]

_FEATURES = {
    "hidden": "the hidden state there",
    "previous": "the last hidden state of the token before",
    "embedding": "the token's embedding",
}


def kinds_of(found: Mapping[str, Any]) -> list[str]:
    """The kinds of text, without the group of all of them."""
    return [kind for kind in found if kind != ALL] or [ALL]


def groups_of(found: Mapping[str, Any]) -> list[str]:
    """All kinds together where there are several, then each of them."""
    return [*([ALL] if ALL in found and len(kinds_of(found)) > 1 else []), *kinds_of(found)]


def exits_of(record: Record) -> list[Record]:
    """The heads at which a token may leave, shallowest first."""
    return [head for head in record["heads"] if head["depth"] < record["costs"]["num_layers"]]


def class_names(record: Record) -> list[str]:
    """Depths that the predictor tells apart; the last is full depth."""
    return [*(str(head["depth"]) for head in exits_of(record)), f"all {record['costs']['num_layers']}"]


def asked_budget(record: Record) -> Record:
    """The row of the budget that was asked for."""
    return budget_rows(record)[0]


def budget_rows(record: Record) -> list[Record]:
    """Rows of all budgets, the one that was asked for first."""
    asked = record["thresholds"]["chosen"]["budget"]
    rows: Sequence[Record] = record["thresholds"]["budgets"]
    return sorted(rows, key=lambda row: bool(row["budget"] != asked))


def skipped_layers(record: Record, use: Record) -> float:
    """Share of layers that are not run for a token before it is out."""
    return 1 - float(use["layers"]) / float(record["costs"]["num_layers"])


def reads(head: Record) -> str:
    """What a head reads."""
    return " and ".join(
        _FEATURES.get(feature, f"the hidden state after layer {feature.removeprefix('hidden.')}")
        for feature in head["features"]
    )


def verdict(record: Record, trial: Record) -> str:
    """Whether a candidate was kept, and why."""
    kept = trial["name"] in {head["name"] for head in record["heads"]}
    if trial["speedup"] > 1:
        return "kept: it pays" if kept else "not kept"
    return "kept: it comes closest" if kept else "not kept: drafting with it does not pay"


def findings(record: Record) -> dict[str, Any]:
    """The page's first lines: ``headline``, ``pays``, and a sentence each on ``drafting`` and on ``leaving``."""
    costs, best = record["costs"], max(record["heads"], key=lambda head: float(head["speedup"]))
    device = f"this device ({costs['device']}, {costs['threads']} threads, {costs['precision']})"
    if best["speedup"] > 1:
        gains = _listed([f"{found['speedup']:.2f} ({kind})" for kind, found in best["payoff"].items()])
        drafting = (
            f"verified drafts of {best['name']} are expected to be {gains} times as fast on {device} as no drafts"
        )
        headline = f"Drafts of {best['name']} are expected to give {best['speedup']:.2f}×"
    else:
        drafting = f"drafting with {'it' if len(record['heads']) == 1 else 'them'} is not expected to pay on {device}"
        headline = "Drafting is not expected to pay here"
    row = asked_budget(record)
    share = _left(row)
    outcome = f"{percent(share)} of tokens may leave unverified" if row["exits"] else "no token may leave unverified"
    return {
        "headline": f"{headline}; {outcome}",
        "pays": best["speedup"] > 1 or row["exits"],
        "drafting": f"Trained: {_trained(record)}; {drafting}.",
        "leaving": f"{_leaving(row)}.",
        "left": share,
        "best": best,
    }


def _trained(record: Record) -> str:
    exits, layers = [str(head["depth"]) for head in exits_of(record)], record["costs"]["num_layers"]
    text = f"{'an exit after layer' if len(exits) == 1 else 'exits after layers'} {_listed(exits)} of {layers}"
    return text if len(exits) == len(record["heads"]) else f"{text} and a head on the last hidden state"


def _leaving(row: Record) -> str:
    within = f"the budget of {budget_words(row['budget'])} at {100 * row['confidence']:g}% confidence"
    if not row["exits"]:
        return f"Within {within} no token leaves without verification: {row['reason']}"
    uses = [
        f"{percent(found[ALL]['left'])} and {points(found[ALL]['disagreement'], digits=2)}% ({source})"
        for source, found in row["held_out"].items()
    ]
    return (
        f"Within {within}, the shares of the tokens of held-out prompts that leave early without verification and that "
        f"come out other than the full model's, with its 95% interval, are {_listed(uses)}"
    )


def _left(row: Record) -> float:
    """Share of all held-out tokens that leave early."""
    uses = [found[ALL] for found in row["held_out"].values()]
    return float(sum(use["left"] * use["tokens"] for use in uses) / sum(use["tokens"] for use in uses))


def _listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
