"""The steps of rounding to K types that read every number, by torch.

Shape suffixes: N numbers of a sub-block, L sub-blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_STRETCHES = tuple(step / 8 for step in range(-8, 9))
"""Differences that are tried from the number of levels into which the range of a sub-block is divided."""
_MANY_LEVELS = 32
"""Levels above zero from which a type without minimums tries only every fourth difference: its ends matter less."""
LEAST_DETERMINANT = 1e-6
"""The least determinant of two equations, over the product of its diagonal, for which they are solved."""


@dataclass(frozen=True)
class Integers:
    """The integers of a type: those of its numbers, and those of the scales of its sub-blocks."""

    lowest: int
    highest: int
    lowest_scale: int
    highest_scale: int

    @property
    def has_minimums(self) -> bool:
        """Return whether a sub-block has a minimum beside its scale: x ≈ d·s·q − m·l."""
        return self.lowest == 0

    @property
    def factors(self) -> tuple[float, ...]:
        """Return what the range, or the extreme number, of a sub-block is divided into, in turn."""
        if self.has_minimums:
            return tuple(self.highest + stretch for stretch in _STRETCHES)
        ends = tuple(
            self.lowest - stretch for stretch in (_STRETCHES[::4] if self.highest + 1 >= _MANY_LEVELS else _STRETCHES)
        )
        return (*ends, *(-1 - end for end in ends))  # the extreme number at either end


def safe(divisor: Tensor) -> Tensor:
    """Return divisors, those of zero as one."""
    return torch.where(divisor == 0, torch.ones_like(divisor), divisor)


class Steps:
    """The steps of some sub-blocks. Weights w say how much the squared error of a number counts."""

    def __init__(self, x_NL: Tensor, w_NL: Tensor, integers: Integers) -> None:
        """All tensors, here and below, are float32 and contiguous."""
        self.x_NL, self.w_NL, self.integers = x_NL, w_NL, integers

    def affine_fit(self, low_L: Tensor, span_L: Tensor) -> tuple[Tensor, Tensor]:
        """Return the best scales and minimums by least squares, for the best of several assignments of integers.

        low_L: the least numbers, or zero. span_L: the ranges above them.
        """
        wx_NL = self.w_NL * self.x_NL
        w1, x1 = self.w_NL.sum(0), wx_NL.sum(0)
        best = [torch.full_like(low_L, torch.inf), span_L / self.integers.highest, -low_L]
        for factor in self.integers.factors:
            q_NL = self._rounded((self.x_NL - low_L) * (factor / safe(span_L)))
            wq_NL = self.w_NL * q_NL
            q1, q2, xq = wq_NL.sum(0), (wq_NL * q_NL).sum(0), (wx_NL * q_NL).sum(0)
            determinant = w1 * q2 - q1 * q1
            # Where all numbers get one integer, the equations are dependent, and the minimum stays zero.
            determinant = torch.where(determinant > LEAST_DETERMINANT * w1 * q2, determinant, torch.inf)
            offset = ((q2 * x1 - q1 * xq) / determinant).clamp_max_(0)
            scale = ((xq - offset * q1) / safe(q2)).clamp_min_(0)
            # Σ w·(s·q + o − x)², without Σ w·x², which is the same for all candidates
            error = scale * (scale * q2 - 2 * xq) + offset * (2 * scale * q1 + offset * w1 - 2 * x1)
            best = _better([error, scale, -offset], best)
        return best[1], best[2]

    def symmetric_fit(self, extreme_L: Tensor) -> Tensor:
        """Return the best scales by least squares. extreme_L: the numbers farthest from zero."""
        wx_NL = self.w_NL * self.x_NL
        best = [torch.zeros_like(extreme_L), extreme_L / self.integers.lowest]
        for factor in self.integers.factors:
            q_NL = self._rounded(self.x_NL * (factor / safe(extreme_L)))
            xq, q2 = (wx_NL * q_NL).sum(0), (self.w_NL * q_NL * q_NL).sum(0)
            scale = xq / safe(q2)
            best = _better([-scale * xq, scale], best)
        return best[1]

    def neighbors(self, s_L: Tensor, l_L: Tensor, d_L: Tensor, m_L: Tensor, near: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the least errors of integers s and l up to `near` away from those given, and these integers.

        d_L, m_L: what the integers of scales and minimums are multiplied by.
        """
        limits, near_least = (self.integers.lowest_scale, self.integers.highest_scale), near * self.integers.has_minimums
        best = [torch.full_like(s_L, torch.inf), torch.zeros_like(s_L), torch.zeros_like(s_L)]
        for step in range(-near, near + 1):
            for other in range(-near_least, near_least + 1):
                scale, least = (s_L + step).clamp(*limits), (l_L + other).clamp(0, limits[1])
                error = (self.kept(scale, least, d_L, m_L) - self.x_NL).square_().mul_(self.w_NL).sum(0)
                best = _better([error, scale, least], best)
        return best[0], best[1], best[2]

    def sums(self, s_L: Tensor, l_L: Tensor, d_L: Tensor, m_L: Tensor) -> Tensor:
        """Return Σ w·a², Σ w·a·b, Σ w·b², Σ w·x·a and Σ w·x·b for x ≈ d·a + m·b, a = s·q and b = −l: [5, L]."""
        a, b = s_L * self.integers_of(s_L, l_L, d_L, m_L), (-l_L).expand_as(self.x_NL)
        wa, wb = self.w_NL * a, self.w_NL * b
        pairs = ((wa, a), (wa, b), (wb, b), (wa, self.x_NL), (wb, self.x_NL))
        return torch.stack([(one * other).sum(0) for one, other in pairs])

    def integers_of(self, s_L: Tensor, l_L: Tensor, d_L: Tensor, m_L: Tensor) -> Tensor:
        """Return the integers of all numbers, [N, L]."""
        return self._rounded((self.x_NL + m_L * l_L) * (1 / safe(d_L * s_L)))

    def kept(self, s_L: Tensor, l_L: Tensor, d_L: Tensor, m_L: Tensor) -> Tensor:
        """Return what is kept of all numbers, [N, L]."""
        return d_L * s_L * self.integers_of(s_L, l_L, d_L, m_L) - m_L * l_L

    def _rounded(self, values_NL: Tensor) -> Tensor:
        return values_NL.round_().clamp_(self.integers.lowest, self.integers.highest)


def _better(found: list[Tensor], best: list[Tensor]) -> list[Tensor]:
    """Return, for each sub-block, the candidate with the smaller error, which is the first one of the list."""
    is_better = found[0] < best[0]
    return [torch.where(is_better, *pair) for pair in zip(found, best, strict=True)]
