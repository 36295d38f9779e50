"""Weights of 8 or 4 bits in blocks along the inputs, packed as onnxruntime's block-wise operators read them.

weight ≈ scale · (quantised − 2^(bits−1)), one scale for each block. Of 4 bits several scales are tried for each block, and
the one of the least squared error is taken.

Shape suffixes: O outputs, D inputs, C blocks (D / block), M weights of one block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCKS = (32, 16)
"""Weights that share a scale: the first size that divides what it has to."""
_SHARES = {8: (1.0,), 4: (1.0, 0.95, 0.9, 0.85, 0.8)}
"""Of a block's largest weight that may become the largest quantised value; what is beyond is cut off."""


class Packing(NamedTuple):
    """How a weight is rounded."""

    bits: int
    block: int


class Written(NamedTuple):
    """What was made of a checkpoint."""

    weights_bytes: int
    packings: dict[str, Packing]
    """By name in the checkpoint, of the weights that were rounded."""


class Quantised(NamedTuple):
    """A weight [O, D]."""

    values: Tensor
    """uint8 [O, D · bits / 8]; of 4 bits the first of two is in the low half."""
    scales: Tensor
    """float32 [O, C]."""


def quantise(weight_OD: Tensor, bits: int, block: int) -> Quantised:
    """Round to 2^bits values a block; `block` divides D."""
    outputs, inputs = weight_OD.shape
    weight_OCM = weight_OD.float().view(outputs, inputs // block, block)
    middle = 2 ** (bits - 1)
    # The largest in size becomes −2^(bits−1), which has no positive counterpart, so its sign is the scale's.
    size_OC1, place_OC1 = weight_OCM.abs().max(dim=-1, keepdim=True)
    largest_OC1 = weight_OCM.gather(-1, place_OC1)
    best_OCM, scale_OC1, error_OC1 = weight_OCM, size_OC1, torch.full_like(size_OC1, torch.inf)
    for share in _SHARES[bits]:
        tried_OC1 = largest_OC1 * (-share / middle)
        safe_OC1 = torch.where(tried_OC1 == 0, 1.0, tried_OC1)
        values_OCM = (weight_OCM / safe_OC1).round_().clamp_(-middle, middle - 1)
        squares_OC1 = (values_OCM * tried_OC1 - weight_OCM).square().sum(dim=-1, keepdim=True)
        better_OC1 = squares_OC1 < error_OC1
        best_OCM = torch.where(better_OC1, values_OCM, best_OCM)
        scale_OC1 = torch.where(better_OC1, tried_OC1, scale_OC1)
        error_OC1 = torch.where(better_OC1, squares_OC1, error_OC1)
    values_OD = (best_OCM + middle).to(torch.uint8).view(outputs, inputs)
    if bits == 4:
        values_OD = values_OD[:, ::2] | (values_OD[:, 1::2] << 4)
    return Quantised(values_OD.contiguous(), scale_OC1[:, :, 0].contiguous())


def restored(quantised: Quantised, bits: int) -> Tensor:
    """The weight [O, D] that the values stand for, in float32."""
    values_OD = quantised.values
    if bits == 4:
        values_OD = torch.stack((values_OD & 15, values_OD >> 4), dim=-1).flatten(1)
    scales_OC1 = quantised.scales[:, :, None]
    values_OCM = values_OD.view(*quantised.scales.shape, -1).float() - 2 ** (bits - 1)
    weight_OD: Tensor = (values_OCM * scales_OC1).flatten(1)
    return weight_OD


def block_size(*inputs: int) -> int | None:
    """The largest block that divides all of these; None where none does."""
    return next((block for block in BLOCKS if all(size % block == 0 for size in inputs)), None)
