"""Which weights of a model become ones of few bits, how, and what that costs them.

Matrices of attention and of feed-forward networks do, the output head on request. Embeddings, routers, norms and biases keep
their dtype.

Shape suffixes: O outputs, D inputs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.rounding.activation_scales import Rescaling
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.pack_quantized import BITS, CONFIG_KEY, Scheme, config_of
from engine.errors import OptionError
from engine.families.config import DecoderConfig
from engine.families.tensor_shapes import attention_weights, expected_tensors, feed_forward_weights
from engine.kernels.quantized_weight import WHOLE_ROW, QuantizedWeight, quantise

GROUP_SIZE = 32
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
HEAD_BITS = 8
_OUTSIDE = -1
"""In the place of a layer's number."""
_USUAL_SIZES = (32, 64, 128, 16, 8)


@dataclass(frozen=True)
class QuantiserOptions:
    """How a model's weights are rounded."""

    bits: int
    group_size: int = GROUP_SIZE
    """Inputs that share a scale; WHOLE_ROW for all of them."""
    experts_only: bool = False
    """Only those of mixtures; attention and dense feed-forward networks keep their dtype."""
    quantize_head: bool = False
    """The output head too, to 8 bits: each token reads all of it."""

    def check(self, config: DecoderConfig) -> None:
        """Raise OptionError for what cannot be, or not of this model."""
        if self.bits not in BITS:
            raise OptionError(f"bits is {self.bits}; it must be {' or '.join(map(str, BITS))}")
        if self.group_size != WHOLE_ROW and self.group_size < 1:
            raise OptionError(
                f"group size is {self.group_size}; it must be from 1, or {WHOLE_ROW} for a scale for each output"
            )
        if self.quantize_head and config.tied_embeddings:
            raise OptionError("the output head is the embedding matrix, which keeps its dtype; leave out --quantize-head")
        if self.experts_only and not config.moe_layers:
            raise OptionError("the model is dense and has no experts; leave out --experts-only")
        shapes = expected_tensors(config)
        inputs = {shapes[name][1]: name for name in reversed(self.names(config))}
        wrong = [size for size, name in inputs.items() if not self.scheme_of(name).fits(size)]
        if wrong:
            fitting = [size for size in _USUAL_SIZES if all(Scheme(self.bits, size).fits(each) for each in inputs)]
            instead = f"--group-size {fitting[0]}" if fitting else "another model"
            raise OptionError(
                f"{inputs[wrong[-1]]} has {wrong[-1]} inputs, which groups of {self.group_size} do not fill in whole words "
                f"of 32 bits; take {instead}"
            )

    @property
    def scheme(self) -> Scheme:
        """How each weight is stored."""
        return Scheme(self.bits, self.group_size)

    def scheme_of(self, name: str) -> Scheme:
        """The same of one weight."""
        return Scheme(HEAD_BITS, self.group_size) if name == HEAD else self.scheme

    def names(self, config: DecoderConfig) -> list[str]:
        """The weights that become ones of few bits."""
        names: list[str] = [HEAD] if self.quantize_head else []
        for index, layer in enumerate(config.layers):
            if not self.experts_only:
                names += attention_weights(config, index)
            if not self.experts_only or layer.moe is not None:
                names += feed_forward_weights(config, index)
        return names

    def config(self, config: DecoderConfig) -> dict[str, Any]:
        """What config.json says of it."""
        rounded = set(self.names(config))
        matrices = [name for name, shape in expected_tensors(config).items() if len(shape) == 2]
        kept = [name for name in matrices if name not in rounded and name not in (EMBEDDING, HEAD)]
        if self.quantize_head:
            return {CONFIG_KEY: config_of(self.scheme, kept, {HEAD: self.scheme_of(HEAD)})}
        # Also where the head is tied and has no tensor: readers have a linear layer for it.
        return {CONFIG_KEY: config_of(self.scheme, [HEAD, *kept])}


class Quantiser:
    """Rounds the weights of one model, and adds up how far they are off."""

    def __init__(self, options: QuantiserOptions, rescaling: Rescaling | None = None) -> None:
        self.options, self.rescaling = options, rescaling or Rescaling()
        self._squares: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        """By layer, of the errors and of the weights."""

    def rescaled(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor that keeps its dtype, times what was folded into it."""
        factor = self.rescaling.factor(name, tensor)
        return tensor if factor is None else (tensor.float() * factor).to(tensor.dtype)

    def __call__(self, name: str, weight_OD: Tensor, scale_dtype: torch.dtype) -> QuantizedWeight:
        """A weight in few bits."""
        factor, wide_OD = self.rescaling.factor(name, weight_OD), weight_OD.float()
        if factor is not None:
            wide_OD = wide_OD * factor
        rounded = quantise(wide_OD, *self.options.scheme_of(name), scale_dtype)
        off_OD = rounded.dequantised(torch.float32).sub_(wide_OD)
        if factor is not None:
            off_OD /= factor
        sums = self._squares[_OUTSIDE if name == HEAD else int(name.split(".")[2])]  # model.layers.N.…
        sums[0] += float(off_OD.square_().sum(dtype=torch.float64))
        sums[1] += float(weight_OD.float().square().sum(dtype=torch.float64))
        return rounded

    def figures(self, source: Checkpoint, result: Checkpoint) -> dict[str, Any]:
        """What was done, as JSON. Errors are root mean squares over those of the weights."""
        off, weights = (sum(sums) for sums in zip(*self._squares.values(), strict=True))
        layers = range(len(source.config.layers))
        scaled = self.rescaling.errors
        return {
            "weight_bits": self.options.bits,
            "group_size": self.options.group_size,
            "experts_only": self.options.experts_only,
            "quantize_head": self.options.quantize_head,
            "bytes_not_quantized": result.plain_bytes,
            "bytes_not_quantized_share": result.plain_bytes / result.bytes,
            "relative_weight_error": _root(off, weights),
            "relative_weight_error_per_layer": [_root(*self._squares[layer]) for layer in layers],
            "activation_aware": bool(scaled),
            "output_error_ratio": _root(sum(after for _, after in scaled), sum(before for before, _ in scaled)),
            "exponents_per_layer": [own for _, own in sorted(self.rescaling.exponents.items())],
        }

    @property
    def card(self) -> tuple[str, ...]:
        """Lines of the model card."""
        what = "experts" if self.options.experts_only else "attention and feed-forward networks"
        head = f", those of the output head {HEAD_BITS} bits" if self.options.quantize_head else ""
        size = self.options.group_size
        group = "output" if size == WHOLE_ROW else f"{size} inputs of an output"
        return (
            f"Weights of {what} have {self.options.bits} bits{head}, with a scale for each {group}, and are packed as",
            "`compressed-tensors` does: vLLM reads them, and transformers where that package is installed.",
            "",
        )


def _root(part: float, whole: float) -> float | None:
    """The root of a share; None of nothing."""
    return math.sqrt(part / whole) if whole else None
