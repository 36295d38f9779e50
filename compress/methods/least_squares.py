"""The refit of down projections after hidden units were removed, in closed form.

With H = Σ w²·h·hᵀ over the tokens of an expert, D its down projection and K the units that stay:

    D′ = argmin Σ_t w_t²·‖D·h_t − D′·h_{t,K}‖² + ρ̄·‖D′ − D_K‖²,    ρ̄ = ρ·mean(diag H)
    D′ᵀ = (H_KK + ρ̄·I)⁻¹ (H_{K,:}·Dᵀ + ρ̄·D_Kᵀ)

For experts too wide for a Gram matrix, H = AᵀA with n sampled rows A [n, F]. The same solution is then

    D′ = D_K + E·(A_K·A_Kᵀ + ρ̄·I)⁻¹·A_K,    E = D_M·A_Mᵀ

where M are the units that left: a system of n equations in the place of F.

Shape suffixes: F expert width, K units that stay, D hidden size, R sampled rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from calibrate.unit_statistics import Moments
from engine.errors import DataError

RIDGES = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 1.0)
"""Values of ρ that are tried on the held-out part of the calibration text."""
DEFAULT_RIDGE = 1e-2
"""ρ where no token of the calibration text is held out."""
STRONGER = 10.0
"""Factor of a ridge that does not outweigh the rounding of a float32 Gram matrix."""


class Narrowed(NamedTuple):
    """One expert that lost hidden units."""

    moments: Moments
    down_DF: Tensor
    kept: tuple[int, ...]


class Fitted(NamedTuple):
    """The refit of one layer."""

    downs: list[Tensor]
    """D′ [D, K] of each expert."""
    ridge: float
    error_without: float | None
    """Share of the experts' mean square outputs on held-out text that is lost without the refit; None without that text."""
    error: float | None
    """Share that is lost after the refit."""


def mean_square(moments: Tensor, is_gram: bool) -> float:
    """Return mean(diag H)."""
    return float(moments.diagonal().double().mean() if is_gram else moments.double().square().sum(0).mean())


def refitted(moments: Tensor, is_gram: bool, down_DF: Tensor, kept: Sequence[int], ridge: float) -> Tensor:
    """Return D′ [D, K] in float64. moments: H [F, F], or A [R, F]. ridge: ρ. Without any token, D′ is D_K."""
    wide_DF, kept_K = down_DF.double(), torch.tensor(kept)
    own_DK = wide_DF[:, kept_K]
    absolute = ridge * mean_square(moments, is_gram)
    if absolute == 0.0:
        return own_DK
    if is_gram:
        rows_KF = moments.double()[kept_K]
        factor_KK, absolute = factored(rows_KF[:, kept_K], absolute)
        right_KD = rows_KF @ wide_DF.T + absolute * own_DK.T
        return torch.cholesky_solve(right_KD, factor_KK).T.contiguous()
    sample_RF = moments.double()
    sample_RK = sample_RF[:, kept_K]
    missing_DR = wide_DF @ sample_RF.T - own_DK @ sample_RK.T
    factor_RR, _ = factored(sample_RK @ sample_RK.T, absolute)
    return own_DK + torch.cholesky_solve(missing_DR.T, factor_RR).T @ sample_RK


def factored(moments: Tensor, absolute: float) -> tuple[Tensor, float]:
    """Return the Cholesky factor of H + ρ̄·I, and ρ̄: a stronger one where rounding made the matrix indefinite.

    Raises DataError where H holds NaN or infinity.
    """
    if not bool(moments.isfinite().all()):
        raise DataError("moments of hidden units hold NaN or infinity; activations overflow, try --dtype float32")
    identity = torch.eye(len(moments), dtype=moments.dtype)
    while True:
        factor, failed = torch.linalg.cholesky_ex(moments + absolute * identity)
        if not bool(failed):
            return factor, absolute
        absolute *= STRONGER


def lost(moments: Tensor, is_gram: bool, down_DF: Tensor, kept: Sequence[int], down_DK: Tensor) -> float:
    """Return Σ_t w_t²·‖D·h_t − D′·h_{t,K}‖²."""
    difference_DF = down_DF.double().clone()
    difference_DF[:, torch.tensor(kept)] -= down_DK.double()
    return _energy(moments, is_gram, difference_DF)


def _energy(moments: Tensor, is_gram: bool, matrix_DF: Tensor) -> float:
    if is_gram:
        return float(((matrix_DF @ moments.double()) * matrix_DF).sum())
    return float((matrix_DF @ moments.double().T).square().sum())


def refit_layer(
    experts: Callable[[], Iterable[Narrowed]], ridge: float | None = None, dtype: torch.dtype = torch.float32
) -> Fitted:
    """Return the refit of a layer's experts that lost units, with one ridge; None chooses it on the held-out moments.

    The ridge is chosen with the fitted part alone; the result is then fitted to both parts. experts: returns the experts
    anew in each call, so that the moments of one are in memory at a time. dtype: of the result.
    """
    errors = dict.fromkeys(RIDGES if ridge is None else (ridge,), 0.0)
    whole = without = 0.0
    for own in experts():
        without += lost(own.moments.held, own.moments.is_gram, own.down_DF, own.kept, _kept(own))
        whole += _energy(own.moments.held, own.moments.is_gram, own.down_DF.double())
        for each in errors:
            errors[each] += _held_error(own, each)
    chosen = DEFAULT_RIDGE if ridge is None and not whole else min(errors, key=lambda each: errors[each])
    errors.setdefault(chosen, 0.0)
    downs = [refitted(_both(own.moments), own.moments.is_gram, own.down_DF, own.kept, chosen).to(dtype) for own in experts()]
    shares = (without / whole, errors[chosen] / whole) if whole else (None, None)
    return Fitted(downs, chosen, *shares)


def _kept(own: Narrowed) -> Tensor:
    return own.down_DF[:, torch.tensor(own.kept)]


def _held_error(own: Narrowed, ridge: float) -> float:
    moments = own.moments
    down_DK = refitted(moments.fit, moments.is_gram, own.down_DF, own.kept, ridge)
    return lost(moments.held, moments.is_gram, own.down_DF, own.kept, down_DK)


def _both(moments: Moments) -> Tensor:
    return moments.fit + moments.held if moments.is_gram else torch.cat([moments.fit, moments.held])
