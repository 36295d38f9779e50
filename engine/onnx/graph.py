"""A builder of ONNX graphs that adds node by node and streams large weights to a data file.

Values are named after their place in the model (`layers.3/attention/MatMul_12`), weights as in the checkpoint. Weights
are written when they are requested, one tensor at a time, so the model is never completely in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from engine.checkpoint.kinds import ONNX_NAME
from engine.files.json_file import writing
from engine.onnx.runtime import DATA_NAME

STANDARD_OPSET = 17
MICROSOFT = "com.microsoft"
"""Domain of the operators that onnxruntime adds to the standard ones."""
ALIGNMENT = 4096
"""Alignment of each weight in the data file, in bytes, so that weights can be used memory-mapped."""
ELEMENT_TYPES: dict[torch.dtype, int] = {
    torch.float32: TensorProto.FLOAT,
    torch.float16: TensorProto.FLOAT16,
    torch.uint8: TensorProto.UINT8,
    torch.int32: TensorProto.INT32,
    torch.int64: TensorProto.INT64,
    torch.bool: TensorProto.BOOL,
}
BOOL, FLOAT, INT32, INT64 = TensorProto.BOOL, TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64

Shape = Sequence[int | str]
"""Shape of an input or output; a string names a dynamic dimension."""


class Graph:
    """A graph under construction. `node` returns the name of the node's output, as an input for other nodes."""

    def __init__(self, directory: Path, data: BinaryIO, dtype: torch.dtype, beside: Graph | None = None) -> None:
        """`dtype`: dtype of weights and activations. `data`: a file in `directory`, open for writing.

        `beside`: a graph with the same data file, whose weights this graph shares by name.
        """
        self.directory, self.dtype = directory, dtype
        self.element_type = ELEMENT_TYPES[dtype]
        self._data = data
        self._written: dict[str, onnx.TensorProto] = {} if beside is None else beside._written
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, onnx.TensorProto] = {}
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._scope = ""
        self._count = 0
        self.weights_bytes = 0
        """Bytes of the weights in the data file, without padding."""

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Add a prefix to the names of values created in the body."""
        before, self._scope = self._scope, f"{self._scope}{name}/"
        try:
            yield
        finally:
            self._scope = before

    def input(self, name: str, element_type: int, shape: Shape) -> str:
        """Add an input of the graph."""
        self._inputs.append(helper.make_tensor_value_info(name, element_type, shape))
        return name

    def optional_input(self, name: str, value: npt.NDArray[Any]) -> str:
        """Add an input with `value` as default."""
        self._initializers[name] = numpy_helper.from_array(value, name)
        return self.input(name, self._initializers[name].data_type, value.shape)

    def output(self, name: str, element_type: int, shape: Shape) -> None:
        """Declare a value as an output of the graph; a node must have this output name."""
        self._outputs.append(helper.make_tensor_value_info(name, element_type, shape))

    def node(self, operator: str, *inputs: str, name: str = "", domain: str = "", **attributes: Any) -> str:
        """Add a node with one output, called `name` if given; an empty input name leaves an optional input out."""
        return self.nodes(operator, *inputs, outputs=[name], domain=domain, **attributes)[0]

    def nodes(self, operator: str, *inputs: str, outputs: Sequence[str], domain: str = "", **attributes: Any) -> list[str]:
        """Add a node with several outputs; an empty output name is replaced by a generated one."""
        own = f"{self._scope}{operator}_{self._count}"
        self._count += 1
        names = [name or (f"{own}.{index}" if index else own) for index, name in enumerate(outputs)]
        self._nodes.append(helper.make_node(operator, inputs, names, name=own, domain=domain, **attributes))
        return names

    def either(self, condition: str, then: Callable[[], list[str]], otherwise: Callable[[], list[str]]) -> list[str]:
        """Return the outputs of `then` if the boolean scalar `condition` holds, else of `otherwise`; one is computed."""
        branches = {"then_branch": self._branch("then", then), "else_branch": self._branch("else", otherwise)}
        return self.nodes("If", condition, outputs=[""] * len(branches["then_branch"].output), **branches)

    def _branch(self, name: str, make: Callable[[], list[str]]) -> onnx.GraphProto:
        """Return the nodes that `make` adds as a subgraph, which can read values and weights of the outer graph."""
        outside, self._nodes = self._nodes, []
        results = [onnx.ValueInfoProto(name=result) for result in make()]
        branch = helper.make_graph(self._nodes, f"{name}_{self._count}", [], results)
        self._nodes = outside
        return branch

    def size(self, tensor: str, dimension: int) -> str:
        """Return a dimension of a tensor as an int64 vector of length one."""
        return self.node("Gather", self.node("Shape", tensor), self.integers(dimension))

    def range(self, end_1: str) -> str:
        """Return 0, 1, … below the value of a vector of length one."""
        return self.node("Range", self.integer(0), self.node("Squeeze", end_1), self.integer(1))

    def integers(self, *values: int) -> str:
        """Return a constant int64 vector."""
        return self.constant(np.array(values, dtype=np.int64))

    def integer(self, value: int) -> str:
        """Return a constant int64 scalar."""
        return self.constant(np.array(value, dtype=np.int64))

    def number(self, value: float) -> str:
        """Return a constant scalar in the graph's dtype."""
        return self.constant(np.array(value, dtype=self.numpy_dtype))

    @property
    def numpy_dtype(self) -> npt.DTypeLike:
        """`dtype` as a NumPy dtype."""
        return np.float16 if self.dtype == torch.float16 else np.float32

    def constant(self, value: npt.NDArray[Any]) -> str:
        """Return a small constant that is stored in the graph itself; equal constants are stored once."""
        key = (value.dtype.str, value.shape, value.tobytes())
        if key not in self._constants:
            name = f"constant_{len(self._constants)}"
            self._initializers[name] = numpy_helper.from_array(value, name)
            self._constants[key] = name
        return self._constants[key]

    def weight(self, name: str, make: Callable[[], Tensor]) -> str:
        """Return a tensor in the data file; `make` creates it unless the name exists already."""
        if name in self._written:
            self._initializers[name] = self._written[name]
        else:
            tensor = make()
            self.weight_of_parts(name, tensor.dtype, tuple(tensor.shape), [tensor])
        return name

    def weight_of_parts(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], parts: Iterable[Tensor]) -> str:
        """Write a tensor to the data file from consecutive parts of its elements."""
        with writing(self.directory / DATA_NAME, f"weight {name}"):
            offset = self._data.tell() + -self._data.tell() % ALIGNMENT
            self._data.seek(offset)
            for part in parts:
                assert part.dtype == dtype, f"{name}: {part.dtype}, not {dtype}"
                self._data.write(part.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
            length = self._data.tell() - offset
        assert length == math.prod(shape) * dtype.itemsize, f"{name}: {length} bytes for {shape}"
        proto = TensorProto(name=name, data_type=ELEMENT_TYPES[dtype], dims=shape, data_location=TensorProto.EXTERNAL)
        for key, value in (("location", DATA_NAME), ("offset", offset), ("length", length)):
            proto.external_data.add(key=key, value=str(value))
        self._initializers[name] = self._written[name] = proto
        self.weights_bytes += length
        return name

    def reshaped(self, name: str, weight: str, shape: tuple[int, ...]) -> str:
        """Return a tensor of another shape that uses the bytes of an existing weight."""
        proto = TensorProto()
        proto.CopyFrom(self._initializers[weight])
        proto.name = name
        proto.dims[:] = shape
        self._initializers[name] = proto
        return name

    def save(self, name: str, metadata: dict[str, str], file_name: str = ONNX_NAME) -> None:
        """Write the graph after all weights are in the data file. `metadata`: properties for the loader."""
        graph = helper.make_graph(self._nodes, name, self._inputs, self._outputs, list(self._initializers.values()))
        domains = sorted({node.domain for node in self._nodes})
        versions = [helper.make_opsetid(domain, 1 if domain else STANDARD_OPSET) for domain in domains]
        model = helper.make_model(graph, opset_imports=versions, ir_version=8, producer_name="moe-compress")
        helper.set_model_props(model, metadata)
        path = self.directory / file_name
        with writing(path, "the ONNX graph"):
            path.write_bytes(model.SerializeToString())
