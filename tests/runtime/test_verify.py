"""Parity on the target: a sound bundle passes, and whatever is wrong is named."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from eexport.runtime.backend import Backend
from eexport.runtime.errors import BundleError
from eexport.runtime.manifest import read_manifest
from eexport.runtime.verify import (
    REFERENCE_NAME,
    Parity,
    Reference,
    Top,
    compare,
    compare_logits,
    failure,
    rows_that_differ,
    verify_bundle,
)

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def bundle(tiny_checkpoint: Make, tiny_bundle: Make) -> Path:
    return tiny_bundle(tiny_checkpoint(layers=4), blocks="2")


def rows(count: int, width: int) -> NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal((count, width)).astype(np.float32)


@pytest.mark.parametrize("dialect", ["ort", "standard"])
def test_every_stage_of_a_sound_bundle(
    dialect: str, tiny_checkpoint: Make, tiny_bundle: Make, backend: Backend
) -> None:
    folder = tiny_bundle(tiny_checkpoint(layers=4), dialect=dialect, blocks="2")
    manifest = read_manifest(folder)
    results = verify_bundle(folder, manifest, backend)
    assert [result.stage for result in results] == ["embed", "block_00", "block_01", "head", "chain"]
    for result in results:
        assert failure(result, 0.99999) is None
        assert result.max_difference < 1e-4
    assert [result.argmax_agreement for result in results] == [None, None, None, 1.0, 1.0]
    recorded = {stage["stage"]: stage["cosine"] for stage in manifest.parity["stages"]}
    assert recorded == pytest.approx({result.stage: result.cosine for result in results}, abs=1e-5)


def test_the_reference_is_what_the_decoder_computes(bundle: Path) -> None:
    manifest, reference = read_manifest(bundle), Reference.load(bundle)
    count = len(reference.token_ids)
    assert reference.hidden.shape == (1 + len(manifest.blocks), count, manifest.model.hidden_size)
    assert reference.depths.tolist() == [0, 2, 4]
    top = reference.tops["head"]
    assert top.ids.shape == top.logits.shape == (count, 64)
    assert (np.diff(top.logits, axis=-1) <= 0).all()


def test_a_wrong_stage_is_named(bundle: Path, tmp_path: Path, backend: Backend) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "copy"))
    weights = copy / "block_01.bin"
    content = np.fromfile(weights, np.float32)
    content[: content.size // 2] *= -1
    content.tofile(weights)
    results = verify_bundle(copy, read_manifest(copy), backend)
    problems = [problem for result in results if (problem := failure(result, 0.999))]
    assert [problem.split()[0] for problem in problems] == ["block_01", "chain"]
    assert "0.999 is needed" in problems[0]


def test_a_reference_that_cannot_be_read(bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "copy"))
    path = copy / REFERENCE_NAME
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"text"):
        path.write_bytes(damaged)
        with pytest.raises(BundleError, match=REFERENCE_NAME):
            Reference.load(copy)
    np.savez(path, token_ids=np.arange(3))
    with pytest.raises(BundleError, match=REFERENCE_NAME):
        Reference.load(copy)
    path.unlink()
    with pytest.raises(BundleError, match=REFERENCE_NAME):
        Reference.load(copy)


def test_compare_gives_the_mean_and_the_worst_row() -> None:
    expected = rows(5, 8)
    found = expected.copy()
    found[3] *= -1
    found[1] *= 2
    parity = compare("block_00", found, expected)
    assert parity.cosine == pytest.approx(3 / 5) and parity.worst_cosine == pytest.approx(-1)
    assert parity.max_difference == pytest.approx(max(2 * np.abs(expected[3]).max(), np.abs(expected[1]).max()))
    same = compare("block_00", expected, expected)
    assert same.cosine == pytest.approx(1) and same.max_difference == same.relative == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_finite_is_a_failure(value: float) -> None:
    found = rows(5, 8)
    found[2, 3] = value
    assert failure(compare("block_07", found, rows(5, 8)), -1.0) == "block_07 gives NaN or infinity"


def test_rows_of_zeros_are_no_failure_of_their_own() -> None:
    parity = compare("embed", np.zeros((2, 8), np.float32), np.zeros((2, 8), np.float32))
    assert parity.max_difference == 0 and np.isfinite(parity.cosine)


def test_logits_are_compared_at_the_likeliest() -> None:
    logits = rows(6, 100)
    top = Top.of(logits)
    assert np.array_equal(top.ids, np.argsort(-logits, axis=-1)[:, :64])
    assert np.array_equal(top.logits, np.take_along_axis(logits, top.ids, -1))
    assert compare_logits("head", logits, top).argmax_agreement == 1.0
    flipped = logits.copy()
    flipped[2, top.ids[2, 1]] += 100
    parity = compare_logits("head", flipped, top)
    assert parity.argmax_agreement == pytest.approx(5 / 6)
    assert parity.max_difference == pytest.approx(100, abs=1e-3)
    assert isinstance(parity, Parity)


class RowsChain:
    """A chain whose rows depend on their number where there are more than two of them."""

    def __init__(self) -> None:
        self.resets = 0

    def reset(self) -> None:
        self.resets += 1

    def forward(self, ids: Sequence[int], head_rows: int = 1) -> NDArray[np.float32]:
        extra = 0.5 if len(ids) > 2 else 0.0
        return np.array([[token, extra] for token in ids], np.float32)[-head_rows:]


def test_rows_that_differ() -> None:
    chain: Any = RowsChain()
    assert rows_that_differ(chain, range(8), (1, 2)) == {}
    assert rows_that_differ(chain, range(8), (2, 3, 4)) == {3: 0.5, 4: 0.5}
    assert chain.resets > 0


def test_fewer_logits_than_are_kept() -> None:
    assert Top.of(rows(3, 4)).ids.shape == (3, 4)
