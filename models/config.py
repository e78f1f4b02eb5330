"""From a Hugging Face configuration to a `ModelSpec`; what cannot be honoured is refused by name."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eexport.models.architectures import ARCHITECTURES, Architecture
from eexport.models.errors import CheckpointError
from eexport.models.fields import Fields
from eexport.models.rope import rope_spec
from eexport.models.spec import ModelSpec

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, read as UTF-8."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: is not a JSON object; download it again")
    return value


def read_json_if_present(path: Path) -> dict[str, Any]:
    """As `read_json`, and an empty object where there is no such file."""
    return read_json(path) if path.is_file() else {}


def spec_from_config(config: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelSpec:
    """Read `config` (config.json) and `generation` (generation_config.json, may be empty) into a spec.

    A sliding window caps `context_length`: within the window full attention is the same function.
    """
    fields = Fields(config, where)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise fields.error("model_type", f"{model_type!r} is not supported (known: {', '.join(ARCHITECTURES)})")
    architecture = ARCHITECTURES[model_type]
    if config.get("quantization_config"):
        raise fields.error("quantization_config", "is not supported; use the unquantised checkpoint or a GGUF file")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.error("hidden_act", f"{config['hidden_act']!r} is not supported (known: silu)")

    def switch(value: bool | str) -> bool:
        return fields.flag(value) if isinstance(value, str) else value

    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    head_dim = fields.integer("head_dim", architecture.head_dim or hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"{num_kv_heads} does not divide the {num_heads} attention heads")
    if head_dim % 2:
        raise fields.error("head_dim", f"{head_dim} is odd, which RoPE does not allow")
    ids = [Fields(generation, "generation_config.json"), fields]
    bos = next((found[0] for source in ids if (found := source.ids("bos_token_id"))), None)
    eos = fields.ids("eos_token_id") + ids[0].ids("eos_token_id")
    return ModelSpec(
        architecture=model_type,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size"),
        context_length=_context_length(fields, architecture),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope_spec(fields, head_dim),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=switch(architecture.qkv_bias),
        o_bias=switch(architecture.o_bias),
        mlp_bias=switch(architecture.mlp_bias),
        qk_norm=architecture.qk_norm,
        bos_token_id=bos,
        eos_token_ids=tuple(dict.fromkeys(eos)),
    )


def sampling_defaults(generation: Mapping[str, Any]) -> dict[str, float | int]:
    """The sampling settings the authors recommend; empty where they decode greedily."""
    if not generation.get("do_sample"):
        return {}
    given = {name: generation[name] for name in _SAMPLING if generation.get(name) is not None}
    settings = {"temperature": 1.0} | given  # what transformers samples with if they name no temperature
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"generation_config.json: {name} is {value!r}, expected a number")
    return settings


def _context_length(fields: Fields, architecture: Architecture) -> int:
    """`max_position_embeddings`, or the sliding window if a layer has a shorter one."""
    context = fields.integer("max_position_embeddings")
    layer_types = set(fields.values.get("layer_types") or ())
    if unknown := layer_types - {"full_attention", "sliding_attention"}:
        raise fields.error("layer_types", f"{sorted(unknown)[0]!r} is not supported (known: full_attention)")
    if architecture.windowed:
        slides = True
    elif layer_types:
        slides = "sliding_attention" in layer_types
    else:  # the first `max_window_layers` layers attend to everything
        full_layers = fields.values.get("max_window_layers", 28)
        slides = fields.flag("use_sliding_window") and full_layers < fields.integer("num_hidden_layers")
    window = fields.values.get("sliding_window", 4096)
    return min(context, fields.integer("sliding_window", 4096)) if slides and window is not None else context
