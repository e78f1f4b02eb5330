"""The decoder in torch, fp32: the reference that every exported graph is compared with.

It is a flat list of layers between an embedding and a head, so splitting the model is slicing the list.
Legend: B batch, T new rows, S past and new rows, H query heads, KvH key/value heads, Hd head width,
D hidden width, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eexport.models.spec import ModelSpec, RopeSpec
from eexport.models.weights import Weights


def rope_tables(rope: RopeSpec, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B, T, Hd/2] for integer positions [B, T]; the angles are computed in fp32."""
    angles = positions[..., None].to(torch.float32) * torch.tensor(rope.inv_freq)
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor


@dataclass
class LayerKV:
    """Keys and values of one layer, [B, KvH, S, Hd] each; None before the first row."""

    key: Tensor | None = None
    value: Tensor | None = None

    @property
    def length(self) -> int:
        """S, the rows held."""
        return 0 if self.key is None else self.key.shape[2]

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add T rows, [B, KvH, T, Hd] each, and return all of them."""
        self.key = key if self.key is None else torch.cat((self.key, key), dim=2)
        self.value = value if self.value is None else torch.cat((self.value, value), dim=2)
        return self.key, self.value

    def trim(self, count: int) -> None:
        """Drop the last `count` rows."""
        if self.key is not None and self.value is not None:
            keep = self.length - count
            self.key, self.value = self.key[:, :, :keep], self.value[:, :, :keep]


@dataclass
class DecoderLayer:
    """One layer; its weights are in `tensors`, by their names within the layer."""

    spec: ModelSpec
    tensors: Mapping[str, Tensor]

    @classmethod
    def from_weights(cls, spec: ModelSpec, layer: int, weights: Weights) -> "DecoderLayer":
        """Read layer number `layer`."""
        names = spec.layer_shapes()
        return cls(spec, {name: torch.from_numpy(weights.read(f"model.layers.{layer}.{name}")) for name in names})

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, kv: LayerKV, visible: Tensor | None = None) -> Tensor:
        """Map hidden states [B, T, D] to the next layer's and append to `kv`.

        `cos` and `sin` are [B, T, Hd/2]. `visible` [B, 1, T, S] says which row sees which, where it is not simply
        every row those before it.
        """
        hidden = hidden + self._attention(self._norm("input_layernorm", hidden), cos, sin, kv, visible)
        inner = self._norm("post_attention_layernorm", hidden)
        gated = F.silu(self._linear("mlp.gate_proj", inner)) * self._linear("mlp.up_proj", inner)
        return hidden + self._linear("mlp.down_proj", gated)

    def _attention(self, hidden: Tensor, cos: Tensor, sin: Tensor, kv: LayerKV, visible: Tensor | None) -> Tensor:
        rows = hidden.shape[1]
        query, key, value = (self._heads(f"self_attn.{name}_proj", hidden) for name in "qkv")
        if self.spec.qk_norm:
            query, key = self._norm("self_attn.q_norm", query), self._norm("self_attn.k_norm", key)
        key, value = kv.append(_rotate(key, cos, sin), value)
        if visible is None:
            visible = torch.ones(rows, kv.length, dtype=torch.bool).tril(kv.length - rows)  # [T, S]
        mixed = F.scaled_dot_product_attention(_rotate(query, cos, sin), key, value, attn_mask=visible, enable_gqa=True)
        return self._linear("self_attn.o_proj", mixed.transpose(1, 2).flatten(2))  # [B, H, T, Hd] to [B, T, H·Hd]

    def _heads(self, name: str, hidden: Tensor) -> Tensor:
        # [B, T, heads·Hd] to [B, heads, T, Hd]
        return self._linear(name, hidden).view(*hidden.shape[:2], -1, self.spec.head_dim).transpose(1, 2)

    def _linear(self, name: str, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def _norm(self, name: str, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self.tensors[f"{name}.weight"], self.spec.rms_norm_eps)


@dataclass
class Decoder:
    """The whole model; `head_weight` is the embedding itself where they are tied."""

    spec: ModelSpec
    embedding: Tensor
    layers: list[DecoderLayer]
    norm_weight: Tensor
    head_weight: Tensor

    @classmethod
    def from_weights(cls, spec: ModelSpec, weights: Weights) -> "Decoder":
        """Read every tensor into memory, in fp32."""
        embedding, norm = (torch.from_numpy(weights.read(f"model.{n}.weight")) for n in ("embed_tokens", "norm"))
        head = embedding if spec.tie_word_embeddings else torch.from_numpy(weights.read("lm_head.weight"))
        layers = [DecoderLayer.from_weights(spec, layer, weights) for layer in range(spec.num_layers)]
        return cls(spec, embedding, layers, norm, head)

    def embed(self, ids: Tensor) -> Tensor:
        """Hidden states [B, T, D] of token ids [B, T]."""
        return F.embedding(ids, self.embedding)

    def head(self, hidden: Tensor) -> Tensor:
        """Final norm and language-model head: hidden states [B, T, D] to logits [B, T, V]."""
        return F.linear(rms_norm(hidden, self.norm_weight, self.spec.rms_norm_eps), self.head_weight)

    def __call__(self, ids: Tensor, kv: list[LayerKV] | None = None) -> Tensor:
        """Logits [B, T, V] of token ids [B, T] that follow what `kv` holds, one entry a layer."""
        kv = [LayerKV() for _ in self.layers] if kv is None else kv
        past = kv[0].length if kv else 0
        cos, sin = rope_tables(self.spec.rope, torch.arange(past, past + ids.shape[1])[None])
        hidden = self.embed(ids)
        for layer, layer_kv in zip(self.layers, kv, strict=True):
            hidden = layer(hidden, cos, sin, layer_kv)
        return self.head(hidden)


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis, in the order of operations of transformers."""
    return weight * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps))


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [B, heads, T, Hd], pairing dimension i with i + Hd/2."""
    cos, sin = cos[:, None], sin[:, None]  # [B, 1, T, Hd/2]
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
