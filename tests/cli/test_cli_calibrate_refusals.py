"""What ``eexport calibrate`` refuses."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from calibrating import LEFT, files, names
from command import Call, Outcome
from tiny import make_checkpoint
from tiny_exits import make_calibration

from eexport.models.exits_file import write_calibration

pytestmark = pytest.mark.usefixtures("quick")


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
        work.unlink()
        (work / "texts").mkdir(parents=True)
        (work / "texts" / "chapter1").write_text("mine")
        assert f"{work}: is in the way" in calibrate(out).error
        for inside in (out, out / "work", out / "a" / "b"):
            assert "lies in the output" in calibrate(out, "--work", inside).error
        assert names(tmp_path) == ["out.work"]

    def test_a_report_in_the_way(self, calibrate: Callable[..., Outcome], never: None, tmp_path: Path) -> None:
        report = tmp_path / "out.html"
        report.write_text("mine")
        assert "--force to replace it" in calibrate(tmp_path / "out").error
        assert report.read_text() == "mine"
        report.unlink()
        report.mkdir()
        assert f"{report}: is where the report goes: move it" in calibrate(tmp_path / "out", "--force").error
        assert names(tmp_path) == ["out.html"]

    def test_fewer_texts_than_are_there(self, calibrate: Callable[..., Outcome], work: Path, tmp_path: Path) -> None:
        """They would be used and not be in the record."""
        done = calibrate(tmp_path / "out", "--work", work, "--prompts", 40)
        assert "holds 63 texts and 43 are asked for" in done.error

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
