"""The ``standard`` dialect: ONNX opset 24 only, read by ONNX Runtime and by TensorRT.

Activations are fp16 unless the weights are fp32. Quantised weights are DequantizeLinear (blocks along K,
fp16 scales) before a plain MatMul: TensorRT fuses the pair, ONNX Runtime turns it into MatMulNBits.
TensorRT takes signed integers without zero points, and lets no operator but DequantizeLinear read them.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from onnx import TensorProto
from torch import Tensor

from eexport.export.dialect import DialectName, Matrix, Precision
from eexport.export.folded import folded_attention, masked_inputs
from eexport.export.graph import Graph, Stored, WeightFile
from eexport.export.quantize import block_for, quantize
from eexport.models.spec import ModelSpec
from eexport.runtime.manifest import RowsInfo, TensorSpec

_BITS = {"int8": 8, "int4": 4}


class StandardDialect:
    """See ``dialect.Dialect``. Matrices are stored transposed, [K, N], as MatMul reads them."""

    name: DialectName = "standard"
    matmul_activations: str

    def __init__(self, precision: Precision, block_size: int, exact: bool) -> None:
        self.precision, self.block_size, self.exact = precision, block_size, exact
        # No 4-bit Gather in either runtime, and the table is stored once: embedding and head stay at 8 bits.
        self.vocab_precision: Precision = "int8" if precision == "int4" else precision
        self.activations = "float32" if precision == "fp32" else "float16"
        # As ONNX Runtime computes it; TensorRT keeps fp16.
        self.matmul_activations = "int8" if precision in _BITS else self.activations

    @property
    def _torch_dtype(self) -> torch.dtype:
        return torch.float32 if self.precision == "fp32" else torch.float16

    def store_vector(self, file: WeightFile, name: str, vector: Tensor) -> Stored:
        """See ``Dialect``."""
        return file.add(name, vector.to(self._torch_dtype).numpy())

    def store_matrix(self, file: WeightFile, name: str, weight: Tensor) -> Matrix:
        """See ``Dialect``."""
        return self._store(file, name, weight, self.precision)

    def store_small(self, file: WeightFile, name: str, weight: Tensor) -> Matrix:
        """See ``Dialect``."""
        return self._store(file, name, weight, "fp32" if self.precision == "fp32" else "fp16")

    def store_table(self, file: WeightFile, name: str, weight: Tensor) -> Matrix:
        """See ``Dialect``."""
        return self._store(file, name, weight, self.vocab_precision)

    def _store(self, file: WeightFile, name: str, weight: Tensor, precision: Precision) -> Matrix:
        rows, columns = weight.shape
        if precision not in _BITS:
            transposed = weight.t().to(self._torch_dtype).contiguous().numpy()
            return Matrix((file.add(name, transposed),), (rows, columns))
        bits, block = _BITS[precision], block_for(columns, self.block_size)
        assert block is not None  # checked before the build
        quantized = quantize(weight, bits, block, torch.float16)
        signed = (quantized.values.short() - quantized.middle).to(torch.int8).flatten(-2)
        values = signed.t().contiguous().numpy()  # [K, N]
        if bits == 8:
            stored = file.add(f"{name}.values", values)
        else:
            stored = file.add(f"{name}.values", _packed(values), TensorProto.INT4, values.shape)
        scales = file.add(f"{name}.scales", quantized.scales.t().half().contiguous().numpy())  # [K/block, N]
        return Matrix((stored, scales), (rows, columns), bits, block)

    def linear(self, graph: Graph, name: str, source: str, matrix: Matrix, bias: Stored | None) -> str:
        """See ``Dialect``."""
        weight = graph.weight(matrix.parts[0])
        if matrix.bits is not None:
            parts = [graph.weight(part) for part in matrix.parts]
            weight = graph.one("DequantizeLinear", parts, f"{name}/weight", axis=0, block_size=matrix.block)
        product = graph.one("MatMul", [source, weight], name)
        return product if bias is None else graph.one("Add", [product, graph.weight(bias)], f"{name}/bias")

    def norm(self, graph: Graph, name: str, source: str, scale: Stored, eps: float) -> str:
        """See ``Dialect``."""
        return graph.one("RMSNormalization", [source, graph.weight(scale)], name, axis=-1, epsilon=eps)

    def first_norm(self, graph: Graph, name: str, source: str, scale: Stored, eps: float) -> str:
        """See ``Dialect``."""
        return self.norm(graph, name, source, scale, eps)

    def add_norm(
        self,
        graph: Graph,
        name: str,
        residual: str,
        delta: str,
        scale: Stored,
        eps: float,
        exposed: str | None,
    ) -> tuple[str, str]:
        """See ``Dialect``."""
        total = graph.one("Add", [residual, delta], exposed or f"{name}/sum")
        return total, self.norm(graph, name, total, scale, eps)

    def position_inputs(self, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        """See ``Dialect``."""
        return masked_inputs(spec, self.activations)

    def rows(self, spec: ModelSpec) -> RowsInfo:
        """See ``Dialect``. Folded heads keep rows together, unless there is one head a group."""
        lone = spec.num_heads == spec.num_kv_heads or (self.precision in _BITS and self.block_size > 32)
        return RowsInfo(multiple=2 if lone and self.exact else 1, spare=0, exact=self.exact)

    def attention(
        self, graph: Graph, spec: ModelSpec, name: str, cache: str, qkv: str, norms: tuple[Stored, Stored] | None
    ) -> str:
        """See ``Dialect``."""
        return folded_attention(graph, spec, name, cache, qkv, norms)

    def silu(self, graph: Graph, name: str, source: str) -> str:
        """See ``Dialect``."""
        return graph.one("Swish", [source], name)

    def embed(self, graph: Graph, table: Matrix) -> None:
        """See ``Dialect``. The table is [D, V], the head's orientation, so rows are gathered along axis 1."""
        if table.bits is None:
            columns = graph.one("Gather", [graph.weight(table.parts[0]), "token_ids"], "/columns", axis=1)  # [D, B, T]
        else:
            columns = self._gather_quantized(graph, table)
        graph.one("Transpose", [columns], "hidden", perm=[1, 2, 0])

    def _gather_quantized(self, graph: Graph, table: Matrix) -> str:
        """Columns [D, B, T] of an int8 table, dequantised after they are gathered."""
        # The scale of 1 around Gather is for TensorRT, see above. Both runtimes drop it and gather int8; with
        # the real scales ONNX Runtime would dequantise the whole table for every token. The Cast keeps it
        # from moving DequantizeLinear past Reshape, which it does wrongly.
        unit = [graph.scalar("one", 1.0, "float32"), graph.scalar("zero", 0, "int8")]
        values = graph.one("DequantizeLinear", [graph.weight(table.parts[0]), *unit], "/table")
        values = graph.one("Gather", [values, "token_ids"], "/columns", axis=1)  # [D, B, T]
        values = graph.one("QuantizeLinear", [values, *unit], "/integers")
        values = graph.one("DequantizeLinear", [values, *unit], "/integers/fp32")
        values = graph.one("Cast", [values], "/values", to=TensorProto.FLOAT16)
        scales = graph.one("Gather", [graph.weight(table.parts[1]), "token_ids"], "/scales", axis=1)
        # [D, B, T] -> [D/block, block, B·T], times scales [D/block, 1, B·T]
        block = table.block or 1
        blocks = graph.ints("shape.blocks", [table.shape[1] // block, block, -1])
        shape = graph.ints("shape.scales", [table.shape[1] // block, 1, -1])
        scales = graph.one("Reshape", [scales, shape], "/block_scales")
        scaled = graph.one("Mul", [graph.one("Reshape", [values, blocks], "/blocks"), scales], "/scaled")
        return graph.one("Reshape", [scaled, graph.one("Shape", [values], "/shape")], "/dequantized")

    def head(self, graph: Graph, source: str, table: Matrix) -> None:
        """See ``Dialect``."""
        product = self.linear(graph, "/lm_head", source, table, None)
        graph.one("Cast", [product], "logits", to=TensorProto.FLOAT)


def _packed(values: NDArray[np.int8]) -> NDArray[np.uint8]:
    """ONNX's int4: consecutive elements two a byte, low nibble first."""
    flat = values.reshape(-1).view(np.uint8) & np.uint8(15)
    return flat[::2] | (flat[1::2] << np.uint8(4))
