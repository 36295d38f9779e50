"""Weights of 8 or 4 bits: a few in a row share a scale, and products read them as they are stored.

weight = scale · (stored − 2^(bits−1)). Rounding is to nearest; of 4 bits several scales are tried for each group, and the
one of the least squared error is taken.

Shape suffixes: O outputs, D inputs, B bytes of a row, C groups of a row, M weights of one group.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.kernels.scheme import WHOLE_ROW

_SHARES = {8: (1.0,), 4: (1.0, 0.95, 0.9, 0.85, 0.8)}
"""Of a group's largest weight that may become the largest quantised value; what is beyond is cut off."""
_ROUND_ELEMENTS = 1 << 20
"""Weights that are rounded at a time: what that takes besides stays small."""


class QuantizedWeight(nn.Module):
    """A weight [O, D] of few bits, where otherwise a parameter stands; its bytes stay where and as they were given.

    A module, so that its buffers go to devices and are counted with the parameters beside it.
    """

    packed_OB: Tensor
    """uint8; of 4 bits the first of two is in the low half. A row may end in unused bytes."""
    scales_OC: Tensor
    """Of any floating dtype; the scales of a row lie side by side."""

    def __init__(self, packed_OB: Tensor, scales_OC: Tensor, bits: int, inputs: int) -> None:
        super().__init__()
        self.register_buffer("packed_OB", packed_OB)
        self.register_buffer("scales_OC", scales_OC)
        self.bits = bits
        self.shape = (packed_OB.shape[0], inputs)

    @property
    def group_size(self) -> int:
        """Weights that share a scale."""
        return self.shape[1] // self.scales_OC.shape[1]

    @property
    def addresses(self) -> tuple[int, int]:
        """Where the bytes and the scales of its first row begin."""
        return self.packed_OB.data_ptr(), self.scales_OC.data_ptr()

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The weight [O, D] that it stands for, rounded once to `dtype`."""
        (outputs, inputs), groups = self.shape, self.scales_OC.shape[1]
        values_OD = self.packed_OB
        if self.bits == 4:
            values_OD = torch.stack((values_OD & 15, values_OD >> 4), dim=-1).flatten(1)
        # A product of the scale's own dtype is rounded once too: the other factor has 8 bits at most.
        wide = dtype if dtype == self.scales_OC.dtype else torch.promote_types(dtype, torch.float32)
        weight_OCM = values_OD[:, :inputs].to(wide).view(outputs, groups, -1)
        weight_OCM.sub_(2 ** (self.bits - 1)).mul_(self.scales_OC.to(wide)[:, :, None])
        return weight_OCM.view(outputs, inputs).to(dtype)

    def extra_repr(self) -> str:
        """For people."""
        return f"{self.shape[0]}, {self.shape[1]}, bits={self.bits}, group_size={self.group_size}"


Weight = Tensor | QuantizedWeight


def frozen(weight: Weight) -> nn.Parameter | QuantizedWeight:
    """A weight as the attribute of a module."""
    return weight if isinstance(weight, QuantizedWeight) else nn.Parameter(weight, requires_grad=False)


def as_tensor(weight: Weight) -> Tensor:
    """A weight that is never of few bits: a norm, a bias, a router, an embedding."""
    assert isinstance(weight, Tensor)
    return weight


def moved(weight: Weight, dtype: torch.dtype, device: torch.device | str) -> Weight:
    """On another device, and of another dtype unless it is of few bits; the same one where both fit already."""
    return weight.to(device) if isinstance(weight, QuantizedWeight) else weight.to(device=device, dtype=dtype)


def quantise(weight_OD: Tensor, bits: int, group_size: int, scale_dtype: torch.dtype = torch.float32) -> QuantizedWeight:
    """Round to 2^bits values a group; `group_size` divides D, or is WHOLE_ROW."""
    outputs, inputs = weight_OD.shape
    groups = 1 if group_size == WHOLE_ROW else inputs // group_size
    packed_OB = torch.empty(outputs, inputs * bits // 8, dtype=torch.uint8, device=weight_OD.device)
    scales_OC = torch.empty(outputs, groups, dtype=scale_dtype, device=weight_OD.device)
    step = max(1, _ROUND_ELEMENTS // inputs)
    for start in range(0, outputs, step):
        rows = slice(start, start + step)
        packed_OB[rows] = _rounded(weight_OD[rows].float(), bits, scales_OC[rows])
    return QuantizedWeight(packed_OB, scales_OC, bits, inputs)


def _rounded(weight_OD: Tensor, bits: int, scales_OC: Tensor) -> Tensor:
    """The packed bytes of some rows [O, B], whose scales are written to their place."""
    middle = 2 ** (bits - 1)
    weight_OCM = weight_OD.view(*scales_OC.shape, -1)
    # The largest in size becomes −2^(bits−1), which has no positive counterpart, so its sign is the scale's.
    size_OC1, place_OC1 = weight_OCM.abs().max(dim=-1, keepdim=True)
    largest_OC1 = weight_OCM.gather(-1, place_OC1)
    best_OCM, scale_OC1, error_OC1 = weight_OCM, size_OC1, torch.full_like(size_OC1, torch.inf)
    for share in _SHARES[bits]:
        tried_OC1 = (largest_OC1 * (-share / middle)).to(scales_OC.dtype).float()
        safe_OC1 = torch.where(tried_OC1 == 0, 1.0, tried_OC1)
        values_OCM = (weight_OCM / safe_OC1).round_().clamp_(-middle, middle - 1)
        squares_OC1 = (values_OCM * tried_OC1 - weight_OCM).square().sum(dim=-1, keepdim=True)
        better_OC1 = squares_OC1 < error_OC1
        best_OCM = torch.where(better_OC1, values_OCM, best_OCM)
        scale_OC1 = torch.where(better_OC1, tried_OC1, scale_OC1)
        error_OC1 = torch.where(better_OC1, squares_OC1, error_OC1)
    scales_OC.copy_(scale_OC1[:, :, 0])
    values_OD: Tensor = (best_OCM + middle).to(torch.uint8).view(weight_OD.shape)
    return values_OD if bits == 8 else values_OD[:, ::2] | (values_OD[:, 1::2] << 4)
