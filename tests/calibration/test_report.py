"""The report: the page says the verdict first, escapes what it was given, loads nothing and shows every figure."""

import copy
import json
import re
import struct
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pages import Elements, check_ids, check_loads_nothing, check_themes

from eexport.calibration.analysis import Sample, Subject, analyse
from eexport.calibration.charts import PALETTE, kind_colours, label
from eexport.calibration.data import Encoded, Prompt
from eexport.calibration.decode import FULL, Continuation, Written
from eexport.calibration.measures import Measures
from eexport.calibration.report import heat_rows, write_report
from eexport.calibration.speed_figures import breakeven
from eexport.calibration.words import points, policy_words, token_text
from eexport.runtime.costs import CostTable, StageCost
from eexport.runtime.errors import EexportError

THRESHOLDS = (0.5, 0.9)
WORDS = ["", "\n", "\t", "\ufffd", "<b>", " the", "\u202e", "a&b", "x", "y"]
KINDS = ("code", "<script>alert(1)</script>", "$x$_", "_漢")
EVERY_CHART = {
    *("speedup_0", "speedup_1", "breakeven", "similarity", "agreement", "entropy", "eas_depth", "eas_alpha"),
    *("divergence", "perplexity", "exits_confident", "exits_decided", "layer_use", "drafts", "drafts_depth"),
    *("costs", "cost_ratio"),
}


def make_report(kinds: tuple[str, ...] = KINDS, depths: tuple[int, ...] = (1, 2, 3, 4)) -> Any:
    """What the probe returns for texts made up here, two of each kind; the first kind has scored answers."""
    layers, rng = depths[-1], np.random.default_rng(0)
    samples = []
    for kind in kinds:
        for index in range(2):
            samples.append(_sample(kind, kind == kinds[0], index, depths, rng))
    stages = (
        StageCost("embed", "embed", (0, 0), (0.1,) * 8),
        StageCost("block_00", "block", (0, layers), tuple(4 + 0.4 * row for row in range(8))),
        StageCost("head", "head", (layers, layers), tuple(1 + 0.1 * row for row in range(8))),
    )
    rows = tuple(range(1, 9))
    table = CostTable("tiny", layers, "int8", "ort", "a <cpu>", "onnxruntime", 2, 256, rows, stages, 0.2)
    subject = Subject(layers, depths, frozenset({1}), THRESHOLDS, 0.5, 0.5)
    return {
        "schema_version": 1,
        "created": "2026-01-01T00:00:00+00:00",
        "eexport": "0.1.0",
        "model": {"name": "tiny & <small>", "form": "checkpoint, fp32", "num_layers": layers, "sha256": "ab" * 32},
        "settings": {"tokens": 12, "alpha": 0.5, "tau": 0.5, "seed": 0, "thresholds": list(THRESHOLDS)},
        "data": {
            "used": len(samples),
            "cut": 0,
            "left_out": 3,
            "stopped_by": "max-tokens",
            "skipped": [{"source": f"a.jsonl:{row}", "reason": "no <prompt>"} for row in range(1, 24)],
        },
        "timing": {"seconds": 1.0, "tokens": 12 * len(samples), "seconds_per_1000_tokens": None},
        **analyse(samples, subject, table, lambda ids: "".join(WORDS[i] for i in ids)),
    }


def _sample(kind: str, scored: bool, index: int, depths: tuple[int, ...], rng: np.random.Generator) -> Sample:
    tokens, count = 12, len(depths)
    argmax = rng.integers(0, len(WORDS), (tokens, count)).astype(np.int32)
    shares = np.linspace(0, 1, count, dtype=np.float32) + np.zeros((tokens, 1), np.float32)
    measures = Measures(
        hidden_cosine=shares,
        logit_cosine=2 * shares - 1,
        top_overlap=(10 * shares).astype(np.uint8),
        top_order=(10 * shares).astype(np.uint8),
        argmax=argmax,
        probability=shares,
        entropy=5 * (1 - shares),
    )
    written = [int(token) for token in argmax[:, -1]]
    paths = {FULL: Written(written, [count - 1] * tokens, [0.0] * tokens, [0.3] * tokens)}
    for policy in range(len(THRESHOLDS)):
        paths[policy] = Written(written, [count - 1 - policy % count] * tokens, [0.1] * tokens, [0.5] * tokens)
    task = "exact_match" if scored else None
    prompt = Prompt(kind, "hello", task, "7", None, None, "", f"a.jsonl:{index}")  # type: ignore[arg-type]
    correct = {policy: (policy != 0 or index == 0) if scored else None for policy in paths}
    return Sample(Encoded(prompt, (8, 9, 4), False), Continuation(measures, paths), correct)


@pytest.fixture(scope="module")
def report() -> Any:
    return make_report()


@pytest.fixture(scope="module")
def folder(report: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "new" / "report"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_report(report, folder)
    return folder


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return (folder / "report.html").read_text(encoding="utf-8")


def test_everything_is_in_the_json(report: Any, folder: Path) -> None:
    assert json.loads((folder / "report.json").read_text(encoding="utf-8")) == report


def test_the_verdict_comes_first(report: Any, page: str) -> None:
    prediction = report["predictions"][0]
    assert re.findall(r"<h1>(.*?)</h1>", page) == [prediction["verdict"]["headline"]]
    body = page[page.index("<body>") :]
    said = [prediction["verdict"]["reasons"][0][1:], "EAS, logits", "<h2"]
    assert [body.index(text) for text in said] == sorted(body.index(text) for text in said)
    headings = re.findall(r'<h2 id="(\w+)"', page)
    assert headings == "predictions curves oracle depth heat drafts costs data method caveats".split()
    lookup = next(row for row in prediction["forecasts"] if row["name"] == "lookup")
    assert f"<dd>{lookup['speedup']['all']:.2f}×</dd>" in page


def test_strings_are_escaped(page: str) -> None:
    elements = Elements(page)
    assert not elements.named("script") and not elements.named("b") and not elements.named("small")
    text = " ".join(elements.text)
    for shown in ("<script>alert(1)</script>", "tiny & <small>", "no <prompt>", "a <cpu>", "$x$_", "_漢", "<b>"):
        assert shown in text


def test_nothing_is_loaded(page: str) -> None:
    check_loads_nothing(page)


def test_every_figure(folder: Path, page: str) -> None:
    made = {path.stem: path.read_bytes() for path in (folder / "charts").glob("*.png")}
    assert list(made.keys() - EVERY_CHART) == ["loss_3"], "of the only kind with scored answers"
    assert made.keys() > EVERY_CHART
    for png in made.values():
        assert png[:8] == b"\x89PNG\r\n\x1a\n"
        width, _ = struct.unpack(">II", png[16:24])
        assert width == 920
    drawings = [attributes for attributes in Elements(page).named("svg")]
    assert len(drawings) == len(made)
    assert all(drawing["role"] == "img" and drawing["aria-label"] for drawing in drawings)


def test_figures_take_the_colours_of_the_page(page: str) -> None:
    assert len({light for light, _ in PALETTE.values()}) == len(PALETTE)
    check_themes(page)


def test_ids_are_unique(page: str) -> None:
    check_ids(page)


def test_the_same_input_gives_the_same_bytes(report: Any, folder: Path, tmp_path: Path) -> None:
    write_report(copy.deepcopy(report), tmp_path)
    files = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    assert files == [path.relative_to(tmp_path) for path in sorted(tmp_path.rglob("*")) if path.is_file()]
    for path in files:
        assert (folder / path).read_bytes() == (tmp_path / path).read_bytes(), path


def test_what_is_missing_is_a_dash(page: str) -> None:
    text = " ".join(Elements(page).text)
    assert not re.search(r"\b(nan|NaN|inf|None|null)\b", text)
    assert "–" in text  # boilerplate that does not vary has no correlation


def test_skipped_rows(page: str) -> None:
    assert page.count("no &lt;prompt&gt;") == 20
    assert "a.jsonl:20:" in page and "And 3 more" in page
    assert "because --max-tokens was reached" in page


def test_tokens_can_be_read(report: Any, page: str) -> None:
    assert token_text("") == "(special)"
    assert token_text(" the\n\t") == "·the↵⇥"
    assert token_text("\u202e\x00") == "<202E><0000>"
    assert token_text("\ufffdé漢") == "\ufffdé漢"
    heatmap = report["heatmaps"][0]
    rows = heat_rows(heatmap, report["depths"])["rows"]
    assert [row["token"] for row in rows] == [token_text(token) for token in heatmap["tokens"]]
    assert [cell["agrees"] for cell in rows[3]["cells"]] == [bool(same) for same in heatmap["agrees"][3]]
    assert rows[0]["cells"][0]["title"] == f"layer 1: {token_text(heatmap['shown'][0][0])}  5.00 nats"
    assert [cell["level"] for cell in rows[0]["cells"]] == [6, 5, 4, 0]
    cells = re.findall(r'<td class="[^"]*" title="layer ', page)
    assert len(cells) == len(KINDS) * 12 * len(report["depths"])
    assert "\u202e" not in page


@pytest.fixture(scope="module")
def poor() -> Any:
    """A report of one kind of text, some of many layers, and with all that may be unknown unknown."""
    report = make_report(("text",), tuple(range(2, 127, 2)))
    for group in ("all", "text"):
        report["curves"][group]["entropy"][1] = None
        report["drafts"][group]["lookup"] = [None] * 7
    report["heatmaps"][0]["entropy"][0][0] = None
    report["oracle"]["text"]["points"][0]["divergence"].update(low=None, high=None)
    report["data"]["skipped"][0]["reason"] = "half a pair: \ud800"
    return report


@pytest.fixture(scope="module")
def poor_folder(poor: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("poor")
    write_report(poor, folder)
    return folder


@pytest.fixture(scope="module")
def poor_page(poor_folder: Path) -> str:
    return (poor_folder / "report.html").read_text(encoding="utf-8")


def test_some_of_the_layers_have_no_score_together(poor_folder: Path, poor_page: str) -> None:
    made = {path.stem for path in (poor_folder / "charts").iterdir()}
    assert made & EVERY_CHART == EVERY_CHART - {"eas_alpha"}
    assert "<dt>EAS, logits" not in poor_page and "probe the checkpoint for every layer" in poor_page


def test_a_single_kind_and_many_layers(poor_page: str) -> None:
    assert poor_page.count("<h3>text</h3>") == 1
    assert '<th scope="row">all</th>' not in poor_page, "all texts are of the one kind"
    assert 'title="layer 126: ' in poor_page


def test_unknown_values_and_broken_text(poor: Any, poor_folder: Path, poor_page: str) -> None:
    assert '<td class="" title="layer 2: ' in poor_page or '<td class=" a" title="layer 2: ' in poor_page
    assert json.loads((poor_folder / "report.json").read_text(encoding="utf-8")) == poor


def test_a_forecast_without_a_choice(report: Any) -> None:
    """No exit break-even, and nothing within a budget."""
    changed = copy.deepcopy(report)
    for prediction in changed["predictions"]:
        for row in prediction["breakeven"]:
            row["needed"] = None
        prediction["forecasts"][-1]["policy"] = prediction["forecasts"][0]["policy"]
    assert breakeven(changed) is not None
    assert policy_words(changed["predictions"][0]["forecasts"][-1]["policy"]) == "none"


def test_numbers_that_json_lacks_are_refused(report: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_report({**report, "timing": {"seconds": float("nan")}}, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written(report: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EexportError, match="cannot be written"):
        write_report(report, tmp_path / "file")


def test_matplotlib_is_missed_only_when_figures_are_drawn() -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from pathlib import Path\n"
        "from eexport.calibration.report import write_report\n"
        "try: write_report({}, Path('nowhere'))\n"
        "except ModuleNotFoundError as error: print(error.name.partition('.')[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "matplotlib", done.stderr


def test_colours_of_kinds_are_fixed() -> None:
    assert kind_colours(["text", "code"]) == {"text": "kind-3", "code": "kind-0"}
    named = kind_colours(["other", "json", "a"])
    assert named["json"] == "kind-1" and named["a"] == "kind-4" and named["other"] == "kind-5"
    assert label("a\nb") == "a\ufffdb" and label("_a") == " _a" and len(label("x" * 99)) == 24


def test_words() -> None:
    policy = {"mode": "exact", "lookup": 4, "place": 1, "depth": 8, "length": 1, "tau": None}
    assert policy_words(policy) == "look up at most 4 tokens; else draft 1 token after layer 8"
    assert (
        policy_words({**policy, "mode": "budget", "tau": 0.2})
        == "leave after layer 8 where entropy is at most 0.2 nats"
    )
    assert policy_words({**policy, "lookup": 0, "depth": None}) == "none"
    assert points({"value": 0.01, "low": -0.02, "high": 0.05}) == "1.0 [-2.0, 5.0]"
    assert points({"value": 0.01, "low": None, "high": None}) == "1.0"
    assert points(None) == "–" and points(0.5) == "50.0"


def test_labels_lie_within_the_figures(page: str, poor_page: str) -> None:
    drawings = re.findall(r'<svg[^>]*viewBox="0 0 ([\d.]+) ([\d.]+)".*?</svg>', page + poor_page, re.DOTALL)
    assert len(drawings) > len(EVERY_CHART)
    for attributes in Elements(page + poor_page).named("text"):
        if x := attributes.get("x"):
            assert 0 <= float(x) <= float(drawings[0][0])
