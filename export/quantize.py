"""Weight-only quantisation in blocks of 32 along the input dimension.

Block 32 is the one size at which MatMulNBits with int8 activations gives a row the same bits whatever its neighbours
(4-bit block 64 and block 128 do not), which the ``exact`` mode rests on.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32
_INT4_SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8)


@dataclass(frozen=True)
class Quantized:
    """Integers with a scale per block: w = (values - zero) * scale.

    Attributes:
        bits: 8 or 4.
        values: uint8 [N, K], unsigned.
        scales: float32 [N, K/32].
        zeros: uint8 [N, K/32], or None where every zero point is the middle (128).
    """

    bits: int
    values: Tensor
    scales: Tensor
    zeros: Tensor | None

    def dequantize(self) -> Tensor:
        """The weights [N, K] that the graph computes with."""
        zero = torch.tensor(128.0) if self.zeros is None else self.zeros.float()[..., None]
        blocks = self.values.float().unflatten(-1, (-1, BLOCK))  # [N, K/32, 32]
        return ((blocks - zero) * self.scales[..., None]).flatten(-2)


def quantize(weight: Tensor, bits: int, scale_dtype: torch.dtype) -> Quantized:
    """Quantise a weight [N, K] whose K is a multiple of 32, a slice of rows at a time.

    ``scale_dtype`` is the type the scales will be stored in: integers are chosen for the scale as stored.
    """
    parts = [_quantize_rows(rows, bits, scale_dtype) for rows in weight.split(8192)]
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return Quantized(
        bits,
        torch.cat([part.values for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(zeros) if zeros else None,
    )


def _quantize_rows(weight: Tensor, bits: int, scale_dtype: torch.dtype) -> Quantized:
    blocks = weight.unflatten(-1, (-1, BLOCK))  # [N, K/32, 32]
    return _int8(blocks, scale_dtype) if bits == 8 else _int4(blocks, scale_dtype)


def _int8(blocks: Tensor, scale_dtype: torch.dtype) -> Quantized:
    """Symmetric: for weights that came from GGUF Q8_0 this gives their integers and scales back."""
    scales = _stored(blocks.abs().amax(-1) / 127.0, scale_dtype)
    values = (blocks / scales[..., None]).round_().clamp_(-127, 127).add_(128)
    return Quantized(8, values.to(torch.uint8).flatten(-2), scales, None)


def _int4(blocks: Tensor, scale_dtype: torch.dtype) -> Quantized:
    """Asymmetric, with the range shrunk per block to whichever candidate leaves the least squared error."""
    low, high = blocks.amin(-1).clamp(max=0.0), blocks.amax(-1).clamp(min=0.0)
    best: tuple[Tensor, Tensor, Tensor] | None = None
    best_error = torch.full_like(low, torch.inf)
    for shrink in _INT4_SHRINK:
        scales = _stored((high - low) * (shrink / 15.0), scale_dtype)
        zeros = (-low * shrink / scales).round_().clamp_(0, 15)
        values = (blocks / scales[..., None]).round_().add_(zeros[..., None]).clamp_(0, 15)
        error = ((values - zeros[..., None]) * scales[..., None]).sub_(blocks).square_().sum(-1)
        better = error < best_error
        if best is None:
            best, best_error = (values, scales, zeros), error
            continue
        best = (
            torch.where(better[..., None], values, best[0]),
            torch.where(better, scales, best[1]),
            torch.where(better, zeros, best[2]),
        )
        best_error = torch.minimum(error, best_error)
    assert best is not None
    values, scales, zeros = best
    return Quantized(4, values.to(torch.uint8).flatten(-2), scales, zeros.to(torch.uint8))


def _stored(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales as they will be read back; a block of zeros, or one that underflows, gets scale 1."""
    scales = scales.to(dtype).float()
    return torch.where(scales > 0, scales, 1.0)
