"""The exits that come with SmolLM2-135M-Instruct, as its int8 bundle runs them, on prompts that they have not seen."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from eexport.calibration.accuracy import Marker, full_record, measure_rules
from eexport.calibration.data import builtin_prompts, encode, interleave
from eexport.calibration.exit_records import ExitRecord
from eexport.calibration.exit_slots import ExitSlots
from eexport.calibration.predictor import required_exits
from eexport.calibration.thresholds import Budget, resample
from eexport.models.exits_file import read_calibration
from eexport.models.recipe import recipe_exits
from eexport.runtime.device import open_backend
from eexport.runtime.engine import load_codec
from eexport.runtime.manifest import read_manifest
from eexport.runtime.verify import verify_bundle

MODEL = "smollm2-135m-instruct"
SHIPPED = recipe_exits(MODEL)
PROMPTS, TOKENS = 64, 64

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bundle(real_bundle: Callable[..., Path]) -> Path:
    return real_bundle(precision="int8", calibration=SHIPPED)


@pytest.fixture(scope="module")
def record(bundle: Path) -> ExitRecord:
    """What the exits say on the model's own answers to the built-in prompts."""
    manifest = read_manifest(bundle)
    codec = load_codec(bundle, manifest)
    encoded, _ = encode(builtin_prompts().prompts, codec, manifest.model.bos_token_id, 400)
    prompts = interleave(encoded, seed=0)[:PROMPTS]
    capacity = max(len(prompt.ids) for prompt in prompts) + TOKENS
    slots = ExitSlots(bundle, manifest, open_backend("cpu"), 32, capacity)
    answers, _ = measure_rules(slots, prompts, {}, TOKENS, Marker(codec.decode, run_code=False), lambda *_: None)
    return full_record(slots, prompts, answers)


def test_they_are_small_enough_to_come_along() -> None:
    assert SHIPPED is not None
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) <= 12 << 20
    assert read_calibration(SHIPPED).record["data"]["splits"]["train"]["tokens"] > 300_000


def test_their_stages_compute_what_torch_does(bundle: Path) -> None:
    found = {parity.stage: parity for parity in verify_bundle(bundle, read_manifest(bundle), open_backend("cpu"))}
    for head in read_calibration(SHIPPED or Path()).heads:
        assert found[head.name].cosine > 0.99
    assert found["predictor"].cosine > 0.99


def test_they_say_what_the_model_says_far_more_often_than_raw_layers(record: ExitRecord) -> None:
    agreement = record.accepted(1)
    for place, depth in enumerate(record.depths):
        assert agreement["all"][place] > 0.4, depth  # a raw layer 8 agrees on 4%
        assert agreement["json"][place] > 0.45, depth


def test_the_predictor_beats_the_most_common_depth(record: ExitRecord) -> None:
    traces = record.traces(np.full(len(record.lengths), np.nan))
    required = required_exits(traces.agrees)
    right, common = float((traces.predicted == required).mean()), np.bincount(required).max() / len(required)
    assert right > common


@pytest.mark.parametrize("budget", ["2%tokens", "5%tokens", "10%tokens"])
def test_a_budget_is_broken_no_more_often_than_stated(record: ExitRecord, budget: str) -> None:
    traces = record.traces(np.full(len(record.lengths), np.nan))
    found = resample(traces, Budget.parse(budget), runs=200, prompts=300)
    assert found.broken <= 0.05 + 2 * (0.05 * 0.95 / found.runs) ** 0.5
    least = {"2%tokens": 0.001, "5%tokens": 0.02, "10%tokens": 0.05}[budget]
    assert found.exiting > 0.1 and found.left > least  # it is not kept by never leaving
