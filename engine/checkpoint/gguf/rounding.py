"""Numbers rounded to GGUF's K types: the scales of each block are searched for the least weighted squared error.

A block of 256 numbers has S sub-blocks, whose scales (and minimums) are integers times one float16 scale of the block. With
a weight w for each number, Σ w·(x − x̂)² is minimized: w = Σ h² over the inputs h of a matrix's columns gives the error of
its products, as far as inputs are uncorrelated; without statistics, w = 1.

First each sub-block gets real scales: a grid of candidates assigns integers q to numbers, and least squares gives the best
scale for them. Then these scales are rounded to integers, and their neighbors are tried, with the float16 scale that follows
from the largest, and once more with the best one for the integers found. A block keeps the scales that span its numbers, if
those are better. The layouts are inverse to blocks.py. rounding_steps.py has what is computed for each number.

Shape suffixes: B blocks, S sub-blocks of a block, L sub-blocks of all blocks, N numbers of a sub-block, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.gguf.rounding_steps import LEAST_DETERMINANT, Integers, Steps, safe
from engine.errors import UnsupportedError
from engine.files.gguf_types import BlockType
from engine.kernels.kernel_choice import imported_kernels

_BLOCKS_AT_ONCE = 1 << 11
_LARGEST = 65504.0
"""The largest float16."""


@dataclass(frozen=True)
class _Found:
    """The scales of some blocks that were found, and the errors with them."""

    error_B: Tensor
    scale_B: Tensor
    scales_BS: Tensor
    least_B: Tensor
    leasts_BS: Tensor
    """Zero for types without minimums, as is their scale."""

    def or_better(self, other: _Found) -> _Found:
        """Return, for each block, the one with the smaller error."""
        is_other_B = other.error_B < self.error_B

        def chosen(own: Tensor, theirs: Tensor) -> Tensor:
            return torch.where(is_other_B.view(-1, *[1] * (own.dim() - 1)), theirs, own)

        return _Found(*(chosen(getattr(self, part.name), getattr(other, part.name)) for part in fields(self)))

    @property
    def by_sub_block(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the integers of scales and minimums, and what each is multiplied by, [L] each."""
        scales, leasts = self.scales_BS, self.leasts_BS
        return _flat(scales), _flat(leasts), _flat(self.scale_B, scales), _flat(self.least_B, scales)


@dataclass(frozen=True)
class _Blocks:
    """Blocks as they are stored, ready to be packed."""

    scale_B: Tensor
    scales_BS: Tensor
    least_B: Tensor
    leasts_BS: Tensor
    q_BSN: Tensor


def rounded_to_k(numbers: Tensor, kind: BlockType, weights_I: Tensor | None = None) -> Tensor:
    """Return the blocks of a matrix as bytes, uint8 [rows, bytes of a row]. numbers: [rows, inputs].

    weights_I: how much the squared error of each column counts. Raises UnsupportedError for numbers that are too large.
    """
    rows, inputs = numbers.shape
    x, form = numbers.float().reshape(-1, kind.numbers), _FORMS[kind.name]
    if not bool(x.isfinite().all()):
        raise UnsupportedError("has numbers that are not finite")
    w = torch.ones(1, inputs, dtype=torch.float32) if weights_I is None else _usable(weights_I).view(1, -1)
    w = w.reshape(-1, kind.numbers).contiguous()
    blocks = torch.empty(len(x), kind.bytes, dtype=torch.uint8)
    kernels = imported_kernels() if x.is_cpu else None
    for start in range(0, len(x), _BLOCKS_AT_ONCE):
        own = slice(start, min(start + _BLOCKS_AT_ONCE, len(x)))
        if kernels is None:
            found = _searched(x[own], w[torch.arange(own.start, own.stop) % len(w)], form)
        else:
            found = _searched_by(kernels, x[own].contiguous(), w, start, form)
        blocks[own] = form.pack(found)
    return blocks.view(rows, -1)


def _usable(weights_I: Tensor) -> Tensor:
    """Return weights with a mean of 1; columns without any get a small one, so that their numbers are not arbitrary."""
    mean = weights_I.double().mean()
    if not bool(mean > 0) or not bool(mean.isfinite()):
        return torch.ones_like(weights_I, dtype=torch.float32)
    return (weights_I.double() / mean).clamp_min(1e-6).float()


def _flat(values: Tensor, like_BS: Tensor | None = None) -> Tensor:
    """Return values [B, S], or values [B] for each of the sub-blocks, as [L]."""
    return (values if like_BS is None else values[:, None].expand_as(like_BS)).flatten()


def _searched_by(kernels: Any, x_BI: Tensor, w_WI: Tensor, first: int, form: _Form) -> _Blocks:
    """Return what `_searched` returns, by compiled kernels.

    Sums have another order: of two nearly equal candidates the other one may be chosen, and next to a number that is 1,000
    times as large as the others of its sub-block a worse one.

    w_WI: weights of the blocks of a row. first: number of the first block in its matrix.
    """
    (parts, size), integers, factors_C = form.parts, form.integers, torch.tensor(form.integers.factors, dtype=torch.float32)
    groups = -(-len(x_BI) * parts // kernels.LANES)
    scales = torch.empty(kernels.ROUNDING_SCALES, groups * kernels.LANES, dtype=torch.float32)
    q = torch.empty(groups, size, kernels.LANES, dtype=torch.int8)
    kernels.search_rounding(
        f"{'affine' if integers.has_minimums else 'symmetric'}_{parts}",
        [each.data_ptr() for each in (x_BI, w_WI, factors_C, scales, q)],
        (first, len(w_WI), size, len(x_BI) * parts, len(factors_C)),
        (integers.lowest, integers.highest, integers.lowest_scale, integers.highest_scale),
    )
    d_BS, s_BS, m_BS, l_BS, large_BS = (each[: len(x_BI) * parts].view(-1, parts) for each in scales)
    if bool(large_BS.any()):
        raise _too_large()
    q_BSN = q.transpose(1, 2).reshape(-1, size)[: len(x_BI) * parts].view(-1, parts, size)
    return _Blocks(d_BS[:, 0], s_BS, m_BS[:, 0], l_BS, q_BSN)


def _too_large() -> UnsupportedError:
    return UnsupportedError("has numbers that are too large for a K type; write it as bf16 or f32")


def _searched(x_BI: Tensor, w_BI: Tensor, form: _Form) -> _Blocks:
    parts, size = form.parts
    x_NL, w_NL = (each.reshape(-1, size).T.contiguous() for each in (x_BI, w_BI))
    steps = Steps(x_NL, w_NL, form.integers)
    spanning, fitted = (_affine if form.integers.has_minimums else _symmetric)(steps)
    spanning, fitted = ((scale.view(-1, parts), least.view(-1, parts)) for scale, least in (spanning, fitted))
    units = _largest_units(steps, spanning)
    if any(bool((unit_B.abs() > _LARGEST).any()) for unit_B in units):
        raise _too_large()
    whole = _integers(steps, spanning, units, near=0)
    found = _integers(steps, fitted, _largest_units(steps, fitted))
    units = _best_units(steps, found)
    again = _integers(steps, (units[0][:, None] * found.scales_BS, units[1][:, None] * found.leasts_BS), units)
    best = found.or_better(again).or_better(whole)
    q_BSN = steps.integers_of(*best.by_sub_block).T.reshape(-1, parts, size)
    return _Blocks(best.scale_B, best.scales_BS, best.least_B, best.leasts_BS, q_BSN)


_Real = tuple[Tensor, Tensor]
"""Real scales and minimums of sub-blocks, [L] or [B, S]."""


def _affine(steps: Steps) -> tuple[_Real, _Real]:
    """Return the scales and minimums that span the numbers, and those that fit them best."""
    low_L = steps.x_NL.amin(0).clamp_max(0)
    span_L = steps.x_NL.amax(0) - low_L
    return (span_L / steps.integers.highest, -low_L), steps.affine_fit(low_L, span_L)


def _symmetric(steps: Steps) -> tuple[_Real, _Real]:
    """Return the scales that span the numbers, and those that fit them best; minimums are zero."""
    extreme_L = _extreme(steps.x_NL.T)
    none_L = torch.zeros_like(extreme_L)
    return (extreme_L / steps.integers.lowest, none_L), (steps.symmetric_fit(extreme_L), none_L)


def _extreme(values: Tensor) -> Tensor:
    """Return the value of each row that is farthest from zero."""
    return values.gather(-1, values.abs().argmax(-1, keepdim=True))[..., 0]


def _largest_units(steps: Steps, real: _Real) -> tuple[Tensor, Tensor]:
    """Return what the integers of scales and minimums [B, S] are multiplied by, [B], so that the largest ones fit."""
    limits = steps.integers.lowest_scale, steps.integers.highest_scale
    if steps.integers.has_minimums:
        return real[0].amax(-1) / limits[1], real[1].amax(-1) / limits[1]
    return _extreme(real[0]) / limits[0], torch.zeros_like(real[0][:, 0])


def _integers(steps: Steps, real: _Real, units: tuple[Tensor, Tensor], near: int = 1) -> _Found:
    """Return the integers of scales and minimums [B, S]; those up to `near` away from the rounded ones are tried.

    units: what the integers are multiplied by, [B] each; rounded to float16, whose largest number stands for larger ones.
    """
    limits = steps.integers.lowest_scale, steps.integers.highest_scale
    d_B, m_B = (unit_B.clamp(-_LARGEST, _LARGEST).half().float() for unit_B in units)
    scales_BS = (real[0] / safe(d_B)[:, None]).round().clamp(*limits)
    leasts_BS = (real[1] / safe(m_B)[:, None]).round().clamp(0, limits[1])
    given = _flat(scales_BS), _flat(leasts_BS), _flat(d_B, scales_BS), _flat(m_B, scales_BS)
    error_BS, scales_BS, leasts_BS = (each.view(scales_BS.shape) for each in steps.neighbors(*given, near))
    return _Found(error_BS.sum(-1), d_B, scales_BS, m_B, leasts_BS)


def _best_units(steps: Steps, found: _Found) -> tuple[Tensor, Tensor]:
    """Return the best scales of blocks, by least squares for x ≈ d·(s·q) − m·l; those found where there are none."""
    aa, ab, bb, xa, xb = (each.view(found.scales_BS.shape).sum(-1) for each in steps.sums(*found.by_sub_block))
    determinant = aa * bb - ab * ab
    is_usual = determinant > LEAST_DETERMINANT * aa * bb
    d_B = torch.where(is_usual, (xa * bb - xb * ab) / safe(determinant), torch.where(aa > 0, xa / safe(aa), found.scale_B))
    m_B = torch.where(is_usual, (xb * aa - xa * ab) / safe(determinant), torch.zeros_like(d_B))
    if not steps.integers.has_minimums:
        return d_B, m_B
    return d_B.clamp_min(0), m_B.clamp_min(0)


def _packed(numbers: Tensor, bits: int, width: int) -> Tensor:
    """Return numbers of `bits` bits as bytes, in planes of `width` bytes: uint8 [B, numbers · bits / 8]."""
    planes = numbers.to(torch.uint8).reshape(len(numbers), -1, 8 // bits, width)
    packed = planes[:, :, 0].clone()
    for place in range(1, 8 // bits):
        packed |= planes[:, :, place] << bits * place
    return packed.flatten(1)


def _bytes_of(scale_B: Tensor) -> Tensor:
    return scale_B.half()[:, None].view(torch.uint8)


def _six_bits(scales_BS: Tensor, leasts_BS: Tensor) -> Tensor:
    """Return eight scales and eight minimums of six bits each in twelve bytes."""
    s, m = scales_BS.to(torch.uint8), leasts_BS.to(torch.uint8)
    parts = (s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4)
    return torch.cat(parts, 1)


def _units(blocks: _Blocks) -> Iterator[Tensor]:
    yield from (_bytes_of(blocks.scale_B), _bytes_of(blocks.least_B))


def _q2_k(blocks: _Blocks) -> Tensor:
    scales = blocks.scales_BS.to(torch.uint8) | blocks.leasts_BS.to(torch.uint8) << 4
    return torch.cat([scales, _packed(blocks.q_BSN, 2, 32), *_units(blocks)], 1)


def _q3_k(blocks: _Blocks) -> Tensor:
    q, scales = (blocks.q_BSN + 4).to(torch.uint8), (blocks.scales_BS + 32).to(torch.uint8)
    parts = [_packed(q >> 2, 1, 32), _packed(q & 3, 2, 32), _packed(scales & 15, 4, 8), _packed(scales >> 4, 2, 4)]
    return torch.cat([*parts, _bytes_of(blocks.scale_B)], 1)


def _q4_k(blocks: _Blocks) -> Tensor:
    return torch.cat([*_units(blocks), _six_bits(blocks.scales_BS, blocks.leasts_BS), _packed(blocks.q_BSN, 4, 32)], 1)


def _q5_k(blocks: _Blocks) -> Tensor:
    q, scales = blocks.q_BSN.to(torch.uint8), _six_bits(blocks.scales_BS, blocks.leasts_BS)
    return torch.cat([*_units(blocks), scales, _packed(q >> 4, 1, 32), _packed(q & 15, 4, 32)], 1)


def _q6_k(blocks: _Blocks) -> Tensor:
    q, scales = (blocks.q_BSN + 32).to(torch.uint8), blocks.scales_BS.to(torch.int8).view(torch.uint8)
    return torch.cat([_packed(q & 15, 4, 64), _packed(q >> 4, 2, 32), scales, _bytes_of(blocks.scale_B)], 1)


@dataclass(frozen=True)
class _Form:
    """A K type."""

    parts: tuple[int, int]
    """Number of sub-blocks, and of numbers in each."""
    integers: Integers
    pack: Callable[[_Blocks], Tensor]


_FORMS = {
    "Q2_K": _Form((16, 16), Integers(0, 3, 0, 15), _q2_k),
    "Q3_K": _Form((16, 16), Integers(-4, 3, -32, 31), _q3_k),
    "Q4_K": _Form((8, 32), Integers(0, 15, 0, 63), _q4_k),
    "Q5_K": _Form((8, 32), Integers(0, 31, 0, 63), _q5_k),
    "Q6_K": _Form((16, 16), Integers(-32, 31, -128, 127), _q6_k),
}
K_TYPES = tuple(_FORMS)
"""Names of the types that `rounded_to_k` writes."""
