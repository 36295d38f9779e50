"""Norms, linear layers and dense feed-forward networks as ONNX nodes.

Standard operators in patterns that onnxruntime fuses when it loads a graph.

Shape suffixes: D inputs, O outputs, F width of the feed-forward network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from engine.architectures import DecoderConfig
from engine.onnx_graph import FLOAT, Graph

Source = Callable[[str], Tensor]
"""Gives the checkpoint's tensors by name, in the graph's dtype."""


@dataclass(frozen=True)
class Parts:
    """Where nodes go, and what they are made from."""

    graph: Graph
    source: Source
    config: DecoderConfig
    portable: bool
    """Standard operators only."""

    def vector(self, name: str) -> str:
        """A tensor as it is in the checkpoint: the weight of a norm, or a bias."""
        return self.graph.weight(name, lambda: self.source(name))

    def rms_norm(self, x: str, weight: str) -> str:
        """x / rms(x) · weight over the last dimension, the mean square taken in float32."""
        graph = self.graph
        wide = cast(graph, x, graph.element_type, FLOAT)
        mean = graph.node("ReduceMean", graph.node("Pow", wide, float32(graph, 2.0)), axes=[-1], keepdims=1)
        rms = graph.node("Sqrt", graph.node("Add", mean, float32(graph, self.config.norm_epsilon)))
        normed = cast(graph, graph.node("Div", wide, rms), FLOAT, graph.element_type)
        return graph.node("Mul", normed, self.vector(weight))

    def linear(self, x: str, weight: str, bias: str | None = None) -> str:
        """x·Wᵀ + b for a weight [O, D] of the checkpoint, which is stored the other way round."""
        y = self.graph.node("MatMul", x, self.graph.weight(weight, lambda: self.source(weight).T))
        return y if bias is None else self.graph.node("Add", y, self.vector(bias))

    def swiglu(self, x: str, weights: Sequence[str]) -> str:
        """down(silu(gate·x) ⊙ up·x); the names of gate [F, D], up [F, D] and down [D, F]."""
        gate, up = (self.linear(x, weight) for weight in weights[:2])
        silu = self.graph.node("Mul", gate, self.graph.node("Sigmoid", gate))
        return self.linear(self.graph.node("Mul", silu, up), weights[2])


def cast(graph: Graph, x: str, before: int, after: int) -> str:
    """A value of element type `before` as one of `after`."""
    return x if before == after else graph.node("Cast", x, to=after)


def float32(graph: Graph, value: object) -> str:
    """A constant in float32: a number or a list of them."""
    return graph.constant(np.array(value, dtype=np.float32))
