"""A model trained so that its middle layers predict the final token, and one that was not, are told apart."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import make_checkpoint
from toys import toy_costs
from transformers import AutoModelForCausalLM

from eexport.calibration.data import Encoded, Prompt
from eexport.calibration.probe import Inputs, Settings, run_probe
from eexport.calibration.store import TraceStore
from eexport.calibration.traced_checkpoint import CheckpointModel
from eexport.models.checkpoint import open_checkpoint

LAYERS = 6
# All ordinary tokens in an order that the models learn by heart: too long a circle for lookup to find a repetition.
CIRCLE = torch.randperm(317, generator=torch.Generator().manual_seed(1)) + 3


def _train(folder: Path, trained: Sequence[int], exit_loss: float) -> Path:
    """Teach a tiny Llama the circle, with these layers and, if asked for, a loss at every exit as in LayerSkip.

    So small a task is decided early even without such a loss if all layers learn it. Real models decide late; the one
    that stands for them here learns in its last layer only.
    """
    make_checkpoint(folder, layers=LAYERS, intermediate=128)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    parameters = [*model.model.embed_tokens.parameters(), *model.model.norm.parameters()]
    for layer in trained:
        parameters += model.model.layers[layer].parameters()
    optimizer = torch.optim.AdamW(parameters, lr=6e-3, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(150):
        starts = torch.randint(0, len(CIRCLE), (16, 1), generator=generator)
        ids = CIRCLE[(starts + torch.arange(25)) % len(CIRCLE)]
        states = model.model(ids[:, :-1], output_hidden_states=True).hidden_states
        loss = F.cross_entropy(model.lm_head(states[-1]).flatten(0, 1), ids[:, 1:].flatten())
        if exit_loss:
            for hidden in states[2:-1]:
                logits = model.lm_head(model.model.norm(hidden))
                loss = loss + exit_loss * F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return folder


def _report(folder: Path, out: Path) -> dict[str, Any]:
    prompts = [
        Encoded(Prompt("text", "", None, None, None, None, "", f"circle:{start}"), tuple(ids), cut=False)
        for start in range(0, 300, 30)
        if (ids := CIRCLE[(start + torch.arange(8)) % len(CIRCLE)].tolist())
    ]
    model = CheckpointModel(open_checkpoint(folder), "")
    costs = toy_costs(layers=LAYERS, head=0.5, host=0.1, row=0.1)
    return run_probe(Inputs(model, str, prompts, [], costs, TraceStore(out, {}), 0.0), Settings(tokens=40))


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("layerskip")
    stock = _train(folder / "stock", [LAYERS - 1], 0.0)
    layerskip = _train(folder / "layerskip", range(LAYERS), 0.5)
    return {
        name: _report(path, folder / f"report-{name}") for name, path in (("stock", stock), ("layerskip", layerskip))
    }


def test_the_verdicts_differ(reports: dict[str, dict[str, Any]]) -> None:
    verdicts = {name: report["predictions"][0]["verdict"] for name, report in reports.items()}
    assert verdicts["layerskip"]["pays"] and verdicts["layerskip"]["best"] in ("exit", "hybrid")
    assert not verdicts["stock"]["pays"] and verdicts["stock"]["best"] in ("full", "lookup")
    assert "Early exit pays" in verdicts["layerskip"]["headline"]
    assert "does not pay" in verdicts["stock"]["headline"]


def test_the_measures_say_why(reports: dict[str, dict[str, Any]]) -> None:
    assert all(report["kinds"]["all"]["looping"] < 0.1 for report in reports.values())  # or lookup would do
    stock, layerskip = (reports[name]["curves"]["all"]["agreement"] for name in ("stock", "layerskip"))
    assert max(stock[:-1]) < 0.35
    assert min(layerskip[1:]) > 0.9
    assert reports["layerskip"]["eas"]["all"]["score"]["top"] > reports["stock"]["eas"]["all"]["score"]["top"] + 0.1
    assert reports["layerskip"]["depth"]["all"]["decided"]["skip"] > 0.5
    assert reports["stock"]["depth"]["all"]["decided"]["skip"] < 0.1
