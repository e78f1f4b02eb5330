"""A calibration's report: the outcome first, every part of the record shown, strings escaped, nothing loaded."""

import copy
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from pages import Elements, check_ids, check_loads_nothing, check_themes

from eexport.calibration.exit_report import write_exit_report
from eexport.calibration.exit_words import findings, reads, verdict
from eexport.calibration.words import budget_words, duration, size
from eexport.runtime.errors import EexportError

NAME = "tiny & <small>"
KINDS = ("code", "<i>json</i>", "text")
SOURCES = ("built-in", "a<b>.jsonl", "written")
LAYERS = 12
BUDGETS = ("1%tokens", "0.1pp", "0.5%rel", "5%tokens")


def make_record(depths: tuple[int, ...] = (3, 6, 9, LAYERS), sources: tuple[str, ...] = SOURCES) -> dict[str, Any]:
    """What a calibration returns, with numbers made up here: budgets of tokens exit, others do not."""
    exits = [depth for depth in depths if depth < LAYERS]
    heads = [_trained(depth, 1000) for depth in depths]
    for head in heads:
        share = 0.4 + 0.5 * head["depth"] / LAYERS
        head["agreement"] = {source: {"all": share, **dict.fromkeys(KINDS, share - 0.02)} for source in sources}
        head["accepted_of_3"] = {source: {"all": 2 * share, **dict.fromkeys(KINDS, share)} for source in sources}
        head["ms"] = 0.9
    return {
        "created": "2026-01-01T00:00:00+00:00",
        "settings": {
            "epochs": 4.0,
            "exits": None,
            "budget": BUDGETS[0],
            "confidence": 0.95,
            "run_code": False,
            "seed": 7,
        },
        "data": {
            "splits": {
                split: {
                    "texts": 40,
                    "tokens": 123456,
                    "sources": dict.fromkeys(sources, 13),
                    "prompts_sha256": f"{place}bcdef" * 11,
                }
                for place, split in enumerate(("train", "predictor", "tune", "test"))
            },
            "skipped": [{"source": f"a.jsonl:{row}", "reason": "no <prompt>"} for row in range(1, 24)],
            "notes": ["a note <b>"],
        },
        "draft_vocabulary": {"size": 4096, "coverage": {"2048": 0.7, "4096": 0.9, "49152": 1.0}},
        "trials": [_trained(depth, 100) for depth in sorted({1, *depths})],
        "heads": heads,
        "predictor": {
            "layers": [1, 2, 3, 4],
            "ms": 0.07,
            "share_of_step": 0.0111,
            "test": {source: _predicted(len(exits) + 1) for source in sources},
        },
        "thresholds": {
            "chosen": _rule(BUDGETS[0], len(exits)),
            "differing_rows": 17,
            "assumed": "prompts are independent; an answer counts as lost if it was right",
            "budgets": [
                {**_rule(budget, len(exits)), "held_out": {source: _used(budget, len(exits)) for source in sources}}
                for budget in BUDGETS
            ],
        },
        "costs": {
            "model": "tiny",
            "num_layers": LAYERS,
            "precision": "int8",
            "dialect": "ort",
            "device": "a <cpu>",
            "backend": "onnxruntime",
            "threads": 2,
            "past": 256,
            "rows": [1, 2],
            "stages": [
                {"name": "embed", "kind": "embed", "layers": [0, 0], "ms": [0.1, 0.1]},
                {"name": "block_00", "kind": "block", "layers": [0, LAYERS], "ms": [4.0, 4.5]},
                {"name": "head", "kind": "head", "layers": [LAYERS, LAYERS], "ms": [1.0, 1.1]},
            ],
            "host_ms": 0.2,
        },
        "stages": {"seconds": {"build": 2.2, "texts": 580.0, "heads": 7000.0}, "peak_rss_mb": 2291, "disk_mb": 655},
        "versions": {"eexport": "0.1.0", "torch": "2.13.0", "python": "3.11.7", "platform": "Linux"},
    }


def _trained(depth: int, tokens: int) -> dict[str, Any]:
    gain = 1.0 if depth in (1, LAYERS) else 1.1 + depth / 100
    payoff = {"speedup": gain, "length": 3, "accepted": 1.4, "draft_ms": 1 + depth / 4, "per_ms": 0.3}
    return {
        "name": "last" if depth == LAYERS else f"exit_{depth:02d}",
        "depth": depth,
        "features": ["previous", "embedding"] if depth == LAYERS else ["hidden"],
        "passes": 2 if depth == LAYERS else 1,
        "trained_tokens": tokens,
        "losses": [4.0 - 0.2 * tenth for tenth in range(10)],
        "speedup": gain,
        "payoff": {"code": payoff, "text": payoff},
    }


def _predicted(classes: int) -> dict[str, Any]:
    return {
        "tokens": 300,
        "exact": 0.6,
        "within_two_layers": 0.61,
        "within_one_exit": 0.9,
        "trivial_class": classes - 1,
        "trivial_exact": 0.5,
        "trivial_within_two_layers": 0.51,
        "trivial_within_one_exit": 0.8,
        "too_shallow": 0.1,
        "confusion": [[60 if named == required else 7 for named in range(classes)] for required in range(classes - 1)]
        + [[0] * classes],
        "calibration_error": 0.03,
        "reliability": [[0.4, 0.5, 100], [0.9, 0.8, 200]],
    }


def _rule(budget: str, exits: int) -> dict[str, Any]:
    leaves = budget.endswith("tokens")
    return {
        "budget": budget,
        "confidence": 0.95,
        "prompts": 320 if leaves else 12,
        "p_value": 0.042 if leaves else 1.0,
        "loss": 0.004 if leaves else 0.0,
        "saved": 0.11 if leaves else 0.0,
        "reason": "31 of 60 candidates hold; the next has p = 0.07" if leaves else "needs at least 2995 prompts",
        "entropy": [0.0, *[0.31] * (exits - 1)] if leaves and exits > 1 else [0.25 if leaves else 0.0] * exits,
        "previous": 2.0 if budget == "5%tokens" else None,
        "exits": leaves,
    }


def _used(budget: str, exits: int) -> dict[str, Any]:
    share = float(budget.split("%")[0]) / 20 + 0.2 if budget.endswith("tokens") else 0.0
    use = {
        "prompts": 32,
        "tokens": 640,
        "tried": share + 0.1,
        "left": share,
        "by_exit": [share / exits] * exits,
        "layers": LAYERS * (1 - 0.6 * share),
        "disagreement": {"value": 0.03 * share, "low": 0.0, "high": 0.06 * share},
        "scored": 20,
        "solved": 9,
        "lost": {"value": 0.05, "low": 0.01, "high": 0.2},
        "lost_of_solved": None,
    }
    return {"all": use, **{kind: {**use, "lost": None, "scored": 0, "solved": 0} for kind in KINDS}}


def render(record: dict[str, Any], path: Path) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_exit_report(record, NAME, path)
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return make_record()


@pytest.fixture(scope="module")
def page(record: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    return render(record, tmp_path_factory.mktemp("report") / "new" / "out.html")


def shown(page: str) -> str:
    return " ".join(" ".join(Elements(page).text).split())


def test_the_outcome_comes_first(page: str) -> None:
    body = shown(page[page.index("<body>") : page.index('<h2 id="heads"')])
    assert "Drafts of exit_09 are expected to give 1.19×; 25% of tokens may leave unverified" in body
    assert "Trained: exits after layers 3, 6 and 9 of 12 and a head on the last hidden state; verified drafts" in body
    assert "its 95% interval, are 25% and 0.75 [0.00, 1.50]% (built-in), 25% and" in body
    headings = re.findall(r'<h2 id="(\w+)"', page)
    assert headings == "heads trials learning predictor thresholds data run costs".split()


def test_a_page_as_every_other(page: str) -> None:
    check_loads_nothing(page)
    check_themes(page)
    check_ids(page)
    assert not re.search(r"https?://(?!www\.w3\.org/)", page)


def test_strings_are_escaped(page: str) -> None:
    elements = Elements(page)
    assert not elements.named("b") and not elements.named("small")
    assert not [attributes for attributes in elements.named("i") if not attributes]
    text = shown(page)
    for said in (NAME, "<i>json</i>", "a<b>.jsonl", "a note <b>", "a <cpu>", "no <prompt>"):
        assert said in text


def test_every_part_of_the_record(page: str) -> None:
    text = shown(page)
    for said in (
        "1% of tokens",
        "0.1 points",
        "0.5% of accuracy",
        "never, 0.31, 0.31",
        "≤ 2",
        "needs at least 2995 prompts",
        "Prompts are independent.",
        "An answer counts as lost if it was right.",
        "on 17 rows of the tune and test texts",
        "trivial: all 12",
        "1.11% of a token's time",
        "reports 91.3% within 2 layers",
        "not kept: drafting with it does not pay",
        "kept: it pays",
        "the last hidden state of the token before and the token's embedding; trained on drafts of 2 tokens",
        "123,456",
        "0bcdef0bcdef0bcd",
        "And 3 more, in calibration.json.",
        "10 min",
        "2.2 GB",
        "655 MB",
        "seed 7",
        "torch 2.13.0",
    ):
        assert said in text, said
    assert not re.search(r"\b(nan|NaN|inf|None|null)\b", text)


def test_the_budget_that_was_asked_for_is_first(record: dict[str, Any], tmp_path: Path) -> None:
    changed = copy.deepcopy(record)
    changed["thresholds"]["budgets"].reverse()
    table = render(changed, tmp_path / "r.html").split('aria-label="Budgets"')[1].split("</table>")[0]
    rows = re.findall(r'<th scope="row" class="name">(.*?)</th>', table)
    assert rows == ["1% of tokens", "5% of tokens", "0.5% of accuracy", "0.1 points"]


def test_every_figure(page: str) -> None:
    said = [str(drawing["aria-label"]) for drawing in Elements(page).named("svg")]
    by_source = (
        "Agreement with the full model",
        "Accepted of 3 drafted",
        "Required and named exit",
        "Where tokens leave",
    )
    for title in by_source:
        assert sum(text.startswith(title) for text in said) == len(SOURCES), title
    once = [text for text in said if not text.startswith(by_source)]
    assert [text.split(".")[0] for text in once] == [
        "Expected speed-up of drafting",
        "Accepted tokens for a millisecond of draft",
        "Loss of the heads",
        "Loss in the trials",
        "Reliability of the exit predictor",
        "Layers left out and tokens that differ",
        "Coverage of the draft vocabulary",
        "Time of a step by rows",
        "Cost of M rows against one",
    ]


def test_one_exit_and_nothing_that_may_leave(tmp_path: Path) -> None:
    """The least that a calibration can be, as JSON gives it back."""
    record = make_record((6,), ("written",))
    for row in (record["thresholds"]["chosen"], *record["thresholds"]["budgets"]):
        row.update(exits=False, entropy=[0.0], reason="there are 0")
    record["trials"][0]["losses"] = [3.0]
    for trained in (*record["trials"], *record["heads"]):
        trained.update(speedup=1.0, payoff={"text": {**trained["payoff"]["text"], "speedup": 1.0, "length": 0}})
    record["data"].update(skipped=[], notes=[])
    text = shown(render(json.loads(json.dumps(record)), tmp_path / "r.html"))
    assert "Drafting is not expected to pay here; no token may leave unverified" in text
    assert (
        "Within the budget of 1% of tokens at 95% confidence no token leaves without verification: there are 0." in text
    )
    assert "Trained: an exit after layer 6 of 12; drafting with it is not expected to pay on this device" in text
    assert "kept: it comes closest" in text and "No row was skipped." in text
    assert "so every token runs all 12 layers" in text and "Held-out" not in text


def test_exits_that_were_asked_for_have_no_trials(record: dict[str, Any], tmp_path: Path) -> None:
    page = render({**record, "trials": []}, tmp_path / "r.html")
    check_ids(page)
    assert "Trials" not in page and "Loss in the trials" not in page and "Loss of the heads" in page


def test_six_exits(tmp_path: Path) -> None:
    check_ids(render(make_record((1, 3, 5, 7, 9, 11, LAYERS)), tmp_path / "r.html"))


def test_a_single_kind_of_text_has_no_table_by_kind(record: dict[str, Any], tmp_path: Path) -> None:
    changed = copy.deepcopy(record)
    for row in changed["thresholds"]["budgets"]:
        row["held_out"] = {source: {"all": found["all"]} for source, found in row["held_out"].items()}
    assert "By kind of text" not in render(changed, tmp_path / "r.html")


def test_the_same_input_gives_the_same_bytes(record: dict[str, Any], page: str, tmp_path: Path) -> None:
    assert render(copy.deepcopy(record), tmp_path / "r.html") == page


def test_a_file_that_cannot_be_written(record: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EexportError, match="cannot be written"):
        write_exit_report(record, NAME, tmp_path / "file" / "r.html")


def test_why_a_candidate_was_kept(record: dict[str, Any]) -> None:
    assert verdict(record, record["trials"][0]) == "not kept: drafting with it does not pay"
    kept = {**record["heads"][-1], "speedup": 1.0}
    assert verdict(record, kept) == "kept: it comes closest"
    assert reads({"features": ["hidden", "hidden.2"]}) == "the hidden state there and the hidden state after layer 2"


def test_what_leaves_is_a_share_of_all_test_tokens(record: dict[str, Any]) -> None:
    changed = copy.deepcopy(record)
    of_source = changed["thresholds"]["budgets"][0]["held_out"]
    for source, (tokens, left) in zip(SOURCES, [(100, 1.0), (200, 0.5), (100, 0.0)], strict=True):
        of_source[source]["all"].update(tokens=tokens, left=left)
    assert findings(changed)["left"] == 0.5


def test_words() -> None:
    assert budget_words("0.5pp") == "0.5 points" and budget_words("1%tokens") == "1% of tokens"
    assert [duration(seconds) for seconds in (2.24, 580, 9000)] == ["2.2 s", "10 min", "2.5 h"]
    assert [size(mb) for mb in (655, 2048)] == ["655 MB", "2.0 GB"]
