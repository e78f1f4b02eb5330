"""The subcommand ``probe`` on tiny models: reports, resuming, budgets, and data and folders that cannot be used."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command import Call
from tiny import edit_tensors, make_checkpoint

from eexport.calibration import probe as measuring
from eexport.calibration.decode import continue_prompts

ROWS = [
    {"prompt": "Say hello to the world.", "kind": "text"},
    {"prompt": "How many apples are two apples and one?", "kind": "math", "answer": "3"},
    {"prompt": "An object with a name.", "kind": "json"},
    {"prompt": "A function add(a, b).", "kind": "code", "test": "assert add(1, 2) == 3", "entry_point": "add"},
    {"messages": [{"role": "user", "content": "And the other one?"}], "kind": "text"},
]
QUICK = ("--tokens", "6", "--thresholds", "0.2,0.6")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return _write(tmp_path / "prompts.jsonl", ROWS)


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the drawing, which takes seconds, where a test looks at numbers only."""

    def write(report: dict[str, Any], folder: Path) -> None:
        (folder / "report.json").write_text(json.dumps(report))

    monkeypatch.setattr("eexport.calibration.report.write_report", write)


@pytest.fixture(scope="module")
def costs(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The costs of this machine for the tiny model, measured once."""
    from eexport.runtime.costs import measure_costs
    from eexport.runtime.engine import Engine

    path = tmp_path_factory.mktemp("costs") / "costs.json"
    measure_costs(Engine.load(bundle), repeats=2).write(path)
    yield path


def _write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _report(folder: Path) -> dict[str, Any]:
    """The report without what differs from run to run."""
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    del report["created"], report["timing"]
    return report


def test_a_bundle_is_probed_where_it_is(call: Call, bundle: Path, data: Path, tmp_path: Path) -> None:
    outcome = call("probe", bundle, "-o", tmp_path / "report", "--data", data, *QUICK)
    assert (outcome.code, outcome.err) == (0, "")
    report = _report(tmp_path / "report")
    assert report["predictions"][0]["verdict"]["headline"] in outcome.out
    assert report["depths"][-1] == report["model"]["num_layers"] == 4
    assert report["data"] | {"skipped": []} == {
        "used": 5,
        "cut": 0,
        "left_out": 0,
        "stopped_by": None,
        "skipped": [],
    }
    assert {kind: found["prompts"] for kind, found in report["kinds"].items()} == {
        "all": 5,
        "code": 1,
        "json": 1,
        "math": 1,
        "text": 2,
    }
    page = (tmp_path / "report" / "report.html").read_text()
    assert report["predictions"][0]["verdict"]["headline"] in page
    assert (tmp_path / "report" / "costs.json").is_file()
    assert list((tmp_path / "report" / "charts").glob("*.png"))


def test_a_checkpoint_shows_every_layer(call: Call, checkpoint: Path, data: Path, tmp_path: Path) -> None:
    outcome = call("probe", checkpoint, "-o", tmp_path / "report", "--data", data, *QUICK, "--json")
    printed = json.loads(outcome.out)
    assert printed["depths"] == [1, 2, 3, 4]
    assert printed["model"]["form"] == "checkpoint, fp32"
    del printed["created"], printed["timing"]
    assert printed == _report(tmp_path / "report")
    names = {path.name for path in (tmp_path / "report").iterdir()}
    assert names == {"report.json", "report.html", "charts", "costs.json", "traces"}  # no timing build is left


@pytest.mark.usefixtures("no_pictures")
def test_another_device_is_predicted_from_its_table(
    call: Call, checkpoint: Path, data: Path, costs: Path, tmp_path: Path
) -> None:
    command = ("probe", checkpoint, "-o", tmp_path / "report", "--data", data, *QUICK, "--costs")
    assert call(*command, costs).code == 0
    here = _report(tmp_path / "report")
    table = json.loads(costs.read_text()) | {"device": "a far device", "host_ms": 50.0}
    (tmp_path / "far.json").write_text(json.dumps(table))
    assert call(*command, tmp_path / "far.json").code == 0
    far = _report(tmp_path / "report")
    assert far["predictions"][0]["device"].startswith("a far device")
    assert far["costs"]["host_ms"] == 50.0
    assert far["curves"] == here["curves"] and far["drafts"] == here["drafts"]


@pytest.mark.usefixtures("no_pictures")
def test_an_interrupted_probe_goes_on_to_the_same_report(
    call: Call, checkpoint: Path, data: Path, costs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "_GROUP", 2)
    options = ("--data", data, *QUICK, "--costs", costs)
    assert call("probe", checkpoint, "-o", tmp_path / "whole", *options).code == 0
    groups: list[int] = []

    def interrupted(*arguments: Any) -> Any:
        groups.append(len(arguments[1]))
        if len(groups) == 2:
            raise KeyboardInterrupt
        return continue_prompts(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(measuring, "continue_prompts", interrupted)
        outcome = call("probe", checkpoint, "-o", tmp_path / "parts", *options)
    assert outcome.code == 130
    assert "goes on from there" in outcome.err
    assert not (tmp_path / "parts" / "report.json").exists()
    assert len(list((tmp_path / "parts" / "traces").glob("*.npz"))) == 2
    with monkeypatch.context() as patch:
        patch.setattr(measuring, "continue_prompts", interrupted)
        assert call("probe", checkpoint, "-o", tmp_path / "parts", *options).code == 0
    assert groups == [2, 2, 2, 1]  # what was measured is not measured again
    assert _report(tmp_path / "parts") == _report(tmp_path / "whole")


@pytest.mark.usefixtures("no_pictures")
def test_the_seed_decides_the_order(call: Call, checkpoint: Path, costs: Path, tmp_path: Path) -> None:
    data = _write(tmp_path / "many.jsonl", [{"prompt": f"Number {i}."} for i in range(20)])

    def probe(name: str, seed: int) -> dict[str, Any]:
        options = ("--data", data, *QUICK, "--costs", costs, "--max-tokens", "40", "--seed", seed)
        assert call("probe", checkpoint, "-o", tmp_path / name, *options).code == 0
        report = _report(tmp_path / name)
        assert report["data"]["stopped_by"] == "max-tokens"
        assert report["data"]["used"] + report["data"]["left_out"] == 20
        del report["settings"]
        return report

    first, same, other = probe("a", 0), probe("b", 0), probe("c", 1)
    assert first == same
    assert first["heatmaps"][0]["prompt"] != other["heatmaps"][0]["prompt"]


@pytest.mark.usefixtures("no_pictures")
def test_time_that_is_up_is_said(
    call: Call, checkpoint: Path, data: Path, costs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "_GROUP", 1)
    command = ("probe", checkpoint, "-o", tmp_path / "report", "--data", data, *QUICK, "--costs", costs, "--minutes")
    assert "raise --minutes" in call(*command, "1e-9").error
    now = iter(range(0, 10_000, 20))
    monkeypatch.setattr(measuring.time, "monotonic", lambda: float(next(now)))
    outcome = call(*command, "1")
    assert outcome.code == 0 and "stopped by --minutes" in outcome.out
    assert 0 < _report(tmp_path / "report")["data"]["used"] < 5


def test_rows_that_cannot_be_used_are_counted(call: Call, bundle: Path, costs: Path, tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    long = json.dumps({"prompt": "the word " * 25_000})
    path.write_bytes(
        b'{"prompt": "one"}\r\n\r\n{"prompt": \r\n{"text": "no such field"}\r\n[1]\r\n{"prompt": "\xff"}\r\n'
        + long.encode()
        + b'\r\n{"prompt": "two", "kind": "all"}\r\n{"prompt": "one"}'
    )
    outcome = call(
        "probe", bundle, "-o", tmp_path / "r", "--data", path, *QUICK, "--costs", costs, "--prompt-tokens", "64"
    )
    assert outcome.code == 0 and "6 rows skipped, 1 prompts cut" in outcome.out
    found = _report(tmp_path / "r")["data"]
    assert (found["used"], found["cut"]) == (2, 1)
    assert [row["source"].rpartition(":")[2] for row in found["skipped"]] == ["3", "4", "5", "6", "8", "9"]
    page = (tmp_path / "r" / "report.html").read_text()
    assert "mixed.jsonl:3" in page


@pytest.mark.parametrize("content", ["", "\n\n", "not json\n", '{"prompt": null}\n{"prompt": 7}\n'])
@pytest.mark.usefixtures("no_pictures")
def test_no_usable_row_is_an_error(call: Call, bundle: Path, costs: Path, tmp_path: Path, content: str) -> None:
    path = tmp_path / "none.jsonl"
    path.write_text(content)
    error = call("probe", bundle, "-o", tmp_path / "r", "--data", path, "--costs", costs).error
    assert "none.jsonl" in error


@pytest.mark.usefixtures("no_pictures")
def test_a_folder_that_holds_another_probe_is_left_alone(
    call: Call, checkpoint: Path, data: Path, costs: Path, tmp_path: Path
) -> None:
    out = tmp_path / "report"
    command = ("probe", checkpoint, "-o", out, "--data", data, "--costs", costs)
    assert call(*command, *QUICK).code == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    other = make_checkpoint(tmp_path / "other", layers=4, seed=1)
    for changed in (
        ("probe", other, "-o", out, "--data", data, "--costs", costs, *QUICK),
        (*command, "--tokens", "7", "--thresholds", "0.2,0.6"),
        (*command, "--tokens", "6", "--thresholds", "0.3"),
        ("probe", other, "-o", out, "--data", data, *QUICK),  # which would measure and keep costs
        ("probe", tmp_path / "typo", "-o", out, "--force"),
    ):
        assert call(*changed).error
        assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert call(*command, "--tokens", "7", "--force").code == 0
    assert json.loads((out / "report.json").read_text())["settings"]["tokens"] == 7


@pytest.mark.usefixtures("no_pictures")
def test_what_cannot_be_used_is_said_in_a_line(
    call: Call, bundle: Path, checkpoint: Path, data: Path, costs: Path, tmp_path: Path
) -> None:
    out = ("-o", tmp_path / "report")
    assert "no such file" in call("probe", bundle, *out, "--data", tmp_path / "missing.jsonl").error.lower()
    assert "no cost table" in call("probe", bundle, *out, "--costs", tmp_path / "missing.json").error
    assert "nor a model that comes by name" in call("probe", tmp_path / "nothing", *out).error
    assert "thresholds" in call("probe", bundle, *out, "--thresholds", "0.5,high").error
    assert "between -1 and 1" in call("probe", bundle, *out, "--thresholds", "1.5").error
    (tmp_path / "file").write_text("")
    assert "is a file" in call("probe", bundle, "-o", tmp_path / "file", "--costs", costs).error
    table = json.loads(costs.read_text())
    table["num_layers"] = table["stages"][-2]["layers"][1] = 9
    (tmp_path / "deep.json").write_text(json.dumps(table))
    error = call("probe", checkpoint, *out, "--data", data, "--costs", tmp_path / "deep.json").error
    assert "9 layers" in error and "has 4" in error


@pytest.mark.usefixtures("no_pictures")
def test_activations_that_overflow_are_an_error(call: Call, data: Path, costs: Path, tmp_path: Path) -> None:
    def overflow(tensors: dict[str, Any]) -> None:
        tensors["model.layers.2.mlp.down_proj.weight"].fill_(3e38)

    folder = edit_tensors(make_checkpoint(tmp_path / "hot", layers=4), overflow)
    error = call("probe", folder, "-o", tmp_path / "report", "--data", data, *QUICK, "--costs", costs).error
    assert "after layer 3 are not finite" in error


@pytest.mark.usefixtures("no_pictures")
def test_kept_costs_are_those_of_the_same_question(call: Call, checkpoint: Path, data: Path, tmp_path: Path) -> None:
    command = ("probe", checkpoint, "-o", tmp_path / "report", "--data", data, *QUICK)
    kept = tmp_path / "report" / "costs.json"
    assert call(*command).code == 0
    first = kept.read_bytes()
    assert call(*command).code == 0 and kept.read_bytes() == first
    assert call(*command, "--precision", "fp32").code == 0
    assert json.loads(kept.read_bytes())["precision"] == "fp32"


def test_precision_is_refused_where_nothing_is_built(
    call: Call, bundle: Path, checkpoint: Path, costs: Path, tmp_path: Path
) -> None:
    out = ("-o", tmp_path / "report", "--precision", "int4")
    assert "none is built" in call("probe", bundle, *out).error
    assert "none is built" in call("probe", checkpoint, *out, "--costs", costs).error
    assert not (tmp_path / "report").exists()


@pytest.mark.usefixtures("no_pictures")
def test_an_interrupt_while_costs_are_measured_leaves_no_bundle(
    call: Call, checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("eexport.runtime.costs.measure_costs", interrupted)
    assert call("probe", checkpoint, "-o", tmp_path / "report", "--data", data, *QUICK).code == 130
    assert [path.name for path in (tmp_path / "report").iterdir()] == ["traces"]


def test_without_matplotlib_the_extra_is_named(
    call: Call, bundle: Path, data: Path, costs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("charts", "figures", "speed_figures"):
        monkeypatch.delitem(sys.modules, f"eexport.calibration.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    error = call("probe", bundle, "-o", tmp_path / "r", "--data", data, *QUICK, "--costs", costs).error
    assert "needs matplotlib" in error and "eexport[probe]" in error
    assert not (tmp_path / "r").exists()  # said before anything is measured


def test_bench_writes_a_table_that_probe_reads(
    call: Call, bundle: Path, checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    quick = ("--prompt-tokens", "8", "--tokens", "2", "--repeats", "1")
    assert call("bench", bundle, *quick, "--costs", tmp_path / "device.json").code == 0
    out = tmp_path / "report"
    assert call("probe", checkpoint, "-o", out, "--data", data, *QUICK, "--costs", tmp_path / "device.json").code == 0
    assert _report(out)["costs"] == json.loads((tmp_path / "device.json").read_text()) | {
        "host_ms": _report(out)["costs"]["host_ms"],
        "stages": _report(out)["costs"]["stages"],
    }
    assert "cannot be written" in call("bench", bundle, *quick, "--costs", tmp_path / "device.json" / "x").error
