"""The ``standard`` dialect: ONNX opset 24 only, read by ONNX Runtime and by TensorRT.

Activations are fp16 unless the weights are fp32. Quantised weights are DequantizeLinear (blocks of 32 along K, fp16
scales) before a plain MatMul: TensorRT fuses the pair, ONNX Runtime turns it into MatMulNBits.
"""

import numpy as np
import onnx
import torch
from onnx import TensorProto
from torch import Tensor

from eexport.export.dialect import DialectName, Precision
from eexport.export.graph import Graph, Stored, WeightFile
from eexport.export.quantize import BLOCK, quantize

_BITS = {"int8": 8, "int4": 4}


class StandardDialect:
    """See ``dialect.Dialect``. Matrices are stored transposed, [K, N], as MatMul reads them."""

    name: DialectName = "standard"
    matmul_activations: str

    def __init__(self, precision: Precision) -> None:
        self.precision = precision
        # No 4-bit Gather in either runtime, and the table is stored once: embedding and head stay at 8 bits.
        self.vocab_precision: Precision = "int8" if precision == "int4" else precision
        self.activations = "float32" if precision == "fp32" else "float16"
        self.matmul_activations = self.activations

    @property
    def _torch_dtype(self) -> torch.dtype:
        return torch.float32 if self.precision == "fp32" else torch.float16

    def store_vector(self, file: WeightFile, name: str, vector: Tensor) -> Stored:
        """See ``Dialect``."""
        return file.add(name, vector.to(self._torch_dtype).numpy())

    def store_matrix(self, file: WeightFile, name: str, weight: Tensor) -> tuple[Stored, ...]:
        """See ``Dialect``."""
        return self._store(file, name, weight, self.precision)

    def store_table(self, file: WeightFile, name: str, weight: Tensor) -> tuple[Stored, ...]:
        """See ``Dialect``."""
        return self._store(file, name, weight, self.vocab_precision)

    def _store(self, file: WeightFile, name: str, weight: Tensor, precision: Precision) -> tuple[Stored, ...]:
        if precision not in _BITS:
            return (file.add(name, weight.t().to(self._torch_dtype).contiguous().numpy()),)
        quantized = quantize(weight, _BITS[precision], torch.float16)
        scales = quantized.scales.t().half().contiguous().numpy()  # [K/32, N]
        values = quantized.values.t().contiguous().numpy()  # [K, N]
        if quantized.zeros is None:
            signed = (values.astype(np.int16) - 128).astype(np.int8)
            return (file.add(f"{name}.values", signed), file.add(f"{name}.scales", scales))
        zeros = quantized.zeros.t().contiguous().numpy()
        return (
            file.add(f"{name}.values", _packed(values), TensorProto.UINT4, values.shape),
            file.add(f"{name}.scales", scales),
            file.add(f"{name}.zeros", _packed(zeros), TensorProto.UINT4, zeros.shape),
        )

    def linear(self, graph: Graph, name: str, source: str, matrix: tuple[Stored, ...], bias: Stored | None) -> str:
        """See ``Dialect``."""
        weight = graph.weight(matrix[0])
        if len(matrix) > 1:
            parts = [graph.weight(part) for part in matrix]
            weight = graph.one("DequantizeLinear", parts, f"{name}/weight", axis=0, block_size=BLOCK)
        product = graph.one("MatMul", [source, weight], name)
        return product if bias is None else graph.one("Add", [product, graph.weight(bias)], f"{name}/bias")

    def norm(self, graph: Graph, name: str, source: str, scale: Stored, eps: float) -> str:
        """See ``Dialect``."""
        return graph.one("RMSNormalization", [source, graph.weight(scale)], name, axis=-1, epsilon=eps)

    def add_norm(
        self, graph: Graph, name: str, residual: str, delta: str, scale: Stored, eps: float, exposed: str | None
    ) -> tuple[str, str]:
        """See ``Dialect``."""
        total = graph.one("Add", [residual, delta], exposed or f"{name}/sum")
        return total, self.norm(graph, name, total, scale, eps)

    def attention(self, graph: Graph, name: str, query: str, key: str, value: str, mask: str, scale: float) -> str:
        """See ``Dialect``."""
        return graph.one("Attention", [query, key, value, mask], name, scale=scale)

    def swiglu(self, graph: Graph, name: str, both: str, inner: int) -> str:
        """See ``Dialect``."""
        sizes = graph.ints("split.gate_up", [inner, inner])
        gate, up = graph.op("Split", [both, sizes], f"{name}/split", [f"{name}/gate", f"{name}/up"], axis=-1)
        return graph.one("Mul", [graph.one("Swish", [gate], f"{name}/silu"), up], f"{name}/gated")

    def embed(self, graph: Graph, table: tuple[Stored, ...], width: int) -> None:
        """See ``Dialect``. The table is [D, V], the head's orientation, so rows are gathered along axis 1."""
        columns = graph.one("Gather", [graph.weight(table[0]), "token_ids"], "/columns", axis=1)  # [D, B, T]
        if len(table) > 1:
            # [D, B, T] -> [D/32, 32, B·T], times scales [D/32, 1, B·T]
            scales = graph.one("Gather", [graph.weight(table[1]), "token_ids"], "/scales", axis=1)
            shape = graph.ints("shape.blocks", [width // BLOCK, BLOCK, -1])
            values = graph.one("Reshape", [columns, shape], "/blocks")
            values = graph.one("Cast", [values], "/values", to=_onnx_type(self.activations))
            scales = graph.one("Reshape", [scales, graph.ints("shape.scales", [width // BLOCK, 1, -1])], "/block_scales")
            product = graph.one("Mul", [values, scales], "/scaled")
            ends = [graph.ints("ints.first", [1]), graph.ints("ints.end", [2**62]), graph.ints("ints.axis", [0])]
            rows = graph.one("Slice", [graph.one("Shape", [columns], "/shape"), *ends], "/rows_shape")
            whole = graph.one("Concat", [graph.ints("ints.width", [width]), rows], "/whole_shape", axis=0)
            columns = graph.one("Reshape", [product, whole], "/dequantized")
        graph.one("Transpose", [columns], "hidden", perm=[1, 2, 0])

    def head(self, graph: Graph, source: str, table: tuple[Stored, ...]) -> None:
        """See ``Dialect``."""
        product = self.linear(graph, "/lm_head", source, table, None)
        graph.one("Cast", [product], "logits", to=TensorProto.FLOAT)


def _onnx_type(dtype: str) -> int:
    return int(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def _packed(values: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """ONNX's uint4: consecutive elements two a byte, low nibble first."""
    flat = values.reshape(-1)
    if flat.size % 2:
        flat = np.append(flat, np.uint8(0))
    return flat[::2] | (flat[1::2] << 4)
