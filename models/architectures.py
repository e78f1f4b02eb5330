"""The supported architectures: one decoder, and per `model_type` only what differs.

A `str` names the boolean field of config.json that decides; the field's default is false.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Architecture:
    """How one `model_type` differs from a Llama without biases.

    Attributes:
        qkv_bias: Biases on the query, key and value projections.
        o_bias: Bias on the attention output projection.
        mlp_bias: Biases in the MLP.
        qk_norm: RMSNorm over each query and key head before RoPE.
        head_dim: Head width where the config gives none; None is hidden_size / num_attention_heads.
        windowed: Whether `sliding_window` limits every layer, with no switch for it in the config.
    """

    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    head_dim: int | None = None
    windowed: bool = False


ARCHITECTURES = {
    "llama": Architecture(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": Architecture(windowed=True),
    "qwen2": Architecture(qkv_bias=True),
    "qwen3": Architecture(qkv_bias="attention_bias", o_bias="attention_bias", qk_norm=True, head_dim=128),
}
