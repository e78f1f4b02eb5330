"""The ``ort`` dialect: fp32 activations and MatMulNBits, for speed on CPUs."""

import torch
from onnx import TensorProto
from torch import Tensor

from eexport.export.dialect import DialectName, Matrix, Precision
from eexport.export.graph import Graph, Stored, WeightFile
from eexport.export.quantize import Quantized, block_for, quantize
from eexport.models.spec import ModelSpec
from eexport.runtime.manifest import RowsInfo, TensorSpec

_MS = "com.microsoft"
_BITS = {"int8": 8, "int4": 4}
_LONE_BLOCK = {"int8": 64, "int4": 32}  # the largest block at which MatMulNBits has one kernel for any rows


class OrtDialect:
    """See ``dialect.Dialect``. Matrices keep their checkpoint orientation [N, K] at every precision."""

    name: DialectName = "ort"
    activations = "float32"

    def __init__(self, precision: Precision, vocab_precision: Precision, block_size: int, exact: bool) -> None:
        self.precision, self.vocab_precision, self.block_size = precision, vocab_precision, block_size
        self.exact = exact
        self.matmul_activations = "int8" if precision in _BITS else "float32"

    def store_vector(self, file: WeightFile, name: str, vector: Tensor) -> Stored:
        """See ``Dialect``."""
        return file.add(name, vector.float().numpy())

    def store_matrix(self, file: WeightFile, name: str, weight: Tensor) -> Matrix:
        """See ``Dialect``. MatMulNBits takes a last block that is not full."""
        return self._store(file, name, weight, self.precision, self.block_size)

    def store_small(self, file: WeightFile, name: str, weight: Tensor) -> Matrix:
        """See ``Dialect``."""
        return self._store(file, name, weight, "fp32", self.block_size)

    def store_table(self, file: WeightFile, name: str, weight: Tensor) -> Matrix:
        """See ``Dialect``. GatherBlockQuantized takes whole blocks only."""
        block = block_for(weight.shape[1], self.block_size) or 0  # 0 was refused before, unless nothing is quantised
        return self._store(file, name, weight, self.vocab_precision, block)

    def _store(self, file: WeightFile, name: str, weight: Tensor, precision: Precision, block: int) -> Matrix:
        rows, columns = weight.shape
        if precision not in _BITS:
            dtype = torch.float16 if precision == "fp16" else torch.float32
            return Matrix((file.add(name, weight.to(dtype).numpy()),), (rows, columns))
        padded = torch.nn.functional.pad(weight, (0, -columns % block))
        quantized = quantize(padded, _BITS[precision], block, torch.float32)
        values = file.add(f"{name}.values", _packed(quantized).numpy())
        scales = file.add(f"{name}.scales", quantized.scales.numpy())
        return Matrix((values, scales), (rows, columns), quantized.bits, block)

    def linear(self, graph: Graph, name: str, source: str, matrix: Matrix, bias: Stored | None) -> str:
        """See ``Dialect``."""
        if matrix.bits is None:
            weight = _as_float(graph, matrix.parts[0])
            product = graph.one("FusedMatMul", [source, weight], name, domain=_MS, transB=1)
            return product if bias is None else graph.one("Add", [product, graph.weight(bias)], f"{name}/bias")
        inputs = [source, *(graph.weight(part) for part in matrix.parts)]
        if bias is not None:
            inputs += ["", "", graph.weight(bias)]  # no zero points, no group index
        sizes = {"N": matrix.shape[0], "K": matrix.shape[1], "bits": matrix.bits, "block_size": matrix.block}
        # accuracy_level 4: int8 activations, scaled per row and block. Rows stay independent and it is the fastest.
        return graph.one("MatMulNBits", inputs, name, domain=_MS, accuracy_level=4, **sizes)

    def norm(self, graph: Graph, name: str, source: str, scale: Stored, eps: float) -> str:
        """See ``Dialect``."""
        return graph.one("SimplifiedLayerNormalization", [source, graph.weight(scale)], name, axis=-1, epsilon=eps)

    def first_norm(self, graph: Graph, name: str, source: str, scale: Stored, eps: float) -> str:
        """See ``Dialect``. The fused operator sums in another order than the plain one, so it serves here too."""
        nothing = graph.one("Sub", [source, source], f"{name}/nothing")
        return self.add_norm(graph, name, source, nothing, scale, eps, None)[1]

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

    def position_inputs(self, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        """See ``Dialect``."""
        table = ("C", spec.head_dim // 2)
        return (
            TensorSpec("cos_table", self.activations, table),
            TensorSpec("sin_table", self.activations, table),
            TensorSpec("last_index", "int32", ("B",)),
            TensorSpec("total_length", "int32", (1,)),
            TensorSpec("new_rows", "int32", ("B",)),
        )

    def rows(self, spec: ModelSpec) -> RowsInfo:
        """See ``Dialect``. GroupQueryAttention has another kernel for a lone row, MatMulNBits of larger blocks too.

        Running two rows everywhere costs 10-20% of a token, a spare row for attention alone 5%.
        """
        pairs = any(
            self.block_size > _LONE_BLOCK.get(p, self.block_size) for p in (self.precision, self.vocab_precision)
        )
        if not self.exact:
            return RowsInfo(multiple=1, spare=0, exact=False)
        return RowsInfo(multiple=2 if pairs else 1, spare=0 if pairs else 1, exact=True)

    def attention(
        self, graph: Graph, spec: ModelSpec, name: str, cache: str, qkv: str, norms: tuple[Stored, Stored] | None
    ) -> str:
        """See ``Dialect``. One node where folded attention takes fifteen: each costs 1-2 µs whatever it computes."""
        caches = [f"{cache}.key", f"{cache}.value"]
        projections = [qkv, "", ""] if norms is None else self._normed(graph, spec, name, qkv, norms)
        inputs = [*projections, *(f"past.{c}" for c in caches), "last_index", "total_length", "cos_table", "sin_table"]
        # position_ids, attention_bias, head_sink, k_scale, v_scale, q_norm_weight and k_norm_weight are not used
        inputs += [""] * 7 + ["new_rows"]
        heads = {"num_heads": spec.num_heads, "kv_num_heads": spec.num_kv_heads}
        spare = self.rows(spec).spare
        if not spare:
            outputs = [name, *(f"present.{c}" for c in caches)]
            return graph.op("GroupQueryAttention", inputs, name, outputs, domain=_MS, do_rotary=1, **heads)[0]
        pads = graph.ints("pads.rows", [0, 0, 0, 0, spare, 0])
        inputs[:3] = [part and graph.one("Pad", [part, pads], f"{part}/padded") for part in inputs[:3]]
        outputs = [f"{name}/rows", *(f"present.{c}" for c in caches)]
        rows = graph.op("GroupQueryAttention", inputs, f"{name}/rows", outputs, domain=_MS, do_rotary=1, **heads)[0]
        ends = [graph.ints("slice.first", [0]), graph.ints("slice.end", [-spare]), graph.ints("slice.axis", [1])]
        return graph.one("Slice", [rows, *ends], name)

    def _normed(self, graph: Graph, spec: ModelSpec, name: str, qkv: str, norms: tuple[Stored, Stored]) -> list[str]:
        """Query, key and value [B, T, heads·Hd] with QK-norm, which GroupQueryAttention itself lacks on CPUs."""
        widths = [heads * spec.head_dim for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]
        parts = [f"{name}/{kind}" for kind in "qkv"]
        graph.op("Split", [qkv, graph.ints("split.q_k_v", widths)], f"{name}/split", parts, axis=-1)
        normed = []
        for part, width, scale in zip(parts, widths, norms, strict=False):
            # [B, T, heads·Hd] -> [B, T, heads, Hd] and back
            heads = graph.one("Reshape", [part, graph.ints("shape.heads", [0, 0, -1, spec.head_dim])], f"{part}/heads")
            heads = self.norm(graph, f"{part}_norm", heads, scale, spec.rms_norm_eps)
            normed.append(graph.one("Reshape", [heads, graph.ints(f"shape.{width}", [0, 0, width])], f"{part}/flat"))
        return [*normed, parts[2]]

    def silu(self, graph: Graph, name: str, source: str) -> str:
        """See ``Dialect``."""
        return graph.one("QuickGelu", [source], name, domain=_MS, alpha=1.0)

    def embed(self, graph: Graph, table: Matrix) -> None:
        """See ``Dialect``."""
        if table.bits is None:
            rows = graph.one("Gather", [graph.weight(table.parts[0]), "token_ids"], "/rows", axis=0)
            graph.one("Cast", [rows], "hidden", to=TensorProto.FLOAT)
            return
        flat = table.parts[0].viewed((table.shape[0], table.shape[1] * table.bits // 8))
        inputs = [graph.weight(flat), "token_ids", graph.weight(table.parts[1])]
        form = {"block_size": table.block, "bits": table.bits}
        graph.one("GatherBlockQuantized", inputs, "hidden", domain=_MS, gather_axis=0, quantize_axis=1, **form)

    def head(self, graph: Graph, source: str, table: Matrix) -> None:
        """See ``Dialect``."""
        self.linear(graph, "logits", source, table, None)


def _as_float(graph: Graph, stored: Stored) -> str:
    """The stored matrix in fp32; fp16 is widened once, when the graph is loaded."""
    weight = graph.weight(stored)
    return (
        weight
        if stored.onnx_type == TensorProto.FLOAT
        else graph.one("Cast", [weight], f"{weight}/fp32", to=TensorProto.FLOAT)
    )


def _packed(quantized: Quantized) -> Tensor:
    """MatMulNBits' layout: [N, K/block, block] bytes for 8 bits, half as many for 4, low nibble first."""
    values = quantized.values
    return values if quantized.bits == 8 else values[..., ::2] | (values[..., 1::2] << 4)
