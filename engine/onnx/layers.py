"""Norms, linear layers, feed-forward networks, embeddings and heads as ONNX nodes.

The standard operators form patterns that onnxruntime fuses when it loads a graph.

Shape suffixes: B batch, L positions, D inputs, O outputs, F width of the feed-forward network, R rows (tokens of any
sequences), N experts, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.families.config import DecoderConfig
from engine.families.layer_config import ClampedSwiglu
from engine.kernels.stored.quantized_weight import QuantizedWeight, Weight, quantise
from engine.onnx.graph import FLOAT, MICROSOFT, Graph
from engine.onnx.quantize import Packing, block_size

Source = Callable[[str], Tensor]
"""Function from name to the checkpoint's tensor, in the graph's dtype."""

OUTER_BITS = 8
"""Bits of embeddings and head in a low-bit model: their rounding errors affect every token."""
ROUNDED_ACTIVATIONS = 4
"""accuracy_level of block-wise products: activations are rounded to 8 bits, so that the processor multiplies integers."""


class Packed(NamedTuple):
    """A low-bit weight [O, D]: names of its values and scales, and its sizes."""

    values: str
    scales: str
    bits: int
    block: int
    outputs: int
    inputs: int


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The graph and the sources from which layers are made."""

    graph: Graph
    source: Source
    norm_epsilon: float
    portable: bool
    """Whether only standard operators may be used."""
    bits: int | None = None
    """Bits of the weights of products; None for the graph's dtype."""
    checkpoint: Callable[[str], Weight] | None = None
    """Function from name to the tensor as stored in the checkpoint, if some may be quantized already."""
    packings: dict[str, Packing] = field(default_factory=dict)
    """Filled by `rounded`: the packing of each weight that was quantized."""

    def stored(self, name: str) -> str:
        """Return a tensor as it is in the checkpoint."""
        return self.graph.weight(name, lambda: self.source(name))

    def rms_norm(self, x: str, weight: str, epsilon: float | None = None) -> str:
        """Return x / rms(x) · weight over the last dimension, the mean square in float32. epsilon: None for the config's."""
        graph = self.graph
        wide = cast(graph, x, graph.element_type, FLOAT)
        mean = graph.node("ReduceMean", graph.node("Pow", wide, float32(graph, 2.0)), axes=[-1], keepdims=1)
        least = self.norm_epsilon if epsilon is None else epsilon
        rms = graph.node("Sqrt", graph.node("Add", mean, float32(graph, least)))
        normed = cast(graph, graph.node("Div", wide, rms), FLOAT, graph.element_type)
        return graph.node("Mul", normed, self.stored(weight))

    def times(self, x: str, factor: float) -> str:
        """Return factor · x."""
        return x if factor == 1.0 else self.graph.node("Mul", x, self.graph.number(factor))

    def linear(self, x: str, weight: str, bias: str | None = None, exact: bool = False) -> str:
        """Return x·Wᵀ + b for a weight [O, D] of the checkpoint; with `exact`, the weight is never quantized."""
        if self.bits is None or exact:
            # Stored transposed, as MatMul reads it.
            y = self.graph.node("MatMul", x, self.graph.weight(weight, lambda: self.source(weight).T))
        else:
            y = self.product(x, self.quantised(weight, self.bits))
        return y if bias is None else self.graph.node("Add", y, self.stored(bias))

    def quantised(self, weight: str, bits: int) -> Packed:
        """Quantize a weight [O, D] of the checkpoint and write it to the graph."""
        graph, rounded = self.graph, self.rounded(weight, bits)
        values = graph.weight(f"{weight}.values", lambda: rounded.packed_OB)
        scales = graph.weight(f"{weight}.scales", lambda: rounded.scales_OC.float())
        return Packed(values, scales, bits, rounded.group_size, *rounded.shape)

    def rounded(self, weight: str, bits: int, block: int | None = None) -> QuantizedWeight:
        """Return a quantized weight; one that the checkpoint stores in this form stays as it is.

        `block`: None for any size.
        """
        stored = None if self.checkpoint is None else self.checkpoint(weight)
        inputs = (self.source(weight) if stored is None else stored).shape[1]
        block = block_size(inputs) if block is None else block
        assert block is not None, f"{weight}: {inputs} inputs"
        if isinstance(stored, QuantizedWeight) and (stored.bits, stored.group_size) == (bits, block):
            return stored
        self.packings[weight] = Packing(bits, block)
        return quantise(self.source(weight), bits, block)

    def product(self, x: str, packed: Packed) -> str:
        """Return x·Wᵀ for a packed weight, with activations rounded to 8 bits."""
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
        """Return x·Wᵀ + b for a matrix of rows. Gemm reads the weight as stored, and one row at the memory's bandwidth."""
        if self.bits is not None:
            y_RO = self.product(x_RD, self.quantised(weight, self.bits))
            return y_RO if bias is None else self.graph.node("Add", y_RO, self.stored(bias))
        return self.graph.node("Gemm", x_RD, self.stored(weight), *([] if bias is None else [self.stored(bias)]), transB=1)

    def feed_forward(
        self,
        x_RD: str,
        weights: Sequence[str],
        activation: str = "silu",
        biases: Sequence[str] = (),
        clamp: ClampedSwiglu | None = None,
    ) -> str:
        """Return down(act(gate·x) ⊙ up·x), [R, D].

        weights: names of gate [F, D], optionally up [F, D], and down [D, F]. biases: names in the same order. `clamp`
        replaces act(g) ⊙ u.
        """
        *inner, down = zip_longest(weights, biases)
        gate, *up = (self.rows(x_RD, *names) for names in inner)
        if clamp is not None:
            return self.rows(self._clamped(gate, up[0], clamp), *down)
        hidden = ACTIVATIONS[activation](self.graph, gate)
        for factor in up:
            hidden = self.graph.node("Mul", hidden, factor)
        return self.rows(hidden, *down)

    def _clamped(self, gate: str, up: str, clamp: ClampedSwiglu) -> str:
        graph = self.graph
        gate = graph.node("Min", gate, graph.number(clamp.limit))
        up = graph.node("Clip", up, graph.number(-clamp.limit), graph.number(clamp.limit))
        sigmoid = graph.node("Sigmoid", self.times(gate, clamp.alpha))
        return graph.node("Mul", graph.node("Mul", gate, sigmoid), graph.node("Add", up, graph.number(1.0)))

    def embedded(self, tokens_BL: str, weight: str) -> str:
        """Return the embeddings of tokens, [B, L, D], from a weight [V, D]."""
        if self.bits is None:
            return self.graph.node("Gather", self.stored(weight), tokens_BL, axis=0)
        packed = self.quantised(weight, OUTER_BITS)
        return self.graph.node(
            "GatherBlockQuantized",
            *(packed.values, tokens_BL, packed.scales),
            domain=MICROSOFT,
            bits=packed.bits,
            block_size=packed.block,
            gather_axis=0,
            quantize_axis=1,
        )

    def logits(self, x_BLD: str, weight: str, shape: tuple[int, int], bias: str | None = None) -> None:
        """Add the graph's output `logits` [B, L, V] with a weight [V, D] of this shape."""
        graph, (vocabulary, hidden) = self.graph, shape
        if self.bits is None:
            # Tied embeddings are stored once: Gemm reads them transposed.
            logits = self.rows(graph.node("Reshape", x_BLD, graph.integers(-1, hidden)), weight, bias)
            batch_length = graph.node("Slice", graph.node("Shape", x_BLD), graph.integers(0), graph.integers(2))
            whole = graph.node("Concat", batch_length, graph.integers(vocabulary), axis=0)
            graph.node("Reshape", logits, whole, name="logits")
            return
        logits = self.product(x_BLD, self.quantised(weight, OUTER_BITS))
        if bias is None:
            graph.node("Identity", logits, name="logits")
        else:
            graph.node("Add", logits, self.stored(bias), name="logits")

    def stacked(self, name: str, shape: tuple[int, int, int], weights: Iterable[Tensor]) -> str:
        """Write a weight [N, O, D] of all experts, expert by expert."""
        return self.graph.weight_of_parts(name, self.graph.dtype, shape, weights)

    def stacked_in_bits(
        self, name: str, shape: tuple[int, int, int], weights: Iterable[Sequence[QuantizedWeight]], bits: int
    ) -> tuple[str, str]:
        """Write low-bit weights of all experts; return the names of values (bytes) and scales.

        If an expert has several weights, their rows are interleaved. Only the scales of one layer are in memory
        together.
        """
        scales: list[Tensor] = []

        def values() -> Iterator[Tensor]:
            for rounded in weights:
                scales.append(in_turns([weight.scales_OC.float() for weight in rounded]))
                yield in_turns([weight.packed_OB for weight in rounded])

        experts, outputs, inputs = shape
        packed_shape = (experts, outputs, inputs * bits // 8)
        packed = self.graph.weight_of_parts(f"{name}.values", torch.uint8, packed_shape, values())
        return packed, self.graph.weight(f"{name}.scales", lambda: torch.stack(scales))


@dataclass(frozen=True, kw_only=True)
class Parts(Layers):
    """Layers of a decoder."""

    config: DecoderConfig
    skipped: dict[int, str] = field(default_factory=dict)
    """Filled by experts.py: for each layer with adaptive skipping, the number of empty slots of each token, [T, 1]."""

    def norm(self, x: str, name: str) -> str:
        """Add a norm before a block, or the last norm, in the family's form."""
        if not self.config.layer_norm:
            return self.rms_norm(x, f"{name}.weight")
        weights = self.stored(f"{name}.weight"), self.stored(f"{name}.bias")
        return self.graph.node("LayerNormalization", x, *weights, axis=-1, epsilon=self.config.norm_epsilon)


def in_turns(tensors: Sequence[Tensor]) -> Tensor:
    """Interleave the rows of several tensors."""
    return torch.stack(tuple(tensors), dim=1).flatten(0, 1)


def cast(graph: Graph, x: str, before: int, after: int) -> str:
    """Convert a value of element type `before` to `after`."""
    return x if before == after else graph.node("Cast", x, to=after)


def float32(graph: Graph, value: object) -> str:
    """Return a constant in float32: a number or a list of numbers."""
    return graph.constant(np.array(value, dtype=np.float32))


def _relu(graph: Graph, x: str) -> str:
    return graph.node("Relu", x)


def _silu(graph: Graph, x: str) -> str:
    return graph.node("Mul", x, graph.node("Sigmoid", x))


def _gelu_of_tanh(graph: Graph, x: str) -> str:
    """Return 0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))."""
    cube = graph.node("Pow", x, graph.number(3.0))
    inner = graph.node("Add", x, graph.node("Mul", cube, graph.number(0.044715)))
    bent = graph.node("Tanh", graph.node("Mul", inner, graph.number(math.sqrt(2.0 / math.pi))))
    return graph.node("Mul", graph.node("Mul", x, graph.number(0.5)), graph.node("Add", bent, graph.number(1.0)))


ACTIVATIONS: dict[str, Callable[[Graph, str], str]] = {"relu": _relu, "silu": _silu, "gelu_new": _gelu_of_tanh}
"""Activation functions by their names in transformers."""
