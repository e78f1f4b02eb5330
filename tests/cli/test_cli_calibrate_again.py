"""``eexport calibrate`` interrupted, gone on with, and over what is there: the same comes out, and nothing is lost."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from calibrating import LEFT, OPTIONS, files, names, same
from command import Outcome, Start
from toys import toy_costs

from eexport.calibration.train import Course
from eexport.export import cli_calibrate
from eexport.models.exits_file import read_calibration

Progress = Callable[[str, int, int], None]

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

pytestmark = pytest.mark.usefixtures("quick")


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
