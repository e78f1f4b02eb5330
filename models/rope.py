"""Rotary frequencies from a Hugging Face configuration, old (flat) or new (`rope_parameters`) shape.

Everything is computed in fp32 with torch, in the order of operations of transformers, so the frequencies are
the same bits: at position 32,000 a difference in the last place moves an angle by thousandths of a radian.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from eexport.models.errors import CheckpointError
from eexport.models.fields import Fields
from eexport.models.spec import RopeSpec


def rope_spec(config: Fields, head_dim: int) -> RopeSpec:
    """The rotary embedding that `config` asks for; a type that is not known is an error, never ignored."""
    rope = _parameters(config)
    name = "rope_type" if "rope_type" in rope.values else "type"
    rope_type = rope.values.get(name) or "default"
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise rope.error("partial_rotary_factor", "other than 1 is not supported")
    base = rope.number("rope_theta", 10000.0)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float) / head_dim
    inv_freq, attention_factor = 1.0 / (base**exponents), 1.0
    if rope_type == "linear":
        inv_freq = inv_freq / rope.number("factor")
    elif rope_type == "llama3":
        inv_freq = _llama3(rope, inv_freq)
    elif rope_type == "yarn":
        inv_freq, attention_factor = _yarn(rope, base, head_dim)
    elif rope_type != "default":
        raise rope.error(name, f"{rope_type!r} is not supported (known: default, linear, llama3, yarn)")
    return RopeSpec(rope_type, tuple(inv_freq.tolist()), attention_factor)


def with_factors(rope: RopeSpec, factors: Sequence[float]) -> RopeSpec:
    """`rope` with each frequency divided by its factor: how GGUF stores the llama3 type."""
    if len(factors) != len(rope.inv_freq):
        raise CheckpointError(f"RoPE: {len(factors)} frequency factors for {len(rope.inv_freq)} frequencies")
    inv_freq = torch.tensor(rope.inv_freq) / torch.tensor(factors, dtype=torch.float)
    return replace(rope, rope_type="llama3", inv_freq=tuple(inv_freq.tolist()))


def _parameters(config: Fields) -> Fields:
    """Merge the places where transformers has kept the parameters; the most nested one wins."""
    flat = {key: config.values.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    nested = config.values.get("rope_parameters") or config.values.get("rope_scaling") or {}
    if not isinstance(nested, dict) or any(isinstance(value, dict) for value in nested.values()):
        raise config.error("rope_parameters", "is not one set of values for all layers, which is not supported")
    context = config.values.get("original_max_position_embeddings") or nested.get("original_max_position_embeddings")
    return Fields(
        {**flat, "max_position_embeddings": config.values.get("max_position_embeddings"), **nested}
        | {"original_max_position_embeddings": context or config.values.get("max_position_embeddings")},
        f"{config.where}: RoPE",
    )


def _llama3(rope: Fields, inv_freq: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: long wavelengths divided by the factor, short ones kept, a ramp in between."""
    factor = rope.number("factor")
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    context = rope.integer("original_max_position_embeddings")
    wavelength = 2 * math.pi / inv_freq
    smooth = (context / wavelength - low) / (high - low)
    ramped = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    scaled = torch.where(wavelength > context / low, inv_freq / factor, ramped)
    return torch.where(wavelength < context / high, inv_freq, scaled)


def _yarn(rope: Fields, base: float, head_dim: int) -> tuple[torch.Tensor, float]:
    """YaRN (arXiv 2309.00071): slow dimensions interpolated, fast ones kept, a ramp in between."""
    context = rope.integer("original_max_position_embeddings")
    factor = rope.number("factor", rope.integer("max_position_embeddings", context) / context)

    def magnitude(scale: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    attention_factor = magnitude()
    if rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
        attention_factor = magnitude(rope.number("mscale")) / magnitude(rope.number("mscale_all_dim"))
    attention_factor = rope.number("attention_factor", attention_factor)

    def dimension(rotations: float) -> float:
        return head_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(rope.number("beta_fast", 32.0)), dimension(rope.number("beta_slow", 1.0))
    if rope.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as transformers: no division by zero
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float) - low) / (high - low), 0, 1)
    frequencies = base ** (torch.arange(0, head_dim, 2).to(torch.float) / head_dim)
    keep = 1 - ramp
    return 1.0 / (factor * frequencies) * (1 - keep) + 1.0 / frequencies * keep, attention_factor
