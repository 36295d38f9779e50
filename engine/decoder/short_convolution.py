"""A gated short convolution, which LFM2 has in the place of attention in most of its layers (arXiv 2511.23404, §2).

    [b; c; u] = W_in·x        y = W_out (c ⊙ conv(b ⊙ u))

The convolution is causal and has one filter per channel. There is no rotary embedding. The cache holds the last inputs of
the convolution, whose size does not depend on the number of positions.

Shape suffixes: B batch, L new positions, D hidden, K positions of a filter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from engine.decoder.attention import Cache, Positions
from engine.decoder.convolution import causal_convolution
from engine.decoder.recurrence import Recurrence
from engine.families.config import DecoderConfig
from engine.families.tensor_names import SHORT_CONVOLUTION, attention_prefix
from engine.kernels.linear import linear
from engine.kernels.stored.quantized_weight import LowBitWeight, Weight, frozen, frozen_tensor


class ShortConvolution(Recurrence):
    """The short convolution of one layer."""

    kernel: ClassVar[str] = "short_convolution"

    def __init__(self, config: DecoderConfig, layer: int, tensor: Callable[[str], Weight]) -> None:
        super().__init__()
        self.layer, prefix = layer, attention_prefix(config, layer)
        inputs, filters, output = (tensor(f"{prefix}.{name}") for name in SHORT_CONVOLUTION)
        self.inputs, self.filter_D1K, self.output = frozen(inputs), frozen_tensor(filters), frozen(output)

    def forward(self, x_BLD: Tensor, positions: Positions, cache: Cache | None = None) -> Tensor:
        """Map [B, L, D] to [B, L, D]; with a cache, continue from its state and store the new one."""
        assert not positions.one_by_one, "tokens that may be undone cannot be read: the state cannot forget them"
        if positions.real_BL is not None:
            x_BLD = x_BLD * positions.real_BL[..., None]  # padding comes first, and leaves the state at zero
        if (compiled_B1D := self.next_position(x_BLD, positions, cache)) is not None:
            return compiled_B1D
        before_BLD, after_BLD, input_BLD = linear(x_BLD, self.inputs, choice=positions.choice).chunk(3, dim=-1)
        wide = torch.promote_types(x_BLD.dtype, torch.float32)
        last = None if cache is None else cache.state(self.layer)[0].to(wide)
        mixed_BLD, last = causal_convolution((before_BLD * input_BLD).to(wide), self.filter_D1K[:, 0].to(wide), last)
        if cache is not None:
            cache.keep_state(self.layer, (last,))
        return linear(after_BLD * mixed_BLD.to(x_BLD.dtype), self.output, choice=positions.choice)

    @property
    def projections(self) -> tuple[nn.Parameter | LowBitWeight, ...]:
        """The projection of the layer's input."""
        return (self.inputs,)

    @property
    def results(self) -> int:
        """The kernel's results for one position: the inputs of the output projection."""
        return len(self.filter_D1K)

    @property
    def vectors(self) -> Mapping[str, Tensor]:
        """The parameters that the kernel reads in bfloat16."""
        return {"filters": self.filter_D1K}

    @property
    def kernel_sizes(self) -> Mapping[str, float]:
        """The record's further fields."""
        return {"channels": len(self.filter_D1K), "filter_size": self.filter_D1K.shape[2]}
