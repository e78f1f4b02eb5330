"""Writing ONNX: nodes named by path, and weights in a side file that several graphs may share.

Weights never enter the protobuf, so its 2 GB limit is met by no model and a build holds one tensor at a time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from eexport.runtime.manifest import StageSpec, TensorSpec

IR_VERSION = 11
OPSET = 24
_PAGE = 4096  # weights start on pages, so that a runtime can map them as they lie

_ONNX_TYPES = {
    "float32": onnx.TensorProto.FLOAT,
    "float16": onnx.TensorProto.FLOAT16,
    "int64": onnx.TensorProto.INT64,
    "int32": onnx.TensorProto.INT32,
    "int8": onnx.TensorProto.INT8,
    "uint8": onnx.TensorProto.UINT8,
}


@dataclass(frozen=True)
class Stored:
    """A tensor in a weight file; any graph beside the file may refer to it."""

    name: str
    onnx_type: int
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int

    def viewed(self, shape: tuple[int, ...]) -> "Stored":
        """The same bytes under another shape."""
        return Stored(self.name, self.onnx_type, shape, self.file, self.offset, self.length)


class WeightFile:
    """Appends tensors to one file."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        self._stream: BinaryIO = path.open("xb")

    def add(
        self, name: str, array: NDArray[np.generic], onnx_type: int | None = None, shape: Sequence[int] = ()
    ) -> Stored:
        """Write ``array``; ``onnx_type`` and ``shape`` are given for types numpy lacks, such as packed uint4."""
        self._stream.write(bytes(-self._stream.tell() % _PAGE))
        offset = self._stream.tell()
        data = np.ascontiguousarray(array)
        self._stream.write(data.data)
        kind = _ONNX_TYPES[data.dtype.name] if onnx_type is None else onnx_type
        return Stored(name, kind, tuple(shape) or data.shape, self._name, offset, data.nbytes)

    def close(self) -> None:
        """Flush and close; every ``Stored`` stays valid."""
        self._stream.close()


class Graph:
    """One stage being written."""

    def __init__(self, stage: StageSpec) -> None:
        self.stage = stage
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, onnx.TensorProto] = {}
        self._made: dict[str, str] = {}

    def op(
        self,
        kind: str,
        inputs: Sequence[str],
        name: str,
        outputs: Sequence[str],
        *,
        domain: str = "",
        **attributes: object,
    ) -> list[str]:
        """Append a node called ``name`` with outputs of these names ("" for one that is not wanted)."""
        self._nodes.append(helper.make_node(kind, list(inputs), list(outputs), name=name, domain=domain, **attributes))
        return list(outputs)

    def one(self, kind: str, inputs: Sequence[str], name: str, *, domain: str = "", **attributes: object) -> str:
        """A node of one output, which is called as the node is."""
        return self.op(kind, inputs, name, [name], domain=domain, **attributes)[0]

    def once(self, name: str, make: Callable[[], str]) -> str:
        """The value that ``make`` gives, made at the first call with this name and shared by later ones."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def ints(self, name: str, values: Sequence[int]) -> str:
        """A small int64 constant, e.g. a shape; the same name is emitted once."""
        if name not in self._initializers:
            self._initializers[name] = helper.make_tensor(name, onnx.TensorProto.INT64, [len(values)], list(values))
        return name

    def scalar(self, name: str, value: float, dtype: str) -> str:
        """A scalar constant."""
        if name not in self._initializers:
            self._initializers[name] = helper.make_tensor(name, _ONNX_TYPES[dtype], [], [value])
        return name

    def weight(self, stored: Stored) -> str:
        """Refer to a tensor of a weight file."""
        if stored.name not in self._initializers:
            tensor = onnx.TensorProto(name=stored.name, data_type=stored.onnx_type, dims=stored.shape)
            tensor.data_location = onnx.TensorProto.EXTERNAL
            fields: Mapping[str, object] = {"location": stored.file, "offset": stored.offset, "length": stored.length}
            for key, value in fields.items():
                tensor.external_data.add(key=key, value=str(value))
            self._initializers[stored.name] = tensor
        return stored.name

    def save(self, folder: Path) -> None:
        """Write the graph under the name that its stage records."""
        graph = helper.make_graph(
            self._nodes,
            self.stage.name,
            [_value(t) for t in self.stage.inputs],
            [_value(t) for t in self.stage.outputs],
            list(self._initializers.values()),
        )
        domains = {node.domain for node in self._nodes} - {""}
        opsets = [helper.make_opsetid("", OPSET), *(helper.make_opsetid(domain, 1) for domain in sorted(domains))]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="eexport")
        (folder / self.stage.graph).write_bytes(model.SerializeToString())


def _value(spec: TensorSpec) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(spec.name, _ONNX_TYPES[spec.dtype], spec.shape)
