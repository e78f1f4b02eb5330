"""GGUF tensors under their Hugging Face names, dequantised one at a time."""

import re
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from eexport.models.gguf_file import GgufFile
from eexport.models.weights import Entry, MappedWeights, to_float32

# Divisors of the rotary frequencies (llama3 RoPE); part of the configuration in Hugging Face's form.
ROPE_FACTORS = "rope_freqs.weight"

_MODEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def open_gguf_weights(file: GgufFile, permuted_heads: Mapping[str, int]) -> MappedWeights:
    """The tensors of `file`; unknown ones keep their GGUF name, so that a check for unused ones finds them.

    `permuted_heads` maps q_proj and k_proj to their head counts where the converter interleaved their rows.
    """

    def decode(name: str, entry: Entry, raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        values = _dequantize(entry, raw)
        projection = name.split(".")[-2]
        return _separate_halves(values, permuted_heads[projection]) if projection in permuted_heads else values

    return MappedWeights({_hf_name(name): entry for name, entry in file.tensors.items()}, decode)


def _hf_name(name: str) -> str:
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, stem, kind = match.groups()
        return f"model.layers.{layer}.{_LAYER[stem]}.{kind}" if stem in _LAYER else name
    stem, _, kind = name.rpartition(".")
    return f"{_MODEL[stem]}.{kind}" if stem in _MODEL else name


def _dequantize(entry: Entry, raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    if entry.dtype in ("F32", "F16", "BF16"):
        return to_float32(entry.dtype, raw).reshape(entry.shape)
    rows = raw.reshape(*entry.shape[:-1], -1)
    return np.ascontiguousarray(dequantize(rows, GGMLQuantizationType[entry.dtype]), dtype=np.float32)


def _separate_halves(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo llama.cpp's row order: rotary pairs are neighbours there, half a head apart in Hugging Face."""
    rows, *rest = values.shape
    pairs = values.reshape(heads, rows // heads // 2, 2, *rest)  # [heads, Hd/2, 2, in]
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
