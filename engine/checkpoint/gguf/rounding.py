"""Numbers rounded to GGUF's K types: the scales of each block are searched for the least weighted squared error.

A block of 256 numbers has S sub-blocks, whose scales (and minimums) are integers times one float16 scale of the block. With
a weight w for each number, Σ w·(x − x̂)² is minimized: w = Σ h² over the inputs h of a matrix's columns gives the error of
its products, as far as inputs are uncorrelated; without statistics, w = 1.

First each sub-block gets real scales: a grid of candidates assigns integers q to numbers, and least squares gives the best
scale for them. Then these scales are rounded to integers, and their neighbors are tried, with the float16 scale that follows
from the largest, and once more with the best one for the integers found. A block keeps the scales that span its numbers, if
those are better. The layouts are inverse to blocks.py.

Shape suffixes: B blocks, S sub-blocks, N numbers of a sub-block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from engine.errors import UnsupportedError
from engine.files.gguf_types import BlockType

_BLOCKS_AT_ONCE = 1 << 11
_STRETCHES = tuple(step / 8 for step in range(-8, 9))
"""Differences of the number of levels that the range of a sub-block is divided by."""
_LARGEST = 65504.0
"""The largest float16."""


@dataclass(frozen=True)
class _Found:
    """The integers of some blocks, and the block's float16 scales."""

    scale_B: Tensor
    scales_BS: Tensor
    q_BSN: Tensor
    error_B: Tensor
    least_B: Tensor
    leasts_BS: Tensor
    """Zero for types without minimums, as is their scale."""

    def or_better(self, other: _Found) -> _Found:
        """Return, for each block, the one with the smaller error."""
        is_other_B = other.error_B < self.error_B

        def chosen(own: Tensor, theirs: Tensor) -> Tensor:
            return torch.where(is_other_B.view(-1, *[1] * (own.dim() - 1)), theirs, own)

        return _Found(*(chosen(getattr(self, part.name), getattr(other, part.name)) for part in fields(self)))


def rounded_to_k(numbers: Tensor, kind: BlockType, weights_I: Tensor | None = None) -> Tensor:
    """Return the blocks of a matrix as bytes, uint8 [rows, bytes of a row]. numbers: [rows, inputs].

    weights_I: how much the squared error of each column counts. Raises UnsupportedError for numbers that are too large.
    """
    rows, inputs = numbers.shape
    x, form = numbers.float().reshape(-1, kind.numbers), _FORMS[kind.name]
    w = torch.ones(1, inputs) if weights_I is None else _usable(weights_I).view(1, -1)
    w = w.reshape(-1, kind.numbers)
    blocks = torch.empty(len(x), kind.bytes, dtype=torch.uint8)
    for start in range(0, len(x), _BLOCKS_AT_ONCE):
        own = slice(start, min(start + _BLOCKS_AT_ONCE, len(x)))
        w_BI = w[torch.arange(own.start, own.stop) % len(w)]
        blocks[own] = form.pack(form.search(x[own].unflatten(1, form.parts), w_BI.unflatten(1, form.parts)))
    return blocks.view(rows, -1)


def _usable(weights_I: Tensor) -> Tensor:
    """Return weights with a mean of 1; columns without any get a small one, so that their numbers are not arbitrary."""
    mean = weights_I.double().mean()
    if not bool(mean > 0) or not bool(mean.isfinite()):
        return torch.ones_like(weights_I, dtype=torch.float32)
    return (weights_I.double() / mean).clamp_min(1e-6).float()


def _safe(divisor: Tensor) -> Tensor:
    return torch.where(divisor == 0, torch.ones_like(divisor), divisor)


def _half(scale_B: Tensor) -> Tensor:
    """Return a scale rounded to float16."""
    if bool((scale_B.abs() > _LARGEST).any()) or not bool(scale_B.isfinite().all()):
        raise UnsupportedError("has numbers that are too large for a K type; write it as bf16 or f32")
    return scale_B.half().float()


def _affine(levels: int, largest: int) -> Callable[[Tensor, Tensor], _Found]:
    """Return the search for x ≈ s·q − m, 0 ≤ q ≤ levels, where s and m are integers up to `largest` times a scale."""

    def search(x_BSN: Tensor, w_BSN: Tensor) -> _Found:
        low_BS = x_BSN.amin(-1).clamp_max(0)
        span_BS = x_BSN.amax(-1) - low_BS

        def integers(
            scale_BS: Tensor, least_BS: Tensor, units: tuple[Tensor, Tensor] | None = None, near: int = 1
        ) -> _Found:
            units = (scale_BS.amax(-1) / largest, least_BS.amax(-1) / largest) if units is None else units
            return _affine_integers(x_BSN, w_BSN, (scale_BS, least_BS), units, levels, largest, near)

        found = integers(*_affine_fit(x_BSN, w_BSN, low_BS, span_BS, levels))
        d_B, m_B = (own.clamp_min(0) for own in _best_units(x_BSN, w_BSN, found))
        again = integers(d_B[:, None] * found.scales_BS, m_B[:, None] * found.leasts_BS, (d_B, m_B))
        return found.or_better(again).or_better(integers(span_BS / levels, -low_BS, near=0))

    return search


def _affine_fit(x_BSN: Tensor, w_BSN: Tensor, low_BS: Tensor, span_BS: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Return the scales and minimums of sub-blocks by least squares, for the best of a grid of assignments."""
    wx_BSN = w_BSN * x_BSN
    sums, best = (w_BSN.sum(-1), wx_BSN.sum(-1)), [torch.full_like(low_BS, torch.inf), span_BS / levels, -low_BS]
    for stretch in _STRETCHES:
        inverse_BS = (levels + stretch) / _safe(span_BS)
        q_BSN = ((x_BSN - low_BS[..., None]) * inverse_BS[..., None]).round_().clamp_(0, levels)
        wq_BSN = w_BSN * q_BSN
        q1, q2, xq = wq_BSN.sum(-1), (wq_BSN * q_BSN).sum(-1), (wx_BSN * q_BSN).sum(-1)
        w1, x1 = sums
        offset = ((q2 * x1 - q1 * xq) / _safe(w1 * q2 - q1 * q1)).clamp_max_(0)
        scale = ((xq - offset * q1) / _safe(q2)).clamp_min_(0)
        # Σ w·(s·q + o − x)², without Σ w·x², which is the same for all candidates
        error = scale * (scale * q2 - 2 * xq) + offset * (2 * scale * q1 + offset * w1 - 2 * x1)
        is_better = error < best[0]
        best = [torch.where(is_better, own, old) for own, old in zip((error, scale, -offset), best, strict=True)]
    return best[1], best[2]


def _affine_integers(
    x_BSN: Tensor,
    w_BSN: Tensor,
    real: tuple[Tensor, Tensor],
    units: tuple[Tensor, Tensor],
    levels: int,
    largest: int,
    near: int,
) -> _Found:
    """Return the integers of scales and minimums; those up to `near` away from the rounded ones are tried.

    real: scales and minimums, [B, S]. units: what the integers are multiplied by, [B].
    """
    d_B, m_B = map(_half, units)
    scales, leasts = (
        (own / _safe(unit)[:, None]).round().clamp(0, largest) for own, unit in zip(real, (d_B, m_B), strict=True)
    )
    best: list[Tensor] = []
    for step in range(-near, near + 1):
        for other in range(-near, near + 1):
            s_BS, l_BS = (scales + step).clamp(0, largest), (leasts + other).clamp(0, largest)
            ds, ml = (d_B[:, None] * s_BS)[..., None], (m_B[:, None] * l_BS)[..., None]
            q_BSN = ((x_BSN + ml) / _safe(ds)).round_().clamp_(0, levels)
            error_BS = (w_BSN * (ds * q_BSN - ml - x_BSN).square_()).sum(-1)
            best = _better(best, [error_BS, s_BS, l_BS, q_BSN])
    error_BS, s_BS, l_BS, q_BSN = best
    return _Found(d_B, s_BS, q_BSN, error_BS.sum(-1), m_B, l_BS)


def _best_units(x_BSN: Tensor, w_BSN: Tensor, found: _Found) -> tuple[Tensor, Tensor]:
    """Return the best scales of blocks, by least squares for x ≈ d·(s·q) − m·l; those found where there are none."""
    a, b = found.scales_BS[..., None] * found.q_BSN, -found.leasts_BS[..., None].expand_as(x_BSN)
    aa, ab, bb, xa, xb = (
        (w_BSN * one * other).sum((1, 2)) for one, other in ((a, a), (a, b), (b, b), (x_BSN, a), (x_BSN, b))
    )
    determinant = aa * bb - ab * ab
    is_usual = determinant > 1e-6 * aa * bb
    d_B = torch.where(is_usual, (xa * bb - xb * ab) / _safe(determinant), torch.where(aa > 0, xa / _safe(aa), found.scale_B))
    m_B = torch.where(is_usual, (xb * aa - xa * ab) / _safe(determinant), torch.zeros_like(d_B))
    return d_B, m_B


def _better(best: list[Tensor], found: list[Tensor]) -> list[Tensor]:
    """Return, for each sub-block, the candidate with the smaller error, which is the first one of the list."""
    if not best:
        return found
    is_better = found[0] < best[0]
    return [
        torch.where(is_better if own.dim() == 2 else is_better[..., None], own, old)
        for own, old in zip(found, best, strict=True)
    ]


def _symmetric(half: int, largest: int) -> Callable[[Tensor, Tensor], _Found]:
    """Return the search for x ≈ s·q, −half ≤ q < half, where s is an integer from −largest to largest − 1 times a scale."""

    def search(x_BSN: Tensor, w_BSN: Tensor) -> _Found:
        extreme_BS = x_BSN.gather(-1, x_BSN.abs().argmax(-1, keepdim=True))[..., 0]
        wx_BSN, best = w_BSN * x_BSN, [torch.zeros_like(extreme_BS), extreme_BS / -half]
        stretches = _STRETCHES if half < 16 else _STRETCHES[::4]  # many levels: their ends matter less
        for stretch in (*stretches, *(2 * -half + 1 - own for own in stretches)):  # the extreme at either end
            inverse_BS = -(half + stretch) / _safe(extreme_BS)
            q_BSN = (x_BSN * inverse_BS[..., None]).round_().clamp_(-half, half - 1)
            xq, q2 = (wx_BSN * q_BSN).sum(-1), (w_BSN * q_BSN * q_BSN).sum(-1)
            scale = xq / _safe(q2)
            is_better = -scale * xq < best[0]
            best = [torch.where(is_better, own, old) for own, old in zip((-scale * xq, scale), best, strict=True)]

        def integers(scale_BS: Tensor, unit_B: Tensor | None = None, near: int = 1) -> _Found:
            extreme_B = scale_BS.gather(-1, scale_BS.abs().argmax(-1, keepdim=True))[:, 0]
            d_B = _half(extreme_B / -largest if unit_B is None else unit_B)
            return _symmetric_integers(x_BSN, w_BSN, scale_BS, d_B, half, largest, near)

        found = integers(best[1])
        d_B, _ = _best_units(x_BSN, w_BSN, found)
        again = integers(d_B[:, None] * found.scales_BS, d_B)
        return found.or_better(again).or_better(integers(extreme_BS / -half, near=0))

    return search


def _symmetric_integers(
    x_BSN: Tensor, w_BSN: Tensor, scale_BS: Tensor, d_B: Tensor, half: int, largest: int, near: int
) -> _Found:
    """Return the integers of scales; those up to `near` away from the rounded ones are tried."""
    scales, best = (scale_BS / _safe(d_B)[:, None]).round().clamp(-largest, largest - 1), list[Tensor]()
    for step in range(-near, near + 1):
        s_BS = (scales + step).clamp(-largest, largest - 1)
        ds = (d_B[:, None] * s_BS)[..., None]
        q_BSN = (x_BSN / _safe(ds)).round_().clamp_(-half, half - 1)
        best = _better(best, [(w_BSN * (ds * q_BSN - x_BSN).square_()).sum(-1), s_BS, q_BSN])
    return _Found(d_B, best[1], best[2], best[0].sum(-1), torch.zeros_like(d_B), torch.zeros_like(scale_BS))


def _packed(numbers: Tensor, bits: int, width: int) -> Tensor:
    """Return numbers of `bits` bits as bytes, in planes of `width` bytes: uint8 [B, numbers · bits / 8]."""
    planes = numbers.to(torch.uint8).reshape(len(numbers), -1, 8 // bits, width)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    return (planes << shifts).sum(2, dtype=torch.uint8).flatten(1)


def _bytes_of(scale_B: Tensor) -> Tensor:
    return scale_B.half()[:, None].view(torch.uint8)


def _six_bits(scales_BS: Tensor, leasts_BS: Tensor) -> Tensor:
    """Return eight scales and eight minimums of six bits each in twelve bytes."""
    s, m = scales_BS.to(torch.uint8), leasts_BS.to(torch.uint8)
    parts = (s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4)
    return torch.cat(parts, 1)


def _units(found: _Found) -> Iterator[Tensor]:
    yield from (_bytes_of(found.scale_B), _bytes_of(found.least_B))


def _q2_k(found: _Found) -> Tensor:
    scales = found.scales_BS.to(torch.uint8) | found.leasts_BS.to(torch.uint8) << 4
    return torch.cat([scales, _packed(found.q_BSN, 2, 32), *_units(found)], 1)


def _q3_k(found: _Found) -> Tensor:
    q, scales = (found.q_BSN + 4).to(torch.uint8), (found.scales_BS + 32).to(torch.uint8)
    parts = [_packed(q >> 2, 1, 32), _packed(q & 3, 2, 32), _packed(scales & 15, 4, 8), _packed(scales >> 4, 2, 4)]
    return torch.cat([*parts, _bytes_of(found.scale_B)], 1)


def _q4_k(found: _Found) -> Tensor:
    return torch.cat([*_units(found), _six_bits(found.scales_BS, found.leasts_BS), _packed(found.q_BSN, 4, 32)], 1)


def _q5_k(found: _Found) -> Tensor:
    q, scales = found.q_BSN.to(torch.uint8), _six_bits(found.scales_BS, found.leasts_BS)
    return torch.cat([*_units(found), scales, _packed(q >> 4, 1, 32), _packed(q & 15, 4, 32)], 1)


def _q6_k(found: _Found) -> Tensor:
    q, scales = (found.q_BSN + 32).to(torch.uint8), found.scales_BS.to(torch.int8).view(torch.uint8)
    return torch.cat([_packed(q & 15, 4, 64), _packed(q >> 4, 2, 32), scales, _bytes_of(found.scale_B)], 1)


@dataclass(frozen=True)
class _Form:
    """A K type."""

    parts: tuple[int, int]
    """Number of sub-blocks, and of numbers in each."""
    search: Callable[[Tensor, Tensor], _Found]
    pack: Callable[[_Found], Tensor]


_FORMS = {
    "Q2_K": _Form((16, 16), _affine(3, 15), _q2_k),
    "Q3_K": _Form((16, 16), _symmetric(4, 32), _q3_k),
    "Q4_K": _Form((8, 32), _affine(15, 63), _q4_k),
    "Q5_K": _Form((8, 32), _affine(31, 63), _q5_k),
    "Q6_K": _Form((16, 16), _symmetric(32, 128), _q6_k),
}
K_TYPES = tuple(_FORMS)
"""Names of the types that `rounded_to_k` writes."""
