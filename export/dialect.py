"""What differs between the two ways of writing the same decoder.

``ort`` uses ONNX Runtime's own operators for speed on CPUs, ``standard`` only what ONNX opset 24 defines, which both
ONNX Runtime and TensorRT read.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from eexport.export.graph import Graph, Stored, WeightFile
from eexport.models.spec import ModelSpec
from eexport.runtime.manifest import RowsInfo, TensorSpec

DialectName = Literal["ort", "standard"]
Precision = Literal["fp32", "fp16", "int8", "int4"]


@dataclass(frozen=True)
class Matrix:
    """A stored matrix [N, K]: its tensors and, when it is quantised, its bits and block size."""

    parts: tuple[Stored, ...]
    shape: tuple[int, int]
    bits: int | None = None
    block: int | None = None


class Dialect(Protocol):
    """Stores weights in the form its nodes want, and writes the nodes."""

    name: DialectName
    activations: str
    """dtype of everything that flows between nodes and stages."""
    vocab_precision: Precision
    """precision of embedding and head."""
    matmul_activations: str
    """dtype that a matrix product sees its activations in, recorded because it decides tokens."""

    def store_vector(self, file: WeightFile, name: str, vector: Tensor) -> Stored:
        """Store a norm's scale or a bias."""
        ...

    def store_matrix(self, file: WeightFile, name: str, weight: Tensor) -> Matrix:
        """Store a matrix [N, K] of a layer."""
        ...

    def store_small(self, file: WeightFile, name: str, weight: Tensor) -> Matrix:
        """Store a matrix [N, K] that is not worth quantising, in the dtype of the activations."""
        ...

    def store_table(self, file: WeightFile, name: str, weight: Tensor) -> Matrix:
        """Store an embedding or head [V, D], in a form that serves as both."""
        ...

    def linear(self, graph: Graph, name: str, source: str, matrix: Matrix, bias: Stored | None) -> str:
        """``source`` [B, T, K] times the transposed matrix, plus the bias."""
        ...

    def norm(self, graph: Graph, name: str, source: str, scale: Stored, eps: float) -> str:
        """RMSNorm over the last axis."""
        ...

    def first_norm(self, graph: Graph, name: str, source: str, scale: Stored, eps: float) -> str:
        """RMSNorm of a block's input, with the bits that ``add_norm`` gives it where no block begins."""
        ...

    def add_norm(
        self, graph: Graph, name: str, residual: str, delta: str, scale: Stored, eps: float, exposed: str | None
    ) -> tuple[str, str]:
        """The sum of both, called ``exposed`` if that is given, and its RMSNorm."""
        ...

    def position_inputs(self, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        """What a block needs to know of where its rows stand, besides the caches."""
        ...

    def rows(self, spec: ModelSpec) -> RowsInfo:
        """How rows must be run for a row's bits not to depend on how many there are."""
        ...

    def attention(
        self, graph: Graph, spec: ModelSpec, name: str, cache: str, qkv: str, norms: tuple[Stored, Stored] | None
    ) -> str:
        """From projections [B, T, (H+2·KvH)·Hd] to mixed values [B, T, H·Hd].

        Adds positions and updates the caches ``past.{cache}.*``; ``norms`` are the scales of a QK-norm.
        """
        ...

    def silu(self, graph: Graph, name: str, source: str) -> str:
        """The SiLU of ``source``."""
        ...

    def embed(self, graph: Graph, table: Matrix) -> None:
        """Nodes from ``token_ids`` to ``hidden``."""
        ...

    def head(self, graph: Graph, source: str, table: Matrix) -> None:
        """Nodes from normalised hidden states to ``logits``."""
        ...
