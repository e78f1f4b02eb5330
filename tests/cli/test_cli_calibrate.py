"""``eexport calibrate`` from end to end, on a tiny model: what it leaves, refuses, and goes on from."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from command import Call, Outcome, Start
from tiny import edit_tensors, make_checkpoint
from tiny_exits import make_calibration
from torch import Tensor
from toys import toy_costs

from eexport.calibration import exit_report
from eexport.calibration.train import Course
from eexport.export import cli_calibrate
from eexport.export.cli import main
from eexport.models.exits_file import read_calibration, write_calibration

Progress = Callable[[str, int, int], None]

OPTIONS = ("--prompts", 60, "--tokens", 8, "--epochs", 1, "--seed", 1, "--budget", "1%tokens")
LEFT = ["out", "out.html"]  # by a calibration into "out"
STOPS = (
    ("building", 1),
    ("building", 5),
    ("writing texts", 1),
    ("writing texts", 20),
    ("writing texts", 63),
    ("measuring", 3),
    ("training exit_02", 1),
    ("training exit_02", 3),
    ("training exit_02", 4),
    ("training last", 1),
    ("training last", 5),
    ("training predictor", 1),
    ("building with exits", 1),
    ("building with exits", 8),
    ("running exits", 1),
    ("running exits", 12),
)
"""What has done how much when Ctrl-C comes, in the order in which it does."""


def hurry(patch: pytest.MonkeyPatch) -> None:
    """No charts, which have tests of their own, and no waiting for the disk."""
    patch.setattr("os.fsync", lambda _: None)
    patch.setattr(exit_report, "write_exit_report", lambda _, name, path: path.write_text(name))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


@pytest.fixture(scope="session")
def six(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of six layers, of which those after the second change little: exits often agree."""

    def weaken(tensors: dict[str, Tensor]) -> None:
        for layer in range(2, 6):
            for name in ("self_attn.o_proj", "mlp.down_proj"):
                tensors[f"model.layers.{layer}.{name}.weight"].mul_(0.2)

    return edit_tensors(make_checkpoint(tmp_path_factory.mktemp("six") / "tiny", layers=6), weaken)


@pytest.fixture(scope="session")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts to test on, with a task among them."""
    path = tmp_path_factory.mktemp("data") / "held.jsonl"
    rows = [
        {"kind": "text", "prompt": "hello there"},
        {"kind": "math", "prompt": "What is 1 + 2?", "answer": "3"},
        {"kind": "code", "prompt": "a shared one"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def calibrate(call: Call, six: Path, held: Path) -> Callable[..., Outcome]:
    """Calibrate the tiny model into a folder; its exits are given, so that what is kept does not hang on timings."""

    def run(output: Path, *more: object, exits: str | None = "2,4") -> Outcome:
        chosen = () if exits is None else ("--exits", exits)
        return call("calibrate", six, "-o", output, "--test-data", held, *OPTIONS, *chosen, *more)

    return run


@pytest.fixture(scope="session")
def whole(six: Path, held: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same calibration in one go, with its work folder beside it; not to be changed."""
    out = tmp_path_factory.mktemp("whole") / "out"
    options = ["--test-data", held, *OPTIONS, "--exits", "2,4", "--work", out.with_name("work"), "--json"]
    with pytest.MonkeyPatch.context() as patch:
        hurry(patch)
        assert main([str(argument) for argument in ["calibrate", six, "-o", out, *options]]) == 0
    return out


@pytest.fixture
def work(whole: Path) -> Path:
    """Its work folder, in which all is done but the thresholds; goes on with other budgets, and is not changed."""
    return whole.with_name("work")


@contextmanager
def interrupted(monkeypatch: pytest.MonkeyPatch, stage: str, at: int) -> Iterator[None]:
    """Ctrl-C when ``stage`` has done ``at`` steps."""

    @contextmanager
    def progress(_: str) -> Iterator[Progress]:
        def step(what: str, done: int, total: int) -> None:
            # A bundle takes a step for embedding, head and each layer, and one more for each exit.
            builds = {8: "building", 12: "building with exits"}
            of_build = what.startswith(("embedding", "layer", "head"))
            if (builds[total] if of_build else what) == stage and done >= at:
                raise KeyboardInterrupt

        yield step

    with monkeypatch.context() as patch:
        patch.setattr(cli_calibrate, "progress", progress)
        yield


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def files(folder: Path) -> dict[str, bytes]:
    """What is in it, but for the record of seconds spent."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "seconds.json")
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def same(one: Path, other: Path) -> bool:
    """Whether two calibrations are the same but for when and how fast they were made."""
    first, second = read_calibration(one), read_calibration(other)
    tensors = "calibration.safetensors"
    return (one / tensors).read_bytes() == (other / tensors).read_bytes() and (
        (first.thresholds, first.identity) == (second.thresholds, second.identity)
    )


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

    def test_what_is_recorded(self, whole: Path, held: Path) -> None:
        calibration = read_calibration(whole)
        record = calibration.record
        assert [(head.name, head.depth) for head in calibration.heads] == [("exit_02", 2), ("exit_04", 4), ("last", 6)]
        assert record["settings"] == {
            "epochs": 1.0, "exits": [2, 4], "budget": "1%tokens", "confidence": 0.95, "run_code": False, "seed": 1,
        }  # fmt: skip
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
        assert predictor["layers"] == [1, 2, 3, 4] and 0 < predictor["share_of_step"] < 1
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


class TestTheSame:
    def test_what_pays_is_kept(
        self, calibrate: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("eexport.calibration.calibrate.measure_costs", lambda *_, **__: toy_costs(layers=6))
        assert calibrate(tmp_path / "out", exits=None).code == 0
        record = read_calibration(tmp_path / "out").record
        trials = {trial["name"]: trial["speedup"] for trial in record["trials"]}
        assert list(trials) == ["exit_04", "last"]
        tried, trained = ([course["trained_tokens"] for course in record[key]] for key in ("trials", "heads"))
        assert max(tried) < min(trained)
        kept = [head["name"] for head in record["heads"]]
        assert kept == [name for name, speedup in trials.items() if speedup > 1 or name == "exit_04"]

    def test_interrupted_at_every_stage_and_gone_on_with(
        self, whole: Path, calibrate: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("eexport.calibration.generate.SHARD", 16)
        monkeypatch.setattr(Course.__init__, "__defaults__", (2,))
        out = tmp_path / "out"
        for stage, at in STOPS:
            with interrupted(monkeypatch, stage, at):
                stopped = calibrate(out)
            assert stopped.code == 130 and f"is kept in {out}.work: the same command goes on" in stopped.err, stage
            assert names(tmp_path) == ["out.work"]
        assert calibrate(out).code == 0
        assert same(out, whole)
        assert names(tmp_path) == LEFT

    def test_killed_and_gone_on_with(
        self, whole: Path, six: Path, held: Path, calibrate: Callable[..., Outcome], start: Start, tmp_path: Path
    ) -> None:
        out = tmp_path / "out"
        process = start("calibrate", six, "-o", out, "--test-data", held, *OPTIONS, "--exits", "2,4")
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("out.work/exit_02-*.pt")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
        process.kill()
        process.wait()
        assert not out.exists()
        assert calibrate(out).code == 0
        assert same(out, whole) and names(tmp_path) == LEFT

    def test_a_work_folder_of_its_own_stays(
        self, whole: Path, work: Path, calibrate: Callable[..., Outcome], tmp_path: Path
    ) -> None:
        """And other calibrations of the same texts go on from it."""
        before = files(work)
        assert calibrate(tmp_path / "again", "--work", work).code == 0
        assert same(tmp_path / "again", whole) and files(work) == before
        own = Path(shutil.copytree(work, tmp_path / "work"))
        assert calibrate(tmp_path / "longer", "--work", own, "--epochs", 2).code == 0
        assert not same(tmp_path / "longer", whole) and before.items() < files(own).items()
        for change in (("--tokens", 9), ("--precision", "fp32"), ("--seed", 2)):
            error = calibrate(tmp_path / "other", "--work", work, *change).error
            assert "other settings" in error and str(work) in error
        assert files(work) == before and not (tmp_path / "other").exists()

    def test_other_exits_in_the_same_work_folder(
        self, whole: Path, calibrate: Callable[..., Outcome], tmp_path: Path
    ) -> None:
        """Texts keep the first four layers whatever the exits, so these may be chosen anew."""
        work = tmp_path / "work"
        assert calibrate(tmp_path / "one", "--work", work, exits="2").code == 0
        assert [head.name for head in read_calibration(tmp_path / "one").heads] == ["exit_02", "last"]
        assert calibrate(tmp_path / "two", "--work", work).code == 0
        assert same(tmp_path / "two", whole)
        assert "other settings (depths)" in calibrate(tmp_path / "three", "--work", work, exits="2,5").error

    def test_a_calibration_is_replaced_when_the_new_one_is_there(
        self, whole: Path, calibrate: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out = tmp_path / "out"
        shutil.copytree(whole, out)
        with interrupted(monkeypatch, "running exits", 1):
            assert calibrate(out, "--force", "--seed", 2).code == 130
        assert same(out, whole)
        assert calibrate(out, "--force", "--seed", 2).code == 0
        assert not same(out, whole) and names(tmp_path) == LEFT


class TestBadInput:
    """One line, code 2, nothing left, and before any work."""

    @pytest.fixture
    def never(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def work(*_: object, **__: object) -> Any:
            raise AssertionError("refused too late")

        monkeypatch.setattr("eexport.calibration.calibrate.calibrate", work)

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            (("--budget", "much"), "budget 'much': give 0.5pp"),
            (("--budget", "0pp"), "more than 0"),
            (("--exits", "x"), "'--exits': give depths with commas"),
            (("--exits", ""), "'--exits': give depths with commas"),
            (("--exits", "4,2"), "'--exits': depths must rise"),
            (("--exits", "2,2"), "'--exits': depths must rise"),
            (("--exits", "0,2"), "--exits 0,2: tiny has 6 layers, so exits lie at depths of 1 to 5"),
            (("--exits", "2,6"), "--exits 2,6: tiny has 6 layers"),
            (("--exits", "99"), "--exits 99: tiny has 6 layers"),
            (("--confidence", "1"), "--confidence"),
            (("--confidence", "nan"), "'--confidence': nan is not a finite number"),
            (("--epochs", "0"), "--epochs"),
            (("--epochs", "inf"), "'--epochs': inf is not a finite number"),
            (("--max-disk", "nan"), "'--max-disk': nan is not a finite number"),
            (("--max-disk", "0.0001"), "--max-disk: 0.0 GB hold"),
            (("--seed", "-1"), "--seed"),
            (("--seed", str(2**32)), "--seed"),
            (("--tokens", "1"), "--tokens"),
            (("--tokens", "512"), "--tokens: an answer of 512 does not fit in 512"),
            (("--prompts", "0"), "nothing to train on: give --prompts, --data or both"),
            (("--precision", "int9"), "'int9'"),
            (("--threads", "0"), "--threads"),
            (("--data", "nowhere.jsonl"), "nowhere.jsonl: cannot be read"),
            (("--test-data", "nowhere.jsonl"), "nowhere.jsonl: cannot be read"),
        ],
    )
    def test_options(
        self, options: tuple[str, str], says: str, calibrate: Callable[..., Outcome], never: None, tmp_path: Path
    ) -> None:
        before = names(tmp_path)
        exits = None if options[0] == "--exits" else "2,4"
        assert says in calibrate(tmp_path / "out", *options, exits=exits).error
        assert names(tmp_path) == before

    def test_data_of_no_use(self, calibrate: Callable[..., Outcome], never: None, tmp_path: Path) -> None:
        data = tmp_path / "own.jsonl"
        data.write_text('{"x": 1}\nnot JSON\n')
        for option in ("--data", "--test-data"):
            assert "none of its 2 rows can be used" in calibrate(tmp_path / "out", option, data).error
        assert names(tmp_path) == ["own.jsonl"]

    def test_models_of_too_few_layers(
        self, call: Call, checkpoint: Path, never: None, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        out = tmp_path / "out"
        assert "4 layers leave no room for an exit: give --exits, of 1 to 3" in call(
            "calibrate", checkpoint, "-o", out
        ).error  # fmt: skip
        one = make_checkpoint(tmp_path_factory.mktemp("one") / "single", layers=1)
        assert call("calibrate", one, "-o", out).error.endswith("single: 1 layers leave no room for an exit")
        assert "--exits 1: single has 1 layers" in call("calibrate", one, "-o", out, "--exits", 1).error
        assert "no such file or folder" in call("calibrate", tmp_path / "nowhere", "-o", out).error
        assert not names(tmp_path)

    def test_an_output_that_is_in_use(
        self, calibrate: Callable[..., Outcome], six: Path, never: None, tmp_path: Path
    ) -> None:
        out = tmp_path / "out"
        write_calibration(make_calibration(six, {2: ("hidden",)}), out)
        before = files(tmp_path)
        assert "holds a calibration already: give another -o, or --force" in calibrate(out).error
        assert files(tmp_path) == before
        (out / "calibration.json").rename(out / "letter.txt")
        for more in ((), ("--force",)):
            assert "not empty and not a calibration" in calibrate(out, *more).error
        assert "is a file" in calibrate(out / "letter.txt").error
        assert sorted(before.values()) == sorted(files(tmp_path).values())

    def test_a_work_folder_in_the_way(self, calibrate: Callable[..., Outcome], never: None, tmp_path: Path) -> None:
        """It is removed at the end, so it must be nobody else's."""
        out, work = tmp_path / "out", tmp_path / "out.work"
        work.mkdir()
        (work / "letter.txt").write_text("mine")
        assert f"{work}: is in the way" in calibrate(out).error
        assert (work / "letter.txt").read_text() == "mine"
        shutil.rmtree(work)
        work.write_text("mine")
        assert f"{work}: is in the way" in calibrate(out).error
        for inside in (out, out / "work", out / "a" / "b"):
            assert "lies in the output" in calibrate(out, "--work", inside).error
        assert names(tmp_path) == ["out.work"]

    def test_too_few_texts(self, calibrate: Callable[..., Outcome], tmp_path: Path) -> None:
        """That cannot be known before they are written; more go on from there."""
        assert "text is left to" in calibrate(tmp_path / "out", "--prompts", 3).error
        assert names(tmp_path) == ["out.work"]
        assert calibrate(tmp_path / "out").code == 0
        assert names(tmp_path) == LEFT

    def test_where_torch_is_not_installed(self, six: Path, tmp_path: Path) -> None:
        code = (
            "import sys; sys.modules['torch'] = None; from eexport.export.cli import main; "
            f"sys.exit(main(['calibrate', {str(six)!r}, '-o', {str(tmp_path / 'out')!r}]))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert "calibrate needs torch, which is not installed: pip install 'eexport[export]'" in done.stderr


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
