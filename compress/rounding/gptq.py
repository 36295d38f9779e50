"""Rounding with error feedback (GPTQ): what rounding a column changes in the outputs, the later columns make up for.

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

import torch
from torch import Tensor

from engine.kernels.quantized_weight import QuantizedWeight, packed, quantise
from engine.kernels.scheme import Scheme

DAMPING = 0.01
"""Share of the mean diagonal of H that is added to its diagonal."""
BLOCK = 128
"""Columns whose errors reach the columns after them in one product (algorithm 1)."""
MOST_WEIGHTS = 1 << 24
"""Weights of a matrix that are rounded at a time; rows do not depend on each other."""


def round_with_feedback(
    weight_OI: Tensor, moment_II: Tensor, scheme: Scheme, scale_dtype: torch.dtype = torch.float32
) -> QuantizedWeight:
    """Return a matrix rounded so that the error of its products is small on inputs with this second moment.

    moment_II: Σ x xᵀ up to a factor; computed in float64. Zero columns of it stand for inputs that were never used.
    """
    outputs, inputs = weight_OI.shape
    moment_II = moment_II.double()
    importance_I = moment_II.diagonal()
    scales_OC = quantise(weight_OI, *scheme, scale_dtype, importance_D=importance_I).scales_OC
    order_I = importance_I.argsort(descending=True, stable=True)
    factor_II = inverse_factor(moment_II[order_I][:, order_I])
    group_I = (torch.arange(inputs) // (inputs // scales_OC.shape[1]))[order_I]
    values_OI = torch.empty(outputs, inputs, dtype=torch.uint8)
    for rows in torch.arange(outputs).split(max(1, MOST_WEIGHTS // inputs)):
        sorted_OI = _integers(
            weight_OI[rows][:, order_I].double(), scales_OC[rows].double()[:, group_I], factor_II, scheme.bits
        )
        values_OI[rows] = torch.empty_like(sorted_OI).index_copy_(1, order_I, sorted_OI)
    return QuantizedWeight(packed(values_OI, scheme.bits), scales_OC, scheme.bits, inputs)


def inverse_factor(moment_II: Tensor) -> Tensor:
    """Return U, upper triangular, with Uᵀ·U = (H + damping)⁻¹. An H without any input counts as the identity."""
    mean = float(moment_II.diagonal().mean())
    if mean <= 0.0:
        return torch.eye(len(moment_II), dtype=moment_II.dtype)
    damped_II = moment_II + DAMPING * mean * torch.eye(len(moment_II), dtype=moment_II.dtype)
    factor_II: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped_II)), upper=True)
    return factor_II


def shrunk(sum_II: Tensor, tokens: float, prior_II: Tensor) -> Tensor:
    """Return the moment of an expert from its sum over some tokens and from a prior, both a mean over tokens afterwards."""
    inputs = len(sum_II)
    return (sum_II + inputs * prior_II) / (tokens + inputs)


def _integers(left_OI: Tensor, scales_OI: Tensor, factor_II: Tensor, bits: int) -> Tensor:
    """Return the stored integers [O, I], uint8, of columns in the order in which they are rounded."""
    middle, inputs = 2 ** (bits - 1), left_OI.shape[1]
    values_OI = torch.empty(left_OI.shape, dtype=torch.uint8)
    divisors_OI = torch.where(scales_OI == 0, 1.0, scales_OI)
    for start in range(0, inputs, BLOCK):
        end = min(start + BLOCK, inputs)
        errors_OB = torch.empty(len(left_OI), end - start, dtype=left_OI.dtype)
        for column in range(start, end):
            rounded_O = (left_OI[:, column] / divisors_OI[:, column]).round_().clamp_(-middle, middle - 1)
            error_O = (left_OI[:, column] - rounded_O * scales_OI[:, column]) / factor_II[column, column]
            left_OI[:, column:end].addr_(error_O, factor_II[column, column:end], alpha=-1.0)
            errors_OB[:, column - start] = error_O
            values_OI[:, column] = (rounded_O + middle).to(torch.uint8)
        left_OI[:, end:] -= errors_OB @ factor_II[start:end, end:]
    return values_OI
