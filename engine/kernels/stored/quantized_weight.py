"""Weights of 8, 4, 3 or 2 bits: a few weights of a row share a scale, and products read the weights as they are stored.

weight = scale · (stored − 2^(bits−1)). Weights are rounded to nearest. With 4 bits and fewer, several scales are tried for
each group, and the scale with the least squared error is taken; with 3 and 2 bits it is then fitted to the integers found.

Shape suffixes: O outputs, D inputs, B bytes of a row, C groups of a row, M weights of one group.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from engine.kernels.kernel_choice import is_served
from engine.kernels.stored.scheme import WHOLE_ROW

_SHARES = {
    8: (1.0,),
    4: (1.0, 0.95, 0.9, 0.85, 0.8),
    3: (1.0, 1.1, 0.9, 0.8, 0.7, 0.6, -1.1, -1.0, -0.9, -0.8, -0.7),
    2: (1.0, 1.2, 1.1, 0.9, 0.8, 0.7, 0.6, 0.5, -1.2, -1.1, -1.0, -0.9, -0.8, -0.7, -0.6, -0.5),
}
"""Fractions of a group's largest weight that may become the largest quantized value. Larger weights are clipped.

The lowest value has no positive counterpart, and the scale's sign says on which side it lies: that of the largest weight, or
the other side for negative fractions. These are tried with 3 and 2 bits only, where one value more is a large part of all.
"""
_FITTED_BITS = 3
"""Most bits with which the scale is fitted to the integers of the best fraction, by least squares."""
ROUND_ELEMENTS = 1 << 20
"""Number of weights that are rounded at a time. It limits the memory of the temporary values."""


class LowBitWeight(nn.Module):
    """A weight [O, D] in the place of a parameter, which products read as it is stored.

    It is a module, so that its buffers move between devices and are counted together with the parameters.
    """

    kind: int | str
    """Bits of a weight, or the name of a type of blocks."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.shape = shape

    @property
    @abstractmethod
    def addresses(self) -> tuple[int, int]:
        """Two addresses, from which the kernels read the weight."""

    @abstractmethod
    def product_form(self, kernels: Any) -> Any:
        """Return the form in which the kernels multiply the weight; None if they cannot."""

    @abstractmethod
    def widened_form(self, kernels: Any) -> Any:
        """Return the form in which the kernels widen the weight to bfloat16; None if they cannot."""

    @abstractmethod
    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantized weight [O, D], rounded once to `dtype`."""


class QuantizedWeight(LowBitWeight):
    """A weight of 8, 4, 3 or 2 bits. Its bytes stay where and as they were given."""

    packed_OB: Tensor
    """uint8. A row is one long number, whose lowest bits are its first weight. It may end in unused bytes."""
    scales_OC: Tensor
    """Scales of any floating dtype. The scales of a row are contiguous."""

    def __init__(self, packed_OB: Tensor, scales_OC: Tensor, bits: int, inputs: int) -> None:
        super().__init__((packed_OB.shape[0], inputs))
        self.register_buffer("packed_OB", packed_OB)
        self.register_buffer("scales_OC", scales_OC)
        self.bits = self.kind = bits

    @property
    def nbytes(self) -> int:
        """Stored size in bytes."""
        return self.packed_OB.nbytes + self.scales_OC.nbytes

    @property
    def group_size(self) -> int:
        """Number of weights that share a scale."""
        return self.shape[1] // self.scales_OC.shape[1]

    @property
    def addresses(self) -> tuple[int, int]:
        """Return the addresses of the first row's bytes and scales."""
        return self.packed_OB.data_ptr(), self.scales_OC.data_ptr()

    def product_form(self, kernels: Any) -> Any:
        """Return the form in which the kernels multiply the weight; None if they cannot."""
        served = (
            kernels.MULTIPLIES_INTEGERS
            and self._is_served
            and self.shape[0] % kernels.MULTIPLE_OF_OUTPUTS == 0
            and self.group_size in kernels.GROUP_SIZES
        )
        return (self.bits, self.group_size) if served else None

    def widened_form(self, kernels: Any) -> Any:
        """Return the form in which the kernels widen the weight to bfloat16; None if they cannot."""
        served = self._is_served and self.group_size % kernels.ROUNDED == 0
        return (self.bits, self.group_size) if served else None

    @property
    def _is_served(self) -> bool:
        """Whether the kernels read the scales, and the rows lie without gaps."""
        has_gaps = self.packed_OB.shape[1] * 8 != self.shape[1] * self.bits
        return is_served(self.scales_OC) and self.packed_OB.is_contiguous() and not has_gaps

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantized weight [O, D], rounded once to `dtype`."""
        (outputs, inputs), groups = self.shape, self.scales_OC.shape[1]
        values_OD = unpacked(self.packed_OB, self.bits)
        # A product in the scale's own dtype is rounded once too, because the other factor has 8 bits at most.
        wide = dtype if dtype == self.scales_OC.dtype else torch.promote_types(dtype, torch.float32)
        weight_OCM = values_OD[:, :inputs].to(wide).view(outputs, groups, -1)
        weight_OCM.sub_(2 ** (self.bits - 1)).mul_(self.scales_OC.to(wide)[:, :, None])
        return weight_OCM.view(outputs, inputs).to(dtype)

    def taken(self, places: Tensor) -> QuantizedWeight:
        """Return a weight of the rows at these places."""
        return QuantizedWeight(self.packed_OB[places], self.scales_OC[places], self.bits, self.shape[1])

    def extra_repr(self) -> str:
        """Return the text that `repr` shows for the module."""
        return f"{self.shape[0]}, {self.shape[1]}, bits={self.bits}, group_size={self.group_size}"


Weight = Tensor | LowBitWeight


def frozen(weight: Weight) -> nn.Parameter | LowBitWeight:
    """Return a weight in the form that a module keeps as an attribute."""
    return weight if isinstance(weight, LowBitWeight) else nn.Parameter(weight, requires_grad=False)


def as_tensor(weight: Weight) -> Tensor:
    """Return a weight that is not quantized to low bits, as norms, biases and routers never are."""
    assert isinstance(weight, Tensor)
    return weight


def frozen_tensor(weight: Weight) -> nn.Parameter:
    """Return such a weight in the form that a module keeps as an attribute."""
    return nn.Parameter(as_tensor(weight), requires_grad=False)


def moved(weight: Weight, dtype: torch.dtype, device: torch.device | str) -> Weight:
    """Return the weight on this device, and in this dtype unless it is low-bit. A weight that fits is returned itself."""
    return weight.to(device) if isinstance(weight, LowBitWeight) else weight.to(device=device, dtype=dtype)


def quantise(
    weight_OD: Tensor,
    bits: int,
    group_size: int,
    scale_dtype: torch.dtype = torch.float32,
    importance_D: Tensor | None = None,
) -> QuantizedWeight:
    """Round each group to 2^bits values. `group_size` divides D, or is WHOLE_ROW.

    importance_D: how much the squared error in each column counts where a scale is chosen; by default, all count as much.
    """
    outputs, inputs = weight_OD.shape
    groups = 1 if group_size == WHOLE_ROW else inputs // group_size
    packed_OB = torch.empty(outputs, inputs * bits // 8, dtype=torch.uint8, device=weight_OD.device)
    scales_OC = torch.empty(outputs, groups, dtype=scale_dtype, device=weight_OD.device)
    step = max(1, ROUND_ELEMENTS // inputs)
    for start in range(0, outputs, step):
        rows = slice(start, start + step)
        packed_OB[rows] = _rounded(weight_OD[rows].float(), bits, scales_OC[rows], importance_D)
    return QuantizedWeight(packed_OB, scales_OC, bits, inputs)


def packed(values_OD: Tensor, bits: int) -> Tensor:
    """Return the bytes [O, B] of stored integers from 0 to 2^bits − 1, uint8. D · bits is a multiple of 8."""
    if bits == 3:  # eight integers in three bytes
        parts_OG8 = values_OD.int().view(len(values_OD), -1, 8) << _shifts(values_OD, 8, 3)
        number_OG1 = parts_OG8.sum(dim=-1, keepdim=True, dtype=torch.int32)
        return (number_OG1 >> _shifts(values_OD, 3, 8)).to(torch.uint8).flatten(1)
    bytes_OB = values_OD[:, :: 8 // bits]
    for place in range(1, 8 // bits):
        bytes_OB = bytes_OB | (values_OD[:, place :: 8 // bits] << (place * bits))
    return bytes_OB


def unpacked(packed_OB: Tensor, bits: int) -> Tensor:
    """Return the integers from 0 to 2^bits − 1 that bytes hold, [O, ≥ D]: unused bytes at the end of a row count as well."""
    if bits == 8:
        return packed_OB
    if bits == 3:
        parts_OG3 = nn.functional.pad(packed_OB, (0, -packed_OB.shape[1] % 3)).int().view(len(packed_OB), -1, 3)
        number_OG1 = (parts_OG3 << _shifts(packed_OB, 3, 8)).sum(dim=-1, keepdim=True, dtype=torch.int32)
        return (number_OG1 >> _shifts(packed_OB, 8, 3) & 7).flatten(1)
    low = 2**bits - 1
    return torch.stack([packed_OB >> (place * bits) & low for place in range(8 // bits)], dim=-1).flatten(1)


def _shifts(like: Tensor, count: int, bits: int) -> Tensor:
    """Return 0, `bits`, 2 · `bits`, …"""
    return torch.arange(0, count * bits, bits, dtype=torch.int32, device=like.device)


def _rounded(weight_OD: Tensor, bits: int, scales_OC: Tensor, importance_D: Tensor | None) -> Tensor:
    """Return the packed bytes [O, B] of some rows, and write their scales to `scales_OC`."""
    middle = 2 ** (bits - 1)
    weight_OCM = weight_OD.view(*scales_OC.shape, -1)
    # The weight of largest magnitude becomes −2^(bits−1), which has no positive counterpart, so the scale takes its sign.
    size_OC1, place_OC1 = weight_OCM.abs().max(dim=-1, keepdim=True)
    largest_OC1 = weight_OCM.gather(-1, place_OC1)
    importance_CM = 1.0 if importance_D is None else importance_D.to(weight_OCM).view(scales_OC.shape[1], -1)
    best_OCM, scale_OC1, error_OC1 = weight_OCM, size_OC1, torch.full_like(size_OC1, torch.inf)
    for share in _SHARES[bits]:
        tried_OC1 = (largest_OC1 * (-share / middle)).to(scales_OC.dtype).float()
        safe_OC1 = torch.where(tried_OC1 == 0, 1.0, tried_OC1)
        values_OCM = (weight_OCM / safe_OC1).round_().clamp_(-middle, middle - 1)
        squares_OC1 = (values_OCM * tried_OC1 - weight_OCM).square().mul_(importance_CM).sum(dim=-1, keepdim=True)
        better_OC1 = squares_OC1 < error_OC1
        best_OCM = torch.where(better_OC1, values_OCM, best_OCM)
        scale_OC1 = torch.where(better_OC1, tried_OC1, scale_OC1)
        error_OC1 = torch.where(better_OC1, squares_OC1, error_OC1)
    if bits <= _FITTED_BITS:
        best_OCM, scale_OC1 = _fitted(weight_OCM, best_OCM, scale_OC1, error_OC1, importance_CM, scales_OC.dtype, middle)
    scales_OC.copy_(scale_OC1[:, :, 0])
    return packed((best_OCM + middle).to(torch.uint8).view(weight_OD.shape), bits)


def _fitted(
    weight_OCM: Tensor,
    values_OCM: Tensor,
    scale_OC1: Tensor,
    error_OC1: Tensor,
    importance_CM: Tensor | float,
    scale_dtype: torch.dtype,
    middle: int,
) -> tuple[Tensor, Tensor]:
    """Return integers and scales after one step of least squares, scale = Σ w·q / Σ q², where it lowers the error."""
    weighted_OCM = values_OCM * importance_CM
    square_OC1 = (weighted_OCM * values_OCM).sum(dim=-1, keepdim=True)
    fit_OC1 = (weighted_OCM * weight_OCM).sum(dim=-1, keepdim=True) / torch.where(square_OC1 == 0, 1.0, square_OC1)
    fit_OC1 = fit_OC1.to(scale_dtype).float()
    again_OCM = (weight_OCM / torch.where(fit_OC1 == 0, 1.0, fit_OC1)).round_().clamp_(-middle, middle - 1)
    squares_OC1 = (again_OCM * fit_OC1 - weight_OCM).square().mul_(importance_CM).sum(dim=-1, keepdim=True)
    better_OC1 = squares_OC1 < error_OC1
    return torch.where(better_OC1, again_OCM, values_OCM), torch.where(better_OC1, fit_OC1, scale_OC1)
