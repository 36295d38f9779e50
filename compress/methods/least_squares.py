"""Least squares for down projections, in closed form: they are changed so that they add what the output lacks.

With a_t = w_t·h_t the weighted hidden units of an FFN that stay, and r_t what the output lacks, over the FFN's tokens t:

    ΔD = argmin Σ_t ‖r_t − ΔD·a_t‖² + ρ̄·‖ΔD‖²  ⇒  ΔDᵀ = (Σ a·aᵀ + ρ̄·I)⁻¹·Σ a·rᵀ

The refit after units M left and units K stay has r_t = w_t·D_M·h_{t,M}. With H = Σ w²·h·hᵀ its solution is

    D′ = D_K + ΔD,    ΔDᵀ = (H_KK + ρ̄·I)⁻¹·H_KM·D_Mᵀ,    ρ̄ = ρ·mean(diag H)

which is the minimum of Σ_t w_t²·‖D·h_t − D′·h_{t,K}‖² + ρ̄·‖D′ − D_K‖². For FFNs with fewer tokens than units, or
too wide for a Gram matrix, H = AᵀA with n (sampled) rows A [n, F], and this solution is ΔD = E·(A_K·A_Kᵀ + ρ̄·I)⁻¹·A_K with
E = D_M·A_Mᵀ: a system of n equations.

Shape suffixes: F expert width, K units that stay, M units that left, D hidden size, R sampled rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from calibrate.unit_statistics import Moments
from engine.errors import DataError

RIDGES = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 1.0)
"""Values of ρ that are tried on the held-out part of the calibration text."""
FIRST_RIDGES = RIDGES[3:6]
"""Values that are tried first."""
DEFAULT_RIDGE = 1e-2
"""ρ where no token of the calibration text is held out."""
STRONGER = 10.0
"""Factor of a ridge that does not outweigh the rounding of a float32 Gram matrix."""


class Equations(Protocol):
    """The least squares problem of one FFN over some tokens. All problems of one FFN are of one class."""

    @property
    def scale(self) -> float:
        """mean(diag H), by which ρ is multiplied; 0 without any token."""

    def solved(self, ridge: float) -> Tensor:
        """Return ΔD [D, K] in float64."""

    def change(self, delta_DK: Tensor) -> float:
        """Return what ΔD changes in Σ_t ‖r_t − ΔD·a_t‖²; it is negative where ΔD helps."""

    def joined(self, other: Any) -> Equations:
        """Return the problem over the tokens of both."""


class NormalEquations(NamedTuple):
    """The problem by its sums, in float64."""

    gram_KK: Tensor
    """Σ a·aᵀ"""
    right_KD: Tensor
    """Σ a·rᵀ"""
    scale: float

    @classmethod
    def of(cls, gram_KK: Tensor, right_KD: Tensor) -> NormalEquations:
        """Return the problem with the scale of its own units."""
        return cls(gram_KK, right_KD, mean_square(gram_KK, is_gram=True))

    def joined(self, other: NormalEquations) -> NormalEquations:
        return NormalEquations.of(self.gram_KK + other.gram_KK, self.right_KD + other.right_KD)

    def solved(self, ridge: float) -> Tensor:
        factor_KK = factored(self.gram_KK, ridge * self.scale)
        return torch.cholesky_solve(self.right_KD, factor_KK).T.contiguous()

    def change(self, delta_DK: Tensor) -> float:
        return float(((delta_DK @ self.gram_KK) * delta_DK).sum() - 2.0 * (delta_DK.T * self.right_KD).sum())


class SampledEquations(NamedTuple):
    """The problem by rows of tokens, in float64."""

    a_RK: Tensor
    r_RD: Tensor
    scale: float

    @classmethod
    def of(cls, a_RK: Tensor, r_RD: Tensor) -> SampledEquations:
        """Return the problem with the scale of its own units."""
        return cls(a_RK, r_RD, mean_square(a_RK, is_gram=False))

    def joined(self, other: SampledEquations) -> SampledEquations:
        return SampledEquations.of(torch.cat([self.a_RK, other.a_RK]), torch.cat([self.r_RD, other.r_RD]))

    def solved(self, ridge: float) -> Tensor:
        factor_RR = factored(self.a_RK @ self.a_RK.T, ridge * self.scale)
        return torch.cholesky_solve(self.r_RD, factor_RR).T @ self.a_RK

    def change(self, delta_DK: Tensor) -> float:
        return float((self.r_RD - self.a_RK @ delta_DK.T).square().sum() - self.r_RD.square().sum())


class Narrowed(NamedTuple):
    """One expert that lost hidden units."""

    moments: Moments
    down_DF: Tensor
    kept: tuple[int, ...]

    @property
    def kept_DK(self) -> Tensor:
        """D_K in float64."""
        return self.down_DF[:, torch.tensor(self.kept)].double()

    def equations(self, moments: Tensor) -> Equations:
        """Return the refit's problem over the tokens of some moments, H [F, F] or A [R, F]."""
        kept_K, gone_M = torch.tensor(self.kept), self._gone()
        gone_DM, scale = self.down_DF[:, gone_M].double(), mean_square(moments, self.moments.is_gram)
        if not self.moments.is_gram:
            a_RK, a_RM = moments[:, kept_K].double(), moments[:, gone_M].double()
            return SampledEquations(a_RK, a_RM @ gone_DM.T, scale)
        rows_KF = moments[kept_K].double()
        return NormalEquations(rows_KF[:, kept_K], rows_KF[:, gone_M] @ gone_DM.T, scale)

    def lost(self, moments: Tensor) -> float:
        """Return Σ_t w_t²·‖D_M·h_{t,M}‖², which is lost without a refit."""
        gone_M = self._gone()
        own = moments[gone_M][:, gone_M] if self.moments.is_gram else moments[:, gone_M]
        return _energy(own, self.moments.is_gram, self.down_DF[:, gone_M])

    def energy(self, moments: Tensor) -> float:
        """Return Σ_t w_t²·‖D·h_t‖²."""
        return _energy(moments, self.moments.is_gram, self.down_DF)

    def _gone(self) -> Tensor:
        is_gone_F = torch.ones(self.down_DF.shape[1], dtype=torch.bool)
        is_gone_F[torch.tensor(self.kept)] = False
        return is_gone_F.nonzero().flatten()


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


def factored(gram: Tensor, absolute: float) -> Tensor:
    """Return the Cholesky factor of H + ρ̄·I, with a stronger ρ̄ where rounding made the matrix indefinite.

    Raises DataError where H holds NaN or infinity.
    """
    if not bool(gram.isfinite().all()):
        raise DataError("moments of hidden units hold NaN or infinity; activations overflow, try --dtype float32")
    identity = torch.eye(len(gram), dtype=gram.dtype)
    while True:
        factor: Tensor
        factor, failed = torch.linalg.cholesky_ex(gram + absolute * identity)
        if not bool(failed):
            return factor
        absolute *= STRONGER


def _energy(moments: Tensor, is_gram: bool, matrix_DF: Tensor) -> float:
    """Return tr(D·H·Dᵀ), from products in the dtype of the moments: a share of it is only reported."""
    own_DF = matrix_DF.to(moments.dtype)
    products = ((own_DF @ moments) * own_DF) if is_gram else (own_DF @ moments.T).square()
    return float(products.sum(dtype=torch.float64))


def refitted(own: Narrowed, moments: Tensor, ridge: float) -> Tensor:
    """Return D′ [D, K] in float64. moments: H [F, F], or A [R, F]. ridge: ρ. Without any token, D′ is D_K."""
    equations = own.equations(moments)
    return own.kept_DK + equations.solved(ridge) if equations.scale else own.kept_DK


def changes(fit: Equations, held: Equations, ridges: Iterable[float]) -> dict[float, float]:
    """Return, for each ρ, what the solution on the fitted tokens changes in the error on the held-out ones."""
    return {ridge: held.change(fit.solved(ridge)) if fit.scale else 0.0 for ridge in ridges}


def best_ridge(errors_of: Callable[[Sequence[float]], dict[float, float]]) -> tuple[float, float]:
    """Return the ρ of RIDGES with the smallest error, and its error.

    errors_of: returns the error of each ρ that it is given. It is asked for three of them, and then for those beside the
    best until both neighbors are worse, because each ρ costs a factorization. Usually there is no other minimum.
    """
    errors = errors_of(FIRST_RIDGES)
    while True:
        best = min(errors, key=lambda ridge: errors[ridge])
        place = RIDGES.index(best)
        beside = [ridge for ridge in RIDGES[max(0, place - 1) : place + 2] if ridge not in errors]
        if not beside:
            return best, errors[best]
        errors |= errors_of(beside)


def refit_layer(
    experts: Callable[[], Iterable[Narrowed]], ridge: float | None = None, dtype: torch.dtype = torch.float32
) -> Fitted:
    """Return the refit of a layer's experts that lost units, with one ridge; None chooses it on the held-out moments.

    The ridge is chosen with the fitted part alone; the result is then fitted to both parts. experts: returns the experts
    anew in each call, so that the moments of one are in memory at a time. dtype: of the result.
    """
    without, whole = (sum(each) for each in zip(*map(_held_out, experts()), strict=True))

    def changes_of(ridges: Sequence[float]) -> dict[float, float]:
        found = [changes(own.equations(own.moments.fit), own.equations(own.moments.held), ridges) for own in experts()]
        return {each: sum(own[each] for own in found) for each in ridges}

    if not whole:
        chosen, changed = DEFAULT_RIDGE if ridge is None else ridge, 0.0
    else:
        chosen, changed = best_ridge(changes_of) if ridge is None else (ridge, changes_of([ridge])[ridge])
    downs = [refitted(own, _both(own.moments), chosen).to(dtype) for own in experts()]
    shares = (without / whole, max(0.0, without + changed) / whole) if whole else (None, None)
    return Fitted(downs, chosen, *shares)


def _held_out(own: Narrowed) -> tuple[float, float]:
    """Return what an expert lost on the held-out tokens without a refit, and the energy of its outputs."""
    return own.lost(own.moments.held), own.energy(own.moments.held)


def _both(moments: Moments) -> Tensor:
    return moments.fit + moments.held if moments.is_gram else torch.cat([moments.fit, moments.held])
