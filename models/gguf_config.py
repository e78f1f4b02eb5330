"""GGUF metadata as the Hugging Face configuration it was converted from, so that one reader serves both."""

from typing import Any

from eexport.models.errors import CheckpointError
from eexport.models.gguf_file import GgufFile

_ARCHITECTURES = ("llama", "qwen2", "qwen3")  # a Mistral is written as a llama
# What llama.cpp also treats as the end of a reply, whatever eos_token_id says.
_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>")
_CONTROL = 3


def config_from_gguf(file: GgufFile) -> dict[str, Any]:
    """The config.json that describes `file`; a missing key is left to the reader of the config to report."""
    metadata = file.metadata
    name = metadata.get("general.architecture")
    if name not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise CheckpointError(f"{file.path}: general.architecture {name!r} is not supported (known: {known})")

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{name}.{key}", default)

    embedding = file.tensors.get("token_embd.weight")
    config = {
        "model_type": name,
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": get("attention.head_count"),
        "num_key_value_heads": get("attention.head_count_kv"),
        "vocab_size": embedding.shape[0] if embedding else None,
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_ids(metadata),
        "rope_parameters": _rope(get),
    }
    hidden_size, heads = config["hidden_size"], config["num_attention_heads"]
    if isinstance(hidden_size, int) and isinstance(heads, int):
        head_dim = get("attention.key_length", hidden_size // max(heads, 1))
        config["head_dim"] = head_dim
        config["partial_rotary_factor"] = get("rope.dimension_count", head_dim) / head_dim
        if get("attention.value_length", head_dim) != head_dim:
            raise CheckpointError(f"{file.path}: {name}.attention.value_length differs from key_length: not supported")
    if window := get("attention.sliding_window"):
        config |= {"sliding_window": window, "layer_types": ["sliding_attention"]}
    return config


def _rope(get: Any) -> dict[str, Any]:
    base = {"rope_theta": get("rope.freq_base", 10000.0)}
    factor = get("rope.scaling.factor") or get("rope.scale_linear")
    # Without a factor there is nothing to scale; with one and no type, llama.cpp scales linearly.
    kind = get("rope.scaling.type", "linear") if factor else "none"
    if kind == "none":
        return {**base, "rope_type": "default"}
    rope = {**base, "rope_type": kind, "factor": factor}
    if kind == "yarn":
        rope |= {
            "original_max_position_embeddings": get("rope.scaling.original_context_length"),
            "beta_fast": get("rope.scaling.yarn_beta_fast"),
            "beta_slow": get("rope.scaling.yarn_beta_slow"),
        }
    return rope


def _end_ids(metadata: dict[str, Any]) -> list[int]:
    """Ids that end a reply: the named ones first, then control tokens known by their text."""
    named = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    tokens, types = metadata.get("tokenizer.ggml.tokens", []), metadata.get("tokenizer.ggml.token_type", [])
    by_text = [i for i, kind in enumerate(types) if kind == _CONTROL and tokens[i] in _END_TOKENS]
    return list(dict.fromkeys([i for i in named if i is not None] + by_text))
