"""What a decoder is: sizes, switches and the tensors it needs, read once and never changed.

Shape legend of this package: B batch, T rows, S past and new rows, H query heads, KvH key/value heads,
G = H/KvH, Hd head width, D hidden width, V vocabulary.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding, reduced to what a graph needs: its frequencies and one factor.

    Attributes:
        rope_type: Where the frequencies come from: default, linear, llama3 or yarn.
        inv_freq: Radians per position, Hd/2 values, each exact in fp32.
        attention_factor: Multiplies cos and sin (yarn); 1.0 otherwise.
    """

    rope_type: str
    inv_freq: tuple[float, ...]
    attention_factor: float


@dataclass(frozen=True)
class ModelSpec:
    """A pre-norm decoder with RMSNorm, rotary grouped-query attention and a SwiGLU MLP.

    `vocab_size` is the number of embedding rows, perhaps more than the tokenizer has; `context_length` is in
    tokens.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    rope: RopeSpec
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name within a layer (`self_attn.q_proj.weight`) to shape, [out, in] for matrices."""
        hidden, inner = self.hidden_size, self.intermediate_size
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        matrices = {
            "self_attn.q_proj": (query, hidden, self.qkv_bias),
            "self_attn.k_proj": (kv, hidden, self.qkv_bias),
            "self_attn.v_proj": (kv, hidden, self.qkv_bias),
            "self_attn.o_proj": (hidden, query, self.o_bias),
            "mlp.gate_proj": (inner, hidden, self.mlp_bias),
            "mlp.up_proj": (inner, hidden, self.mlp_bias),
            "mlp.down_proj": (hidden, inner, self.mlp_bias),
        }
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        for name, (rows, columns, bias) in matrices.items():
            shapes[f"{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{name}.bias"] = (rows,)
        if self.qk_norm:
            shapes["self_attn.q_norm.weight"] = (self.head_dim,)
            shapes["self_attn.k_norm.weight"] = (self.head_dim,)
        return shapes

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor the decoder needs, by its Hugging Face name, with its shape."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, self.hidden_size)}
        for layer in range(self.num_layers):
            for name, shape in self.layer_shapes().items():
                shapes[f"model.layers.{layer}.{name}"] = shape
        shapes["model.norm.weight"] = (self.hidden_size,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        return shapes
