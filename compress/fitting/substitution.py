"""Models in which some tensors or layers are replaced, without writing these models to disk.

A tensor is replaced when it is read, and a layer before it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.experts import MoeBlock
from engine.decoder.model import DecoderLayer
from engine.kernels.stored.quantized_weight import quantise
from engine.kernels.stored.scheme import Scheme
from engine.passes.streaming import Visit

ERROR_ROWS = 256
"""Rows of a matrix whose errors stand for those of all."""


class Substituted(Checkpoint):
    """A model in which the tensors with some names are made anew whenever they are read."""

    def __init__(self, source: Checkpoint, names: Collection[str], made: Callable[[str, Tensor], Tensor]) -> None:
        """made: returns a new tensor, given its name and the old one."""
        super().__init__(source.directory)
        self._names, self._made = frozenset(names), made

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor as a plain one."""
        own = super().tensor(name, dtype)
        return self._made(name, own) if name in self._names else own


def rounded(source: Checkpoint, names: Collection[str], scheme: Scheme) -> Substituted:
    """Return a model with the matrices with these names rounded to nearest."""

    def made(name: str, weight: Tensor) -> Tensor:
        return quantise(weight.float(), *scheme, source.model_dtype).dequantised(weight.dtype)

    return Substituted(source, names, made)


def squared_error(source: Checkpoint, names: Collection[str], scheme: Scheme) -> float:
    """Return the sum of the squared errors of rounding matrices to nearest, estimated from up to ERROR_ROWS rows of each."""
    total = 0.0
    for name in names:
        weight_OD = source.tensor(name)
        rows_OD = weight_OD[:: -(-len(weight_OD) // ERROR_ROWS)].float()
        off_OD = quantise(rows_OD, *scheme, source.model_dtype).dequantised(torch.float32) - rows_OD
        total += len(weight_OD) / len(rows_OD) * float(off_OD.square().sum(dtype=torch.float64))
    source.release()
    return total


def with_matrices_of(source: Checkpoint, other: Checkpoint, names: Collection[str]) -> Substituted:
    """Return a model with the matrices with these names of another one."""
    return Substituted(source, names, lambda name, weight: other.tensor(name, weight.dtype))


def with_blocks_of(result: Checkpoint, layers: Collection[int], dtype: torch.dtype, device: torch.device | str) -> Visit:
    """Return a visit that gives these layers the routers and routed experts of another model with the same layers."""

    def visit(index: int, layer: DecoderLayer) -> None:
        if index in layers:
            block = DecoderLayer(result.config, index, result.weights(dtype, device)).feed_forward
            assert isinstance(block, MoeBlock) and isinstance(layer.feed_forward, MoeBlock)
            block.shared = layer.feed_forward.shared
            layer.feed_forward = block

    return visit
