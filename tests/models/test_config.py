"""What config.json and generation_config.json mean, and which fields are refused."""

from pathlib import Path
from typing import Any

import pytest
from tiny import edit_config, make_checkpoint

from eexport.models.checkpoint import open_checkpoint
from eexport.models.config import sampling_defaults, spec_from_config
from eexport.models.errors import CheckpointError
from eexport.models.spec import ModelSpec

BASE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 320,
    "max_position_embeddings": 512,
}


def spec(generation: dict[str, Any] | None = None, **changes: Any) -> ModelSpec:
    return spec_from_config(BASE | changes, generation or {}, "config.json")


def test_defaults_are_those_of_transformers() -> None:
    read = spec()
    assert (read.num_kv_heads, read.head_dim, read.rms_norm_eps) == (4, 16, 1e-6)
    assert not (read.tie_word_embeddings or read.qkv_bias or read.o_bias or read.mlp_bias or read.qk_norm)
    assert (read.bos_token_id, read.eos_token_ids) == (None, ())
    assert spec(model_type="qwen3").head_dim == 128
    assert spec(model_type="qwen2").qkv_bias


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gemma3"}, "model_type 'gemma3'"),
        ({"model_type": None}, "model_type None"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type 'longrope'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types 'chunked_attention'"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim 15"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id"),
    ],
)
def test_refusals_name_the_field(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        spec(**changes)
    message = str(caught.value)
    assert named in message and message.startswith("config.json") and "\n" not in message


@pytest.mark.parametrize(
    ("changes", "context"),
    [
        ({"model_type": "mistral", "sliding_window": 128}, 128),
        ({"model_type": "mistral", "sliding_window": 512}, 512),
        ({"model_type": "mistral", "sliding_window": None}, 512),
        ({"model_type": "mistral", "max_position_embeddings": 8192}, 4096),
        ({"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": False}, 512),
        ({"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": True}, 512),  # from layer 28 on
        (
            {
                "model_type": "qwen2",
                "sliding_window": 128,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            128,
        ),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 128,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            128,
        ),
        ({"model_type": "qwen3", "sliding_window": 128, "layer_types": ["full_attention"] * 2}, 512),
    ],
)
def test_a_sliding_window_caps_the_context(changes: dict[str, Any], context: int) -> None:
    assert spec(**changes).context_length == context


def test_the_cap_is_recorded(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_checkpoint(tmp_path, "mistral", sliding_window=128))
    assert checkpoint.spec.context_length == 128
    assert checkpoint.source["context"] == "128 of 512 tokens: the sliding window"
    assert "context" not in open_checkpoint(edit_config(tmp_path, sliding_window=None)).source


def test_several_end_tokens_are_merged_in_order() -> None:
    assert spec({"eos_token_id": [7, 5, 9]}, eos_token_id=5).eos_token_ids == (5, 7, 9)
    assert spec({"eos_token_id": [7, 5]}).eos_token_ids == (7, 5)
    assert spec({"bos_token_id": 3}).bos_token_id == 3


def test_sampling_defaults() -> None:
    assert sampling_defaults({"temperature": 0.7, "top_p": 0.9}) == {}
    settings = {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.1}
    assert sampling_defaults({"do_sample": True, "max_new_tokens": 9, **settings}) == settings
    assert sampling_defaults({"do_sample": True, "top_k": 20}) == {"temperature": 1.0, "top_k": 20}
    with pytest.raises(CheckpointError, match="top_k"):
        sampling_defaults({"do_sample": True, "top_k": "20"})
