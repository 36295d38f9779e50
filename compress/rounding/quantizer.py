"""Quantization of a model's weights to low-bit weights, and its error.

Matrices of attention and of feed-forward networks are quantized, and the output head and the embedding on request. Routers,
norms and biases keep their dtype.

Shape suffixes: O outputs, D inputs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from compress.options.quantize import EMBEDDING, HEAD, NEAREST, OUTSIDE, QuantiserOptions
from compress.report.figures import RoundingFigures
from compress.rounding.activation_scales import Rescaling
from engine.checkpoint.checkpoint import Checkpoint
from engine.families.results import mixes_bits
from engine.kernels.stored.quantized_weight import QuantizedWeight, quantise
from engine.kernels.stored.scheme import WHOLE_ROW

_OLDEST_BITS = 4
"""Fewest bits that every version of compressed-tensors packs alike."""
_TITLES = {EMBEDDING: "the embedding", HEAD: "the output head"}
_OUTSIDE = -1
"""Stands for the number of a layer, for tensors outside of layers."""


class Quantiser:
    """Quantizes the weights of one model and accumulates the error."""

    def __init__(
        self,
        options: QuantiserOptions,
        rescaling: Rescaling | None = None,
        made: Callable[[str], QuantizedWeight | None] | None = None,
        way: str = NEAREST,
    ) -> None:
        """made: returns a matrix that was rounded before, by its name; None for one to be rounded to nearest.

        way: of rounding, for the figures.
        """
        self.options, self.rescaling = options, rescaling or Rescaling()
        self._made, self._way = made, way
        self._squares: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        """By layer, the sums of squares of the errors and of the weights."""

    def rescaled(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor that keeps its dtype, times the factor that was folded into it."""
        return self.rescaling.rescaled(name, tensor)

    def __call__(self, name: str, weight_OD: Tensor, scale_dtype: torch.dtype) -> QuantizedWeight:
        """Return a quantized weight."""
        factor, wide_OD = self.rescaling.factor(name, weight_OD), weight_OD.float()
        if factor is not None:
            wide_OD = wide_OD * factor
        made = None if self._made is None else self._made(name)
        rounded = quantise(wide_OD, *self.options.scheme_of(name), scale_dtype) if made is None else made
        off_OD = rounded.dequantised(torch.float32).sub_(wide_OD)
        if factor is not None:
            off_OD /= factor
        sums = self._squares[_OUTSIDE if name in OUTSIDE else int(name.split(".")[2])]  # model.layers.N.…
        sums[0] += float(off_OD.square_().sum(dtype=torch.float64))
        sums[1] += float(weight_OD.float().square().sum(dtype=torch.float64))
        return rounded

    def figures(self, source: Checkpoint, result: Checkpoint) -> RoundingFigures:
        """Return the figures of the rounding."""
        off, weights = (sum(sums) for sums in zip(*self._squares.values(), strict=True))
        layers = range(len(source.config.layers))
        scaled = self.rescaling.errors
        return {
            "weight_bits": self.options.bits,
            "group_size": self.options.group_size,
            "rounding": self._way,
            "experts_only": self.options.experts_only,
            "quantize_head": self.options.quantize_head,
            "embedding_bits": self.options.embedding_bits,
            "bytes_not_quantized": result.plain_bytes,
            "bytes_not_quantized_share": result.plain_bytes / result.bytes,
            "relative_weight_error": _root(off, weights),
            "relative_weight_error_per_layer": [_root(*self._squares[layer]) for layer in layers],
            "activation_aware": bool(scaled),
            "output_error_ratio": _root(sum(after for _, after in scaled), sum(before for before, _ in scaled)),
            "exponents_per_layer": [own for _, own in sorted(self.rescaling.exponents.items())],
        }

    def card(self, result: Checkpoint) -> tuple[str, ...]:
        """Return the lines of the model card."""
        what = "experts" if self.options.experts_only else "attention and feed-forward networks"
        rounded = self.options.outside
        outside = "".join(f", those of {_TITLES[name]} {self.options.scheme_of(name).bits}" for name in reversed(rounded))
        size = self.options.group_size
        group = "output" if size == WHOLE_ROW else f"{size} inputs of an output"
        readers = "vLLM reads them, and transformers where that package is installed"
        if not result.has_own_decoder or mixes_bits(result.raw_config) or EMBEDDING in rounded:
            readers = "moe-compress reads them"
        elif self.options.bits < _OLDEST_BITS:
            readers = "moe-compress reads them, and programs that know 2 and 3 bits as that package does since June 2026"
        return (
            f"Weights of {what} have {self.options.bits_text} bits{outside}, with a scale for each {group}.",
            f"They are packed as `compressed-tensors` does: {readers}.",
            "",
        )


def _root(part: float, whole: float) -> float | None:
    """Return the root of a ratio; None for an empty sum."""
    return math.sqrt(part / whole) if whole else None
