"""The reference decoder against transformers, for every architecture, RoPE type and head layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import edit_config, edit_tensors, make_checkpoint, make_scripted
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding

from eexport.models.checkpoint import open_checkpoint
from eexport.models.decoder import Decoder, LayerKV, rope_tables

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ROPES = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-explicit": {
        **YARN,
        "beta_fast": 4.0,
        "beta_slow": 0.5,
        "attention_factor": 1.3,
        "truncate": False,
    },
    "yarn-mscale": {**YARN, "mscale": 1.5, "mscale_all_dim": 0.5},
}
WIDE_HEADS = {"head_dim": 32, "kv_heads": 1}  # 4 heads of 32 on a hidden width of 64


def token_ids(count: int) -> torch.Tensor:
    return torch.randint(0, 300, (1, count), generator=torch.Generator().manual_seed(1))


def decoder(folder: Path) -> Decoder:
    checkpoint = open_checkpoint(folder)
    return Decoder.from_weights(checkpoint.spec, checkpoint.weights)


@torch.inference_mode()
def assert_same_logits(folder: Path, rows: int = 300) -> None:
    ids = token_ids(rows)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
    assert expected.std() > 0.3, "the test model has nothing to say"
    torch.testing.assert_close(decoder(folder)(ids), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
def test_far_positions(tmp_path: Path, arch: str, rope: str) -> None:
    assert_same_logits(make_checkpoint(tmp_path, arch, rope=ROPES[rope]))


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"kv_heads": 4}),
        ("llama", {"tied": False}),
        ("mistral", WIDE_HEADS),
        ("qwen2", {"tied": False, "kv_heads": 1}),
        ("qwen3", WIDE_HEADS),
        ("qwen3", {**WIDE_HEADS, "attention_bias": True, "tied": False}),
        ("llama", {"dtype": torch.bfloat16}),
        ("qwen2", {"dtype": torch.float16}),
        ("llama", {"shards": 3, "tied": False}),
    ],
)
def test_layouts(tmp_path: Path, arch: str, options: dict[str, Any]) -> None:
    assert_same_logits(make_checkpoint(tmp_path, arch, **options), rows=40)


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("rope", ["default", "linear", "llama3", "yarn"])
def test_flat_rope_fields(tmp_path: Path, rope: str, key: str) -> None:
    """Before version 5, transformers wrote rope_theta and rope_scaling side by side."""
    make_checkpoint(tmp_path)
    parameters = dict(ROPES[rope])
    scaling = {key: parameters.pop("rope_type"), **parameters} if parameters else None
    edit_config(tmp_path, rope_parameters=..., rope_theta=50000.0, rope_scaling=scaling)
    assert_same_logits(tmp_path)


def test_large_biases_matter(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen2")
    ids = token_ids(8)
    before = decoder(tmp_path)(ids)
    edit_tensors(tmp_path, lambda t: [t[n].mul_(2) for n in t if n.endswith("q_proj.bias")])
    assert not torch.allclose(before, decoder(tmp_path)(ids), atol=0.01)


def test_steps_and_trim_equal_one_pass(tmp_path: Path) -> None:
    model, ids = decoder(make_checkpoint(tmp_path, "qwen3")), token_ids(12)
    whole = model(ids)
    kv = [LayerKV() for _ in model.layers]
    model(ids[:, :5], kv)
    model(ids[:, :3], kv)  # a rejected draft
    for layer_kv in kv:
        layer_kv.trim(3)
    assert [layer_kv.length for layer_kv in kv] == [5, 5, 5]
    rest = [model(ids[:, i : i + 1], kv) for i in range(5, 12)]
    torch.testing.assert_close(torch.cat(rest, dim=1), whole[:, 5:], rtol=0, atol=1e-5)


def test_layers_can_be_sliced(tmp_path: Path) -> None:
    model, ids = decoder(make_checkpoint(tmp_path)), token_ids(6)
    cos, sin = rope_tables(model.spec.rope, torch.arange(6)[None])
    hidden = model.embed(ids)
    for part in (model.layers[:1], model.layers[1:]):
        for layer in part:
            hidden = layer(hidden, cos, sin, LayerKV())
    torch.testing.assert_close(model.head(hidden), model(ids), rtol=0, atol=0)


@pytest.mark.parametrize("rope", ["default", "llama3"])
def test_rope_tables_are_fp32_for_any_dtype(tmp_path: Path, rope: str) -> None:
    folder = make_checkpoint(tmp_path, rope=ROPES[rope], dtype=torch.bfloat16, context=40000)
    positions = torch.tensor([[0, 1857, 32000]])
    cos, sin = rope_tables(open_checkpoint(folder).spec.rope, positions)
    expected = LlamaRotaryEmbedding(LlamaConfig.from_pretrained(folder))(torch.zeros(1), positions)
    for table, reference in zip((cos, sin), expected, strict=True):
        assert table.dtype == torch.float32
        torch.testing.assert_close(table, reference[..., : table.shape[-1]], rtol=0, atol=0)


def test_scripted_checkpoint_follows_its_script(tmp_path: Path) -> None:
    model = decoder(make_scripted(tmp_path, {5: 9, 9: 300, 300: 5}, layers=2))
    assert model(torch.tensor([[5, 9, 300, 7]])).argmax(-1).tolist() == [[9, 300, 5, 2]]
