"""Passes over text in which some layers, or the matrices outside of the routed experts, are those of another model.

No model is written for them: each layer is changed before it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.experts import MoeBlock
from engine.decoder.model import DecoderLayer
from engine.decoder.parameters import layer_weights
from engine.families.config import DecoderConfig
from engine.kernels.stored.quantized_weight import quantise
from engine.kernels.stored.scheme import Scheme
from engine.passes.streaming import Visit


def rounded_layers(config: DecoderConfig, names: Collection[str], scheme: Scheme) -> Visit:
    """Return a visit that rounds the matrices with these names to nearest, before their layer runs."""

    def rounded(name: str, weight: Tensor) -> Tensor:
        return quantise(weight.detach().float(), *scheme, weight.dtype).dequantised(weight.dtype)

    return _changing(config, names, rounded)


def with_blocks_of(result: Checkpoint, layers: Collection[int], dtype: torch.dtype, device: torch.device | str) -> Visit:
    """Return a visit that gives these layers the routers and routed experts of another model with the same layers."""

    def visit(index: int, layer: DecoderLayer) -> None:
        if index in layers:
            block = DecoderLayer(result.config, index, result.weights(dtype, device)).feed_forward
            assert isinstance(block, MoeBlock) and isinstance(layer.feed_forward, MoeBlock)
            block.shared = layer.feed_forward.shared
            layer.feed_forward = block

    return visit


def with_matrices_of(result: Checkpoint, names: Collection[str], dtype: torch.dtype, device: torch.device | str) -> Visit:
    """Return a visit that gives all layers the matrices with these names of another model."""
    source = result.source(dtype, device)
    return _changing(result.config, names, lambda name, _: source(name))


def _changing(config: DecoderConfig, names: Collection[str], changed: Callable[[str, Tensor], Tensor]) -> Visit:
    """Return a visit that changes the matrices with these names. changed: returns a new one, given its name and the old."""
    wanted = set(names)

    def visit(index: int, layer: DecoderLayer) -> None:
        for name, weight in layer_weights(config, index, layer):
            if name in wanted and isinstance(weight, Tensor):
                weight.data = changed(name, weight)

    return visit
