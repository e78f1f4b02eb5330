"""The ``ort`` dialect: fp32 activations and MatMulNBits, for speed on CPUs."""

import torch
from onnx import TensorProto
from torch import Tensor

from eexport.export.dialect import DialectName, Precision
from eexport.export.graph import Graph, Stored, WeightFile
from eexport.export.quantize import Quantized, quantize
from eexport.models.spec import ModelSpec
from eexport.runtime.manifest import TensorSpec

_MS = "com.microsoft"
_BITS = {"int8": 8, "int4": 4}


class OrtDialect:
    """See ``dialect.Dialect``. Matrices keep their checkpoint orientation [N, K] at every precision."""

    name: DialectName = "ort"
    activations = "float32"

    def __init__(self, precision: Precision, vocab_precision: Precision, block_size: int) -> None:
        self.precision, self.vocab_precision, self.block_size = precision, vocab_precision, block_size
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
        quantized = quantize(weight, _BITS[precision], self.block_size, torch.float32)
        values = file.add(f"{name}.values", _packed(quantized).numpy())
        return values, file.add(f"{name}.scales", quantized.scales.numpy())

    def linear(self, graph: Graph, name: str, source: str, matrix: tuple[Stored, ...], bias: Stored | None) -> str:
        """See ``Dialect``."""
        if len(matrix) == 1:
            weight = _as_float(graph, matrix[0])
            product = graph.one("FusedMatMul", [source, weight], name, domain=_MS, transB=1)
            return product if bias is None else graph.one("Add", [product, graph.weight(bias)], f"{name}/bias")
        inputs = [source, *(graph.weight(part) for part in matrix)]
        if bias is not None:
            inputs += ["", "", graph.weight(bias)]  # no zero points, no group index
        # accuracy_level 4: int8 activations, scaled per row and block. Rows stay independent and it is the fastest.
        return graph.one("MatMulNBits", inputs, name, domain=_MS, accuracy_level=4, **self._sizes(matrix[0]))

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

    def row_multiple(self, spec: ModelSpec) -> int:
        """See ``Dialect``. GroupQueryAttention and MatMulNBits of larger blocks compute a lone row by another kernel."""
        return 2

    def attention(
        self, graph: Graph, spec: ModelSpec, name: str, layer: int, qkv: str, norms: tuple[Stored, Stored] | None
    ) -> str:
        """See ``Dialect``. One node where folded attention takes fifteen: each costs 1-2 µs whatever it computes."""
        caches = [f"{layer}.key", f"{layer}.value"]
        inputs = [qkv, "", "", *(f"past.{c}" for c in caches), "last_index", "total_length", "cos_table", "sin_table"]
        scales = ["", ""] if norms is None else [graph.weight(scale) for scale in norms]
        # position_ids, attention_bias, head_sink, k_scale and v_scale are not used
        inputs += [""] * 5 + [*scales, "new_rows"]
        attributes = {} if norms is None else {"qk_norm_epsilon": spec.rms_norm_eps}
        outputs = [name, *(f"present.{c}" for c in caches)]
        heads = {"num_heads": spec.num_heads, "kv_num_heads": spec.num_kv_heads}
        return graph.op("GroupQueryAttention", inputs, name, outputs, domain=_MS, do_rotary=1, **heads, **attributes)[0]

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
        sizes = self._sizes(table[0])
        flat = table[0].viewed((sizes["N"], sizes["K"] * sizes["bits"] // 8))
        inputs = [graph.weight(flat), "token_ids", graph.weight(table[1])]
        form = {"block_size": sizes["block_size"], "bits": sizes["bits"]}
        graph.one("GatherBlockQuantized", inputs, "hidden", domain=_MS, gather_axis=0, quantize_axis=1, **form)

    def head(self, graph: Graph, source: str, table: tuple[Stored, ...]) -> None:
        """See ``Dialect``."""
        self.linear(graph, "logits", source, table, None)

    def _sizes(self, values: Stored) -> dict[str, int]:
        """Attributes of MatMulNBits, read off the packed integers [N, K/block, bytes]."""
        rows, blocks, packed = values.shape
        bits = packed * 8 // self.block_size
        return {"N": rows, "K": blocks * self.block_size, "bits": bits, "block_size": self.block_size}


def _as_float(graph: Graph, stored: Stored) -> str:
    """The stored matrix in fp32; fp16 is widened once, when the graph is loaded."""
    weight = graph.weight(stored)
    return weight if stored.onnx_type == TensorProto.FLOAT else graph.one("Cast", [weight], f"{weight}/fp32", to=TensorProto.FLOAT)


def _packed(quantized: Quantized) -> Tensor:
    """MatMulNBits' layout: [N, K/block, block] bytes for 8 bits, half as many for 4, low nibble first."""
    values = quantized.values
    return values if quantized.bits == 8 else values[..., ::2] | (values[..., 1::2] << 4)
