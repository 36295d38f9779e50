"""Norms, linear layers and dense feed-forward networks as ONNX nodes.

Standard operators in patterns that onnxruntime fuses when it loads a graph.

Shape suffixes: D inputs, O outputs, F width of the feed-forward network, R rows: tokens of any sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch import Tensor

from engine.architectures import ClampedSwiglu, DecoderConfig
from engine.onnx_graph import FLOAT, MICROSOFT, Graph
from engine.onnx_quantise import Packing, block_size, quantise

Source = Callable[[str], Tensor]
"""Gives the checkpoint's tensors by name, in the graph's dtype."""


ROUNDED_ACTIVATIONS = 4
"""accuracy_level of block-wise products: activations in 8 bits, so that the processor multiplies integers."""


class Packed(NamedTuple):
    """A weight [O, D] in few bits: names of its values and scales, and its sizes."""

    values: str
    scales: str
    bits: int
    block: int
    outputs: int
    inputs: int


@dataclass(frozen=True)
class Parts:
    """Where nodes go, and what they are made from."""

    graph: Graph
    source: Source
    config: DecoderConfig
    portable: bool
    """Standard operators only."""
    bits: int | None = None
    """Of the weights of products; None where they are of the graph's dtype."""
    packings: dict[str, Packing] = field(default_factory=dict)
    """Noted here: how each weight of few bits was rounded."""
    skipped: dict[int, str] = field(default_factory=dict)
    """Noted here: by layer, how many slots of each token a rule that skips left empty, [T, 1]."""

    def stored(self, name: str) -> str:
        """A tensor as it is in the checkpoint."""
        return self.graph.weight(name, lambda: self.source(name))

    def norm(self, x: str, name: str) -> str:
        """A norm before a block, or the last one, as the family has it."""
        if not self.config.architecture.layer_norm:
            return self.rms_norm(x, f"{name}.weight")
        weights = self.stored(f"{name}.weight"), self.stored(f"{name}.bias")
        return self.graph.node("LayerNormalization", x, *weights, axis=-1, epsilon=self.config.norm_epsilon)

    def rms_norm(self, x: str, weight: str, epsilon: float | None = None) -> str:
        """x / rms(x) · weight over the last dimension, the mean square taken in float32; epsilon: None for the config's."""
        graph = self.graph
        wide = cast(graph, x, graph.element_type, FLOAT)
        mean = graph.node("ReduceMean", graph.node("Pow", wide, float32(graph, 2.0)), axes=[-1], keepdims=1)
        least = self.config.norm_epsilon if epsilon is None else epsilon
        rms = graph.node("Sqrt", graph.node("Add", mean, float32(graph, least)))
        normed = cast(graph, graph.node("Div", wide, rms), FLOAT, graph.element_type)
        return graph.node("Mul", normed, self.stored(weight))

    def times(self, x: str, factor: float) -> str:
        """factor · x."""
        return x if factor == 1.0 else self.graph.node("Mul", x, self.graph.number(factor))

    def linear(self, x: str, weight: str, bias: str | None = None, exact: bool = False) -> str:
        """x·Wᵀ + b for a weight [O, D] of the checkpoint; `exact`: never of fewer bits."""
        if self.bits is None or exact:
            # Stored the other way round, as MatMul reads it.
            y = self.graph.node("MatMul", x, self.graph.weight(weight, lambda: self.source(weight).T))
        else:
            y = self.product(x, self.quantised(weight, self.bits))
        return y if bias is None else self.graph.node("Add", y, self.stored(bias))

    def quantised(self, weight: str, bits: int) -> Packed:
        """A weight [O, D] of the checkpoint in few bits."""
        graph, tensor = self.graph, self.source(weight)
        block = block_size(tensor.shape[1])
        assert block is not None, f"{weight}: {tensor.shape[1]} inputs"
        self.packings[weight] = Packing(bits, block)
        values, scales = quantise(tensor, bits, block)
        names = graph.weight(f"{weight}.values", lambda: values), graph.weight(f"{weight}.scales", lambda: scales)
        return Packed(*names, bits, block, tensor.shape[0], tensor.shape[1])

    def product(self, x: str, packed: Packed) -> str:
        """x·Wᵀ for a packed weight, with activations rounded to 8 bits for it."""
        blocks = packed.inputs // packed.block
        shape = (packed.outputs, blocks, packed.block * packed.bits // 8)
        return self.graph.node(
            "MatMulNBits",
            x,
            self.graph.reshaped(f"{packed.values}.blocks", packed.values, shape),
            packed.scales,
            domain=MICROSOFT,
            K=packed.inputs,
            N=packed.outputs,
            bits=packed.bits,
            block_size=packed.block,
            accuracy_level=ROUNDED_ACTIVATIONS,
        )

    def rows(self, x_RD: str, weight: str, bias: str | None = None) -> str:
        """x·Wᵀ + b of a matrix of rows: Gemm reads the weight as it is stored, and a single row at the memory's speed."""
        if self.bits is not None:
            y_RO = self.product(x_RD, self.quantised(weight, self.bits))
            return y_RO if bias is None else self.graph.node("Add", y_RO, self.stored(bias))
        return self.graph.node("Gemm", x_RD, self.stored(weight), *([] if bias is None else [self.stored(bias)]), transB=1)

    def swiglu(self, x_RD: str, tensors: Sequence[str], clamp: ClampedSwiglu | None = None) -> str:
        """down(silu(gate·x) ⊙ up·x), [R, D] of rows.

        tensors: the names of gate [F, D], up [F, D], down [D, F] and, where there are any, of their biases. `clamp` stands
        in place of silu(g) ⊙ u.
        """
        graph, biases = self.graph, tensors[3:] or (None, None, None)
        gate, up = (self.rows(x_RD, tensors[place], biases[place]) for place in range(2))
        slope = gate
        if clamp is not None:
            gate = graph.node("Min", gate, graph.number(clamp.limit))
            slope = self.times(gate, clamp.alpha)
            up = graph.node("Clip", up, graph.number(-clamp.limit), graph.number(clamp.limit))
            up = graph.node("Add", up, graph.number(1.0))
        silu = graph.node("Mul", gate, graph.node("Sigmoid", slope))
        return self.rows(graph.node("Mul", silu, up), tensors[2], biases[2])


def cast(graph: Graph, x: str, before: int, after: int) -> str:
    """A value of element type `before` as one of `after`."""
    return x if before == after else graph.node("Cast", x, to=after)


def float32(graph: Graph, value: object) -> str:
    """A constant in float32: a number or a list of them."""
    return graph.constant(np.array(value, dtype=np.float32))
