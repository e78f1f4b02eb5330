"""Real models: their bundles, built once a test module and removed after it, and what transformers makes of them."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from eexport.export.build import BuildOptions, build
from eexport.models.checkpoint import Checkpoint, open_checkpoint
from eexport.runtime.backend import Backend
from eexport.runtime.engine import Engine

# Texts of different kinds; those that stand in front are the fast tests' choice.
PROMPTS = {
    "json": 'Return a JSON object with the keys "title", "year" and "tags" for a made-up film.',
    "code": "Write a Python function that merges two sorted lists, with a docstring and a doctest.",
    "not English": "Explique en trois phrases pourquoi la mer est salée, puis : 日本語で挨拶してください。",
    "emoji": "Rewrite with emoji: 🚲 the bike is red, the 👩🏽‍🚀 astronaut is happy, and it rains 🌧️🌧️.",
    "maths": "A train leaves at 9:40 and arrives at 12:05. How long does it travel? Show every step.",
    "text": "Tell a short story about a lighthouse keeper who finds a letter in a bottle.",
    "dialogue": "Write a dialogue between a baker and a customer who has forgotten what to buy.",
    "list": "List ten tools that belong in a small workshop, each with one use.",
    "one word": "Hello",
    "long": "Summarise this log in two sentences.\n"
    + "\n".join(
        f"08:{i:02d} pump {i % 4}: {20 + i * i % 13} bar, valve {'open' if i % 3 else 'shut'}" for i in range(40)
    ),
}
SCORED_TEXT = Path(__file__).parents[2] / "LICENSE"
SCORED_TOKENS = 400


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest) -> Checkpoint:
    """The checkpoint that the module names."""
    return open_checkpoint(request.module.MODEL)


@pytest.fixture(scope="module")
def real_bundle(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Path]]:
    """The checkpoint built with some `BuildOptions`."""
    folder, made = tmp_path_factory.mktemp("real"), set()

    def make(**options: Any) -> Path:
        bundle = folder / "-".join(f"{name}-{value}" for name, value in sorted(options.items()))
        if bundle not in made:
            build(checkpoint, bundle, BuildOptions(**options))
            made.add(bundle)
        return bundle

    yield make
    shutil.rmtree(folder)  # pytest would keep gigabytes


@pytest.fixture(scope="module")
def fp32_engine(real_bundle: Callable[..., Path], backend: Backend) -> Engine:
    return Engine.load(real_bundle(precision="fp32"), backend=backend, context=1024)


@pytest.fixture(scope="module")
def scored_ids(fp32_engine: Engine) -> list[int]:
    """Tokens of a text in plain English."""
    return fp32_engine.codec.encode(SCORED_TEXT.read_text(encoding="utf-8"))[:SCORED_TOKENS]


@pytest.fixture(scope="module")
def transformers_model(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Any:
    """The model in transformers, of the configuration that its authors published and the checkpoint's weights."""
    config = AutoConfig.for_model(**request.module.PUBLISHED_CONFIG)
    with torch.device("meta"):  # without the time that random weights take
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = {name: torch.from_numpy(checkpoint.weights.read(name)) for name in checkpoint.spec.tensor_shapes()}
    model.load_state_dict(weights, assign=True, strict=not config.tie_word_embeddings)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.generation_config.eos_token_id = None
    return model.eval()


@pytest.fixture(scope="module")
def places_that_differ(fp32_engine: Engine, transformers_model: Any) -> Callable[[int, int], dict[str, int]]:
    """For the first so many prompts: where the greedy tokens of bundle and transformers part; empty is the same."""

    def compare(prompts: int, tokens: int) -> dict[str, int]:
        differing = {}
        for kind, prompt in list(PROMPTS.items())[:prompts]:
            ids = fp32_engine.codec.encode_chat([{"role": "user", "content": prompt}])
            ours = [token.token_id for token in fp32_engine.generate(ids, max_tokens=tokens, ignore_eos=True)]
            batch = torch.tensor([ids])
            with torch.inference_mode():
                output = transformers_model.generate(
                    batch, attention_mask=torch.ones_like(batch), max_new_tokens=tokens, do_sample=False
                )
            theirs = output[0, len(ids) :].tolist()
            assert len(ours) == len(theirs) == tokens
            if ours != theirs:
                differing[kind] = next(i for i in range(tokens) if ours[i] != theirs[i])
        return differing

    return compare
