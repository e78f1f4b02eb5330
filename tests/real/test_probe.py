"""The probe of SmolLM2-135M-Instruct: a stock model, whose layers say little before the last."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eexport.calibration.inputs import Request, open_inputs
from eexport.calibration.probe import Settings, run_probe
from eexport.runtime.costs import CostTable, measure_costs
from eexport.runtime.engine import Engine

MODEL = "smollm2-135m-instruct"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reports(real_bundle: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Eight prompts, through the checkpoint and through its int8 bundle, with one cost table."""
    folder = tmp_path_factory.mktemp("probe")
    bundle = real_bundle(precision="int8")
    measure_costs(Engine.load(bundle)).write(folder / "costs.json")
    request, settings = Request(costs=folder / "costs.json"), Settings(tokens=40, max_tokens=300)

    def refuse(*_: Any) -> CostTable:
        raise AssertionError("a cost table was given")

    return {
        name: run_probe(open_inputs(source, folder / name, request, settings, refuse), settings)
        for name, source in (("checkpoint", MODEL), ("bundle", str(bundle)))
    }


def test_raw_layers_have_no_room(reports: dict[str, dict[str, Any]]) -> None:
    report = reports["checkpoint"]
    agreement = dict(zip(report["depths"], report["curves"]["all"]["agreement"], strict=True))
    assert agreement[8] < 0.1 and 0.3 < agreement[27] < 0.8
    assert 0.34 <= report["eas"]["all"]["score"]["logits"] <= 0.5
    assert 0.08 < report["depth"]["all"]["decided"]["skip"] < 0.22
    for prediction in report["predictions"]:
        assert not prediction["verdict"]["pays"]
        speedups = {row["name"]: row["speedup"]["all"] for row in prediction["forecasts"]}
        assert speedups["exit"] < 1 < speedups["lookup"]


def test_the_bundle_tells_the_same(reports: dict[str, dict[str, Any]]) -> None:
    checkpoint, bundle = reports["checkpoint"], reports["bundle"]
    assert bundle["depths"] == [1, 2, 3, 4, 8, 16, 30]
    assert not bundle["predictions"][0]["verdict"]["pays"]
    places = [checkpoint["depths"].index(depth) for depth in bundle["depths"]]
    for name in ("hidden_cosine", "logit_cosine", "agreement"):
        ours, theirs = (report["curves"]["all"][name] for report in (bundle, checkpoint))
        assert ours == pytest.approx(np.array(theirs)[places].tolist(), abs=0.1), name
