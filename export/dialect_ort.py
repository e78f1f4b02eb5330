"""The ``ort`` dialect: fp32 activations and MatMulNBits, for speed on CPUs."""

import torch
from onnx import TensorProto
from torch import Tensor

from eexport.export.dialect import DialectName, Precision
from eexport.export.graph import Graph, Stored, WeightFile
from eexport.export.quantize import BLOCK, Quantized, quantize

_MS = "com.microsoft"
_BITS = {"int8": 8, "int4": 4}


class OrtDialect:
    """See ``dialect.Dialect``. Matrices keep their checkpoint orientation [N, K] at every precision."""

    name: DialectName = "ort"
    activations = "float32"

    def __init__(self, precision: Precision, vocab_precision: Precision) -> None:
        self.precision, self.vocab_precision = precision, vocab_precision
        self.matmul_activations = "int8" if precision in _BITS else "float32"

    def store_vector(self, file: WeightFile, name: str, vector: Tensor) -> Stored:
        """See ``Dialect``."""
        return file.add(name, vector.float().numpy())

    def store_matrix(self, file: WeightFile, name: str, weight: Tensor) -> tuple[Stored, ...]:
        """See ``Dialect``."""
        return self._store(file, name, weight, self.precision)

    def store_table(self, file: WeightFile, name: str, weight: Tensor) -> tuple[Stored, ...]:
        """See ``Dialect``."""
        return self._store(file, name, weight, self.vocab_precision)

    def _store(self, file: WeightFile, name: str, weight: Tensor, precision: Precision) -> tuple[Stored, ...]:
        if precision not in _BITS:
            dtype = torch.float16 if precision == "fp16" else torch.float32
            return (file.add(name, weight.to(dtype).numpy()),)
        quantized = quantize(weight, _BITS[precision], torch.float32)
        stored = [
            file.add(f"{name}.values", _packed(quantized).numpy()),
            file.add(f"{name}.scales", quantized.scales.numpy()),
        ]
        if quantized.zeros is not None:
            stored.append(file.add(f"{name}.zeros", _nibbles(quantized.zeros).numpy()))
        return tuple(stored)

    def linear(self, graph: Graph, name: str, source: str, matrix: tuple[Stored, ...], bias: Stored | None) -> str:
        """See ``Dialect``."""
        if len(matrix) == 1:
            weight = _as_float(graph, matrix[0])
            product = graph.one("FusedMatMul", [source, weight], name, domain=_MS, transB=1)
            return product if bias is None else graph.one("Add", [product, graph.weight(bias)], f"{name}/bias")
        rows, blocks, packed = matrix[0].shape
        inputs = [source, *(graph.weight(part) for part in matrix)]
        if bias is not None:
            inputs += [""] * (5 - len(inputs)) + [graph.weight(bias)]
        sizes = {"N": rows, "K": blocks * BLOCK, "bits": packed * 8 // BLOCK, "block_size": BLOCK}
        # accuracy_level 4: int8 activations, scaled per row and block. Rows stay independent and it is the fastest.
        return graph.one("MatMulNBits", inputs, name, domain=_MS, accuracy_level=4, **sizes)

    def norm(self, graph: Graph, name: str, source: str, scale: Stored, eps: float) -> str:
        """See ``Dialect``."""
        return graph.one("SimplifiedLayerNormalization", [source, graph.weight(scale)], name, axis=-1, epsilon=eps)

    def add_norm(
        self, graph: Graph, name: str, residual: str, delta: str, scale: Stored, eps: float, exposed: str | None
    ) -> tuple[str, str]:
        """See ``Dialect``."""
        normed, _, _, total = graph.op(
            "SkipSimplifiedLayerNormalization",
            [residual, delta, graph.weight(scale)],
            name,
            [name, "", "", exposed or f"{name}/sum"],
            domain=_MS,
            epsilon=eps,
        )
        return total, normed

    def attention(self, graph: Graph, name: str, query: str, key: str, value: str, mask: str, scale: float) -> str:
        """See ``Dialect``. Two products and a softmax beat the Attention operator here from 200 positions on."""
        scores = graph.one("FusedMatMul", [query, key], f"{name}/scores", domain=_MS, transB=1, alpha=scale)
        masked = graph.one("Add", [scores, mask], f"{name}/masked")
        weights = graph.one("Softmax", [masked], f"{name}/softmax", axis=-1)
        return graph.one("MatMul", [weights, value], f"{name}/mix")

    def swiglu(self, graph: Graph, name: str, both: str, inner: int) -> str:
        """See ``Dialect``."""
        sizes = graph.ints("split.gate_up", [inner, inner])
        gate, up = graph.op("Split", [both, sizes], f"{name}/split", [f"{name}/gate", f"{name}/up"], axis=-1)
        silu = graph.one("QuickGelu", [gate], f"{name}/silu", domain=_MS, alpha=1.0)
        return graph.one("Mul", [silu, up], f"{name}/gated")

    def embed(self, graph: Graph, table: tuple[Stored, ...], width: int) -> None:
        """See ``Dialect``."""
        if len(table) == 1:
            rows = graph.one("Gather", [graph.weight(table[0]), "token_ids"], "/rows", axis=0)
            graph.one("Cast", [rows], "hidden", to=TensorProto.FLOAT)
            return
        rows_count, blocks, packed = table[0].shape
        flat = (table[0].viewed((rows_count, blocks * packed)), *table[1:])
        inputs = [graph.weight(flat[0]), "token_ids", *(graph.weight(part) for part in flat[1:])]
        graph.one(
            "GatherBlockQuantized", inputs, "hidden", domain=_MS, gather_axis=0, quantize_axis=1, block_size=BLOCK, bits=packed * 8 // BLOCK
        )

    def head(self, graph: Graph, source: str, table: tuple[Stored, ...]) -> None:
        """See ``Dialect``."""
        self.linear(graph, "logits", source, table, None)


def _as_float(graph: Graph, stored: Stored) -> str:
    """The stored matrix in fp32; fp16 is widened once, when the graph is loaded."""
    weight = graph.weight(stored)
    return weight if stored.onnx_type == TensorProto.FLOAT else graph.one("Cast", [weight], f"{weight}/fp32", to=TensorProto.FLOAT)


def _packed(quantized: Quantized) -> Tensor:
    """MatMulNBits' layout: [N, K/32, 32] bytes for 8 bits, [N, K/32, 16] for 4, low nibble first."""
    blocks = quantized.values.unflatten(-1, (-1, BLOCK))
    return blocks if quantized.bits == 8 else _nibbles(blocks)


def _nibbles(values: Tensor) -> Tensor:
    """Two 4-bit values a byte along the last axis, low nibble first; an odd end is padded with zero."""
    if values.shape[-1] % 2:
        values = torch.nn.functional.pad(values, (0, 1))
    return values[..., ::2] | (values[..., 1::2] << 4)
