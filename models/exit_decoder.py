"""Exits in torch, fp32: the reference that their exported graphs are compared with. Legend as in ``decoder``."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from eexport.models.decoder import DecoderLayer, LayerKV, rms_norm
from eexport.models.spec import ModelSpec


def exit_hidden(
    spec: ModelSpec,
    tensors: Mapping[str, Tensor],
    features: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    kv: LayerKV,
    visible: Tensor | None = None,
) -> Tensor:
    """Hidden states [B, T, D] of an exit head, before its norm; appends to ``kv``.

    Args:
        spec: The model.
        tensors: Those of ``exits.head_shapes``.
        features: [B, T, D] each, in the order of the head's.
        cos: [B, T, Hd/2].
        sin: [B, T, Hd/2].
        kv: The head's own keys and values.
        visible: As for ``DecoderLayer``.
    """
    hidden = features[0]
    if len(features) > 1:
        scales = (tensors[f"fuse_norm.{index}.weight"] for index in range(len(features)))
        normed = [rms_norm(f, scale, spec.rms_norm_eps) for f, scale in zip(features, scales, strict=True)]
        hidden = F.linear(torch.cat(normed, dim=-1), tensors["fuse.weight"])
    return DecoderLayer(spec, tensors)(hidden, cos, sin, kv, visible)


def exit_logits(spec: ModelSpec, tensors: Mapping[str, Tensor], hidden: Tensor, draft_rows: Tensor) -> Tensor:
    """Logits [B, T, Vd] from what ``exit_hidden`` gave and the LM head's rows [Vd, D] for the draft vocabulary."""
    return F.linear(rms_norm(hidden, tensors["norm.weight"], spec.rms_norm_eps), draft_rows)


def predictor_logits(spec: ModelSpec, tensors: Mapping[str, Tensor], states: Sequence[Tensor]) -> Tensor:
    """Logits [B, T, E+1] over exits, shallowest first, and full depth, from hidden states [B, T, D] of its layers."""
    one = torch.ones(spec.hidden_size)
    inputs = torch.cat([rms_norm(state, one, spec.rms_norm_eps) for state in states], dim=-1)
    units = F.silu(F.linear(inputs, tensors["hidden.weight"], tensors["hidden.bias"]))
    return F.linear(units, tensors["output.weight"], tensors["output.bias"])
