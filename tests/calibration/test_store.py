from pathlib import Path

import numpy as np
import pytest

from eexport.calibration.decode import FULL, Continuation, Written
from eexport.calibration.measures import Measures, measure
from eexport.calibration.store import TraceStore
from eexport.runtime.errors import EexportError

SETTINGS = {"model": "abc", "tokens": 4, "thresholds": [0.5, 0.9]}


@pytest.fixture
def continuation() -> Continuation:
    generator = np.random.default_rng(0)
    rows = [
        measure(
            generator.normal(size=(3, 8)).astype(np.float32),
            generator.normal(size=(3, 50)).astype(np.float32),
            np.array([0.1, 0.5, 1.0], np.float32),
        )
        for _ in range(2)
    ]
    written = Written([4, 5], [2, 2], [0.0, 0.0], [0.25, 0.5])
    return Continuation(Measures.stack(rows), {FULL: written, 0: Written([4], [0], [0.5], [1.0])})


def test_what_is_saved_is_loaded(tmp_path: Path, continuation: Continuation) -> None:
    TraceStore(tmp_path / "traces", SETTINGS).save("key", continuation)
    found = TraceStore(tmp_path / "traces", SETTINGS).load("key")
    assert found is not None and found.paths == continuation.paths
    for name, values in vars(continuation.measures).items():
        assert np.array_equal(getattr(found.measures, name), values)
    assert TraceStore(tmp_path / "traces", SETTINGS).load("other") is None


@pytest.mark.parametrize("changed", [{"model": "xyz"}, {"tokens": 5}, {"thresholds": [0.5]}])
def test_records_of_another_probe_are_refused_and_kept(
    tmp_path: Path, continuation: Continuation, changed: dict[str, object]
) -> None:
    store = TraceStore(tmp_path, SETTINGS)
    store.save("key", continuation)
    with pytest.raises(EexportError, match=f"another {next(iter(changed))}.*--force"):
        TraceStore(tmp_path, SETTINGS | changed)
    assert TraceStore(tmp_path, SETTINGS).load("key") is not None


def test_half_a_record_is_none(tmp_path: Path, continuation: Continuation) -> None:
    store = TraceStore(tmp_path, SETTINGS)
    store.save("key", continuation)
    data = (tmp_path / "key.npz").read_bytes()
    for size in (0, 10, len(data) // 2, len(data) - 1):
        (tmp_path / "key.npz").write_bytes(data[:size])
        assert store.load("key") is None
    for place in range(0, len(data), 7):  # a flipped bit, wherever it is, is never an error
        (tmp_path / "key.npz").write_bytes(data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :])
        store.load("key")


def test_a_damaged_list_of_settings_is_an_error(tmp_path: Path) -> None:
    TraceStore(tmp_path, SETTINGS)
    for content in ("{", "[]"):
        (tmp_path / "recorded.json").write_text(content)
        with pytest.raises(EexportError, match="recorded.json: cannot be read"):
            TraceStore(tmp_path, SETTINGS)
