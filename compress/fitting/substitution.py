"""A pass over text in which the matrices outside of the routed experts are rounded, without writing a model."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from engine.decoder.model import DecoderLayer
from engine.decoder.parameters import layer_weights
from engine.families.config import DecoderConfig
from engine.kernels.quantized_weight import quantise
from engine.kernels.scheme import Scheme
from engine.passes.streaming import Visit


def rounded_layers(config: DecoderConfig, names: Collection[str], scheme: Scheme) -> Visit:
    """Return a visit that rounds the matrices with these names to nearest, before their layer runs."""
    wanted = set(names)

    def visit(index: int, layer: DecoderLayer) -> None:
        for name, weight in layer_weights(config, index, layer):
            if name in wanted and isinstance(weight, Tensor):
                weight.data = quantise(weight.detach().float(), *scheme, weight.dtype).dequantised(weight.dtype)

    return visit
