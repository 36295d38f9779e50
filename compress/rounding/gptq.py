"""Rounding with error feedback (GPTQ): later columns make up for the output errors of the columns rounded before them.

GPTQ (Frantar et al. 2023), equations 2 and 3 and algorithm 1. For the inputs X of a matrix, H = Σ x xᵀ, and U is the upper
Cholesky factor of H⁻¹. Columns are rounded one after another:

    error_i = (w_i − Q(w_i)) / U_ii          w_j ← w_j − error_i · U_ij   for the columns j after i

Choices of this project:
- Columns are rounded in the order of falling H_ii, as the authors' implementation offers. The scales of the groups are
  chosen before, by the error weighted with H_ii, so that a group keeps its place and nothing about the order is stored.
- H is damped by 1 % of its mean diagonal, as in the authors' implementation.
- A moment of few tokens says little about the directions that they do not reach. With n tokens, H/n counts n / (n + I) and
  a prior I / (n + I): for matrices that read the layer's input, the mean over all tokens of the layer; for down projections,
  whose hidden units are the expert's own, the mean of the diagonal.

Shape suffixes: O outputs, I inputs of a matrix, C groups of a row, B columns of a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.stored.quantized_weight import ROUND_ELEMENTS, QuantizedWeight, packed, quantise
from engine.kernels.stored.scheme import Scheme

DAMPING = 0.01
"""Share of the mean diagonal of H that is added to its diagonal."""
BLOCK = 128
"""Columns whose errors reach the columns after them in one product (algorithm 1)."""
MOST_WEIGHTS = 1 << 22
"""Weights of a matrix that are rounded at a time; rows do not depend on each other."""
_FACTORS = 7
"""Matrices of the size of a moment, in float64, while it is factored: itself, sorted, the factors and the inverse."""
_PIECE_BYTES = 12 * 4 * ROUND_ELEMENTS
"""Temporary values while some rows are rounded to nearest."""


def factoring_bytes(inputs: int) -> int:
    """Return the bytes that `Feedback` takes for a moment [I, I] while it is factored."""
    return _FACTORS * 8 * inputs**2


def matrix_bytes(shape: tuple[int, ...]) -> int:
    """Return the bytes that `Feedback.round` takes for a matrix [O, I]: itself in float32, parts in float64, integers."""
    weights = math.prod(shape)
    return 3 * 4 * weights + 3 * 8 * min(weights, MOST_WEIGHTS) + _PIECE_BYTES


class Feedback:
    """The order of columns and the factor U, for the matrices that read one input."""

    def __init__(self, moment_II: Tensor) -> None:
        """moment_II: Σ x xᵀ of the input, up to a factor. A moment without any input counts as the identity."""
        moment_II = moment_II.double()
        damping = DAMPING * float(moment_II.diagonal().mean()) or 1.0
        self.importance_I = moment_II.diagonal() + damping
        """Diagonal of the damped H: how much the squared error of a column counts."""
        self.order_I = self.importance_I.argsort(descending=True, stable=True)
        sorted_II = moment_II[self.order_I][:, self.order_I]
        sorted_II.diagonal().add_(damping)
        self.factor_II: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(sorted_II)), upper=True)
        """U of the sorted columns: Uᵀ·U = H⁻¹."""

    def round(self, weight_OI: Tensor, scheme: Scheme, scale_dtype: torch.dtype = torch.float32) -> QuantizedWeight:
        """Return a matrix rounded so that the error of its products with the input is small. Computed in float64."""
        return self.round_all([(weight_OI, scheme)], scale_dtype)[0]

    def round_all(
        self, matrices: Sequence[tuple[Tensor, Scheme]], scale_dtype: torch.dtype = torch.float32
    ) -> list[QuantizedWeight]:
        """Return several matrices, each rounded as `round` does.

        Rows do not depend on each other, so those of all matrices with one group size go through the columns together.
        """
        scales = [
            quantise(weight_OI, *scheme, scale_dtype, importance_D=self.importance_I).scales_OC
            for weight_OI, scheme in matrices
        ]
        values: dict[int, Tensor] = {}
        for groups in {own.shape[1] for own in scales}:
            places = [place for place, own in enumerate(scales) if own.shape[1] == groups]
            weight_OI = torch.cat([matrices[place][0] for place in places])
            middle_O = torch.cat([torch.full((len(scales[each]),), 2.0 ** (matrices[each][1].bits - 1)) for each in places])
            stored_OI = self._integers_in_parts(weight_OI, torch.cat([scales[place] for place in places]), middle_O.double())
            values |= zip(places, stored_OI.split([len(scales[place]) for place in places]), strict=True)
        return [
            QuantizedWeight(packed(values[place], scheme.bits), scales[place], scheme.bits, weight_OI.shape[1])
            for place, (weight_OI, scheme) in enumerate(matrices)
        ]

    def _integers_in_parts(self, weight_OI: Tensor, scales_OC: Tensor, middle_O: Tensor) -> Tensor:
        """Return the stored integers [O, I], uint8, of MOST_WEIGHTS weights at a time."""
        outputs, inputs = weight_OI.shape
        values_OI = torch.empty(outputs, inputs, dtype=torch.uint8)
        for rows in torch.arange(outputs).split(max(1, MOST_WEIGHTS // inputs)):
            values_OI[rows] = self._integers(weight_OI[rows], scales_OC[rows], middle_O[rows])
        return values_OI

    def _integers(self, weight_OI: Tensor, scales_OC: Tensor, middle_O: Tensor) -> Tensor:
        """Return the stored integers [O, I], uint8. middle_O: 2^(bits−1) of each row."""
        inputs = weight_OI.shape[1]
        scales_CO = scales_OC.double().T.contiguous()
        divisors_CO = torch.where(scales_CO == 0, 1.0, scales_CO)
        groups = (self.order_I // (inputs // len(scales_CO))).tolist()
        left_IO = weight_OI.double().T[self.order_I]  # a column of the matrix is contiguous here
        values_IO = torch.empty(left_IO.shape, dtype=torch.uint8)
        for start in range(0, inputs, BLOCK):
            end = min(start + BLOCK, inputs)
            errors_BO = torch.empty(end - start, left_IO.shape[1], dtype=left_IO.dtype)
            for place in range(start, end):
                scale_O, divisor_O = scales_CO[groups[place]], divisors_CO[groups[place]]
                rounded_O = (left_IO[place] / divisor_O).round_().clamp_(-middle_O, middle_O - 1)
                error_O = (left_IO[place] - rounded_O * scale_O) / self.factor_II[place, place]
                left_IO[place:end].addr_(self.factor_II[place, place:end], error_O, alpha=-1.0)
                errors_BO[place - start] = error_O
                values_IO[place] = (rounded_O + middle_O).to(torch.uint8)
            left_IO[end:] -= self.factor_II[start:end, end:].T @ errors_BO
        return torch.empty_like(values_IO).index_copy_(0, self.order_I, values_IO).T.contiguous()


def shrunk(sum_II: Tensor, tokens: float, prior_II: Tensor) -> Tensor:
    """Return the mean moment of an expert: its sum over some tokens, and a prior that counts as many tokens as inputs."""
    inputs = len(sum_II)
    return (sum_II + inputs * prior_II) / (tokens + inputs)
