"""``eexport calibrate`` from end to end, on a tiny model: what it leaves."""

import json
from collections.abc import Callable
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from calibrating import LEFT, names, same
from command import Call, Outcome
from tiny_exits import make_calibration

from eexport.export import cli_calibrate
from eexport.models.exits_file import read_calibration, write_calibration
from eexport.runtime.manifest import read_manifest

pytestmark = pytest.mark.usefixtures("quick")


class TestEndToEnd:
    def test_it_leaves_a_calibration_and_nothing_else(
        self, whole: Path, calibrate: Callable[..., Outcome], tmp_path: Path
    ) -> None:
        done = calibrate(tmp_path / "out")
        assert done.code == 0, done.err
        assert names(tmp_path) == LEFT
        assert names(tmp_path / "out") == ["calibration.json", "calibration.safetensors"]
        assert "agreement with the full model, test prompts (held.jsonl)" in done.out
        assert "exit_02" in done.out and "last" in done.out and "tokens to train on" in done.out
        assert "no token leaves unverified: 1%tokens at 95% needs at least" in done.out
        assert f"--calibration {tmp_path / 'out'}" in done.out
        assert same(tmp_path / "out", whole), "the same seed gives the same bytes"

    def test_its_report_stands_beside_it(
        self, work: Path, calibrate: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.undo()  # with charts
        done = calibrate(tmp_path / "out", "--work", work)
        assert f"report  {tmp_path / 'out.html'}" in done.out
        page = (tmp_path / "out.html").read_text()
        assert "<svg" in page and "exit_02" in page and "held.jsonl" in page

    def test_it_goes_into_a_bundle(self, whole: Path, six: Path, call: Call, tmp_path: Path) -> None:
        bundle = tmp_path / "bundle"
        assert call("build", six, "-o", bundle, "--calibration", whole).code == 0
        checked = call("verify", bundle, "--json")
        assert checked.code == 0 and json.loads(checked.out)["ok"]
        assert {"exit_02.onnx", "exit_04.onnx", "last.onnx", "predictor.onnx"} <= set(names(bundle))
        assert call("run", bundle, "hello", "--max-tokens", 4).code == 0

    def test_thresholds_go_into_bundles_of_the_same_numbers_only(
        self, whole: Path, six: Path, call: Call, tmp_path: Path
    ) -> None:
        options = ("--calibration", whole, "--force", "-o", tmp_path / "bundle")
        assert not call("build", six, *options).err
        rule = read_manifest(tmp_path / "bundle").exits.rule  # type: ignore[union-attr]
        assert rule is not None and len(rule.entropy) == 2
        for other in (("--precision", "fp32"), ("--vocab-precision", "fp32"), ("--block-size", 64)):
            done = call("build", six, *options, *other)
            assert done.code == 0 and "no thresholds for stages in ort, " in done.err, other
            exits = read_manifest(tmp_path / "bundle").exits
            assert exits is not None and exits.rule is None and len(exits.heads) == 3

    def test_what_is_recorded(self, whole: Path, held: Path) -> None:
        calibration = read_calibration(whole)
        record = calibration.record
        assert [(head.name, head.depth) for head in calibration.heads] == [("exit_02", 2), ("exit_04", 4), ("last", 6)]
        assert record["settings"] == {
            "epochs": 1.0, "exits": [2, 4], "budget": "1%tokens", "confidence": 0.95, "run_code": False, "seed": 1,
            "data": [], "test_data": ["held.jsonl"], "prompts": 60, "prompt_tokens": 512, "precision": "int8",
            "lengths": {"answer": 8, "message": 72}, "boundaries": [2, 4], "max_disk": 12 * 10**9, "threads": None,
        }  # fmt: skip
        assert record["thresholds"]["numerics"] == "ort, int8 and int8 for the vocabulary in blocks of 32"
        splits = record["data"]["splits"]
        assert sum(split["texts"] for split in splits.values()) == 63
        assert splits["test"]["sources"]["held.jsonl"] == 3
        for split in ("train", "predictor", "tune"):
            assert splits[split]["sources"] == {"written": splits[split]["texts"]}
        hashes = {split["prompts_sha256"] for split in splits.values()}
        assert len(hashes) == 4 and all(len(found) == 64 for found in hashes)
        assert record["thresholds"]["assumed"].startswith("prompts are independent draws")
        assert record["thresholds"]["differing_rows"] == 0
        chosen = record["thresholds"]["chosen"]
        assert (chosen["budget"], chosen["confidence"], chosen["exits"]) == ("1%tokens", 0.95, False)
        assert 0 < chosen["prompts"] < splits["tune"]["texts"] and "needs at least 299 prompts" in chosen["reason"]
        assert calibration.thresholds is not None and calibration.thresholds.entropy == (0.0, 0.0)
        budgets = [row["budget"] for row in record["thresholds"]["budgets"]]
        assert len(set(budgets)) == len(budgets) and {"0.1pp", "0.5pp", "2pp", "1%tokens"} <= set(budgets)
        assert record["versions"]["eexport"] == version("eexport") and "torch" in record["versions"]
        assert set(record["stages"]["seconds"]) == {
            "build", "texts", "costs", "heads", "predictor", "build with exits", "thresholds",
        }  # fmt: skip
        assert record["costs"]["num_layers"] == 6
        (_, scored) = (record["thresholds"]["budgets"][0]["held_out"]["held.jsonl"][kind] for kind in ("all", "math"))
        assert scored["prompts"] == scored["scored"] == 1
        predictor = record["predictor"]
        assert predictor["layers"] == [1, 2] and 0 < predictor["share_of_step"] < 1
        tokens = {source: found["tokens"] for source, found in predictor["test"].items()}
        assert tokens == {
            source: held_out["all"]["tokens"]
            for source, held_out in record["thresholds"]["budgets"][0]["held_out"].items()
        }

    def test_the_record_is_json(
        self, whole: Path, work: Path, calibrate: Callable[..., Outcome], tmp_path: Path
    ) -> None:
        record = json.loads(calibrate(tmp_path / "out", "--work", work, "--json").out)
        assert record == read_calibration(tmp_path / "out").record
        assert record["data"] == read_calibration(whole).record["data"]

    def test_prompts_are_recorded_by_hash(self, whole: Path, work: Path) -> None:
        """Who has the texts can check them."""
        infos = json.loads((work / "texts/shard-0000/texts.json").read_text())
        for name, split in read_calibration(whole).record["data"]["splits"].items():
            keys = sorted(info["key"] for info in infos if info["split"] == name)
            assert sha256("".join(keys).encode()).hexdigest() == split["prompts_sha256"]

    def test_a_budget_that_can_be_met(self, work: Path, calibrate: Callable[..., Outcome], tmp_path: Path) -> None:
        done = calibrate(tmp_path / "out", "--work", work, "--budget", "70%tokens", "--confidence", 0.6)
        assert "thresholds for 70%tokens at 60%: entropy under " in done.out
        calibration = read_calibration(tmp_path / "out")
        assert calibration.thresholds is not None and max(calibration.thresholds.entropy) > 0
        record = calibration.record["thresholds"]
        assert record["chosen"]["entropy"] == list(calibration.thresholds.entropy)
        assert record["chosen"]["p_value"] <= 0.4
        (row,) = (row for row in record["budgets"] if row["budget"] == "70%tokens")
        assert row["held_out"]["held.jsonl"]["all"]["left"] > 0

    def test_the_smallest_of_budgets(self, work: Path, calibrate: Callable[..., Outcome], tmp_path: Path) -> None:
        """What is read before the work is not read again after it."""
        done = calibrate(tmp_path / "out", "--work", work, "--budget", "0.00001pp")
        assert done.code == 0 and "no token leaves unverified" in done.out


class TestData:
    def test_own_prompts_beside_the_written_ones(self, calibrate: Callable[..., Outcome], tmp_path: Path) -> None:
        data, out = tmp_path / "own.jsonl", tmp_path / "out"
        rows = [{"kind": "code", "prompt": f"number {number}"} for number in range(30)]
        rows += [{"kind": "code", "prompt": "a shared one"}]  # is held out
        data.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{}\n")
        done = calibrate(out, "--data", data)
        assert done.code == 0 and "1 rows of the data skipped\n  own.jsonl:32: has none of the fields" in done.out
        record = read_calibration(out).record
        sources = [split["sources"] for split in record["data"]["splits"].values()]
        assert sum(found.get("own.jsonl", 0) for found in sources) == 30
        assert [row["source"] for row in record["data"]["skipped"]] == ["own.jsonl:32"]
        assert list(record["heads"][0]["agreement"]) == sorted(record["data"]["splits"]["test"]["sources"])

    def test_a_capped_number_of_texts_is_said(self, calibrate: Callable[..., Outcome], tmp_path: Path) -> None:
        done = calibrate(tmp_path / "out", "--max-disk", 0.004)
        assert done.code == 0
        (line,) = (line for line in done.out.splitlines() if line.startswith("note: "))
        assert line.endswith("of 63 texts are used, as the others would exceed --max-disk")
        splits = read_calibration(tmp_path / "out").record["data"]["splits"]
        assert line.startswith(f"note: {sum(split['texts'] for split in splits.values())} of")


def test_build_calibrates_first_if_asked(
    call: Call, six: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[tuple[str, Path, dict[str, Any]]]()

    def run(checkpoint: str, output: Path, options: dict[str, Any]) -> None:
        asked.append((checkpoint, output, options))
        write_calibration(make_calibration(six, {2: ("hidden",)}), output)

    monkeypatch.setattr(cli_calibrate, "run_calibration", run)
    assert call("build", six, "-o", tmp_path / "bundle", "--calibrate", "--precision", "fp32").code == 0
    ((checkpoint, output, options),) = asked
    assert (checkpoint, output) == (str(six), tmp_path / "bundle.calibration")
    assert (options["precision"], options["prompts"], options["exits"]) == ("fp32", 3000, None)
    assert (tmp_path / "bundle/exit_02.onnx").is_file()
    # Once more it is there already.
    assert call("build", six, "-o", tmp_path / "other", "--calibration", output).code == 0
    assert call("build", six, "-o", tmp_path / "bundle", "--calibrate", "--force").code == 0
    assert len(asked) == 1
