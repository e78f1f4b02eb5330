"""Weight-only quantisation: exact where the weights were quantised already, bounded elsewhere."""

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from eexport.export.quantize import BLOCK_SIZES, block_for, quantize

SCALES = [torch.float32, torch.float16]
FORMS = [(bits, block, scale) for bits in (8, 4) for block in BLOCK_SIZES for scale in SCALES]


def weights(rows: int = 48, columns: int = 256, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def through_gguf(weight: Tensor, kind: gguf.GGMLQuantizationType) -> Tensor:
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("bits", "kind"), [(8, gguf.GGMLQuantizationType.Q8_0), (4, gguf.GGMLQuantizationType.Q4_0)])
def test_gguf_weights_come_back_exactly(bits: int, kind: gguf.GGMLQuantizationType, scale: torch.dtype) -> None:
    stored = through_gguf(weights(), kind)
    assert torch.equal(quantize(stored, bits, 32, scale).dequantize(), stored)


@pytest.mark.parametrize(("bits", "block", "scale"), FORMS)
def test_shapes_and_ranges(bits: int, block: int, scale: torch.dtype) -> None:
    quantized = quantize(weights(), bits, block, scale)
    assert quantized.values.shape == (48, 256 // block, block) and quantized.values.dtype == torch.uint8
    assert quantized.scales.shape == (48, 256 // block) and quantized.scales.dtype == torch.float32
    assert int(quantized.values.max()) < 1 << bits
    assert torch.equal(quantized.scales.to(scale).float(), quantized.scales)  # exact as they will be stored
    assert quantized.dequantize().shape == (48, 256)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("block", BLOCK_SIZES)
def test_int8_is_within_half_a_step(block: int, scale: torch.dtype) -> None:
    quantized = quantize(weights(), 8, block, scale)
    error = (quantized.dequantize() - weights()).abs().reshape(48, -1, block).amax(-1)
    # A scale rounded down to fp16 leaves the largest weight a little beyond the last step.
    assert (error <= quantized.scales.abs() * (0.5 if scale == torch.float32 else 0.57) * 1.0001).all()


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("block", "bound"), [(32, 0.09), (64, 0.1), (128, 0.11)])
def test_int4_error(block: int, bound: float, scale: torch.dtype) -> None:
    """On Gaussian weights, relative to their norm; and never worse than the plain scale, block by block."""
    weight = weights()
    blocks = weight.reshape(48, -1, block)
    found = quantize(weight, 4, block, scale).dequantize().reshape(48, -1, block)
    error = (found - blocks).square().sum(-1)
    assert (error.sum() / weight.square().sum()).sqrt() < bound
    peak = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    step = (peak / -8).to(scale).float()
    plain = ((blocks / step).round().clamp(-8, 7) * step - blocks).square().sum(-1)
    assert (error <= plain * 1.0001).all()


@pytest.mark.parametrize(("bits", "block", "scale"), FORMS)
def test_blocks_of_zeros_and_of_next_to_nothing(bits: int, block: int, scale: torch.dtype) -> None:
    weight = weights()
    weight[0] = 0
    weight[1] = 1e-30
    weight[2, :block] = 0
    found = quantize(weight, bits, block, scale).dequantize()
    assert torch.isfinite(found).all()
    assert torch.equal(found[0], weight[0]) and torch.equal(found[2, :block], weight[2, :block])
    assert found[1].abs().max() <= 1e-29
    assert (found[3] - weight[3]).abs().max() < 0.05


@pytest.mark.parametrize("bits", [8, 4])
def test_an_outlier_costs_its_own_block_alone(bits: int) -> None:
    weight = weights()
    before = quantize(weight, bits, 32, torch.float32).dequantize()
    weight[5, 40] = 30.0
    after = quantize(weight, bits, 32, torch.float32).dequantize()
    assert after[5, 40] == pytest.approx(30, rel=0.05)
    elsewhere = torch.ones_like(weight, dtype=torch.bool)
    elsewhere[5, 32:64] = False
    assert torch.equal(after[elsewhere], before[elsewhere])


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_are_independent(bits: int) -> None:
    """Large matrices are quantised some rows at a time."""
    weight = weights(9000, 32)
    whole = quantize(weight, bits, 32, torch.float16)
    for rows in (slice(0, 10), slice(4090, 4100), slice(8990, 9000)):
        part = quantize(weight[rows], bits, 32, torch.float16)
        assert torch.equal(part.values, whole.values[rows]) and torch.equal(part.scales, whole.scales[rows])


def test_the_block_size_divides_the_width() -> None:
    assert [block_for(width, 128) for width in (1024, 192, 96, 576, 896, 100)] == [128, 64, 32, 64, 128, None]
    assert [block_for(width, 32) for width in (1024, 96, 16)] == [32, 32, None]
    assert np.all([block_for(width, 64) == 64 for width in range(64, 1024, 64)])
