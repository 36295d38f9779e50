"""The blocks of GGUF's quantized types as numbers (github.com/ggml-org/ggml, `block_*` in src/ggml-common.h).

Each type's function takes blocks as bytes, uint8 [B, bytes of a block], and returns their float32 numbers. Low-bit
numbers are stored in planes: the low bits of consecutive bytes are consecutive numbers, and so are the next bits.

Shape suffixes: B blocks, S scales of a block.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.files.gguf_types import BlockType
from engine.kernels.stored.code_levels import DOUBLED, IQ4

_NUMBERS_AT_ONCE = 1 << 21


def dequantized(blocks: Tensor, kind: BlockType, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the numbers […, inputs], which are computed in float32. blocks: uint8 […, bytes of a row].

    The float32 numbers of a few blocks at a time are in memory, beside the result.
    """
    every = blocks.reshape(-1, kind.bytes)
    numbers = torch.empty(len(every), kind.numbers, dtype=dtype)
    step = max(1, _NUMBERS_AT_ONCE // kind.numbers)
    for start in range(0, len(every), step):
        numbers[start : start + step] = _UNPACKED[kind.name](every[start : start + step]).flatten(1)
    return numbers.reshape(*blocks.shape[:-1], -1)


def _half(blocks: Tensor, place: int) -> Tensor:
    """Return the float16 at a place of each block, [B, 1]."""
    return blocks[:, place : place + 2].contiguous().view(torch.float16).float()


def _planes(data: Tensor, bits: int, width: int) -> Tensor:
    """Return the numbers of `bits` bits in groups of `width` bytes, plane by plane: uint8 [B, bytes · 8 / bits]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    return (data.reshape(len(data), -1, 1, width) >> shifts & (1 << bits) - 1).reshape(len(data), -1)


def _scaled(scales_BS: Tensor, numbers: Tensor) -> Tensor:
    """Return the numbers [B, S, numbers of a scale] times their scales."""
    return scales_BS[..., None] * numbers.reshape(*scales_BS.shape, -1).float()


def _levels(levels: tuple[int, ...], codes: Tensor) -> Tensor:
    return torch.tensor(levels, dtype=torch.float32)[codes.int()]


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_planes(blocks[:, 2:], 4, 16).to(torch.int8) - 8).float()


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _planes(blocks[:, 4:], 4, 16).float() + _half(blocks, 2)


def _fifth_bits(data: Tensor) -> Tensor:
    """Return the highest bits of 32 numbers of five bits, in their places."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (data[..., None] >> shifts & 1).reshape(len(data), -1) << 4


def _q5_0(blocks: Tensor) -> Tensor:
    numbers = _planes(blocks[:, 6:], 4, 16) | _fifth_bits(blocks[:, 2:6])
    return _half(blocks, 0) * (numbers.to(torch.int8) - 16).float()


def _q5_1(blocks: Tensor) -> Tensor:
    numbers = _planes(blocks[:, 8:], 4, 16) | _fifth_bits(blocks[:, 4:8])
    return _half(blocks, 0) * numbers.float() + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float() * _half(blocks, 0)


def _q2_k(blocks: Tensor) -> Tensor:
    scales, least = blocks[:, :16] & 15, blocks[:, :16] >> 4
    numbers = _scaled(_half(blocks, 80) * scales.float(), _planes(blocks[:, 16:80], 2, 32))
    return numbers - (_half(blocks, 82) * least.float())[..., None]


def _q3_k(blocks: Tensor) -> Tensor:
    low, high = _planes(blocks[:, 96:104], 4, 8), _planes(blocks[:, 104:108], 2, 4)
    scales = (low | high << 4).to(torch.int8) - 32
    absent = _planes(blocks[:, :32], 1, 32) ^ 1  # the third bit is stored inverted: without it, a number is 4 less
    numbers = _planes(blocks[:, 32:96], 2, 32).to(torch.int8) - (absent << 2).to(torch.int8)
    return _scaled(_half(blocks, 108) * scales.float(), numbers)


def _six_bits(data: Tensor) -> tuple[Tensor, Tensor]:
    """Return eight scales and eight minimums of six bits each from twelve bytes, uint8 [B, 8]."""
    scales, least, rest = data[:, :4], data[:, 4:8], data[:, 8:12]
    high_scales, high_least = (rest & 15) | (scales >> 2 & 48), (rest >> 4) | (least >> 2 & 48)
    return torch.cat([scales & 63, high_scales], 1), torch.cat([least & 63, high_least], 1)


def _q4_k(blocks: Tensor) -> Tensor:
    return _with_minimums(blocks, _planes(blocks[:, 16:], 4, 32))


def _q5_k(blocks: Tensor) -> Tensor:
    return _with_minimums(blocks, _planes(blocks[:, 48:], 4, 32) | _planes(blocks[:, 16:48], 1, 32) << 4)


def _with_minimums(blocks: Tensor, numbers: Tensor) -> Tensor:
    scales, least = _six_bits(blocks[:, 4:16])
    scaled = _scaled(_half(blocks, 0) * scales.float(), numbers)
    return scaled - (_half(blocks, 2) * least.float())[..., None]


def _q6_k(blocks: Tensor) -> Tensor:
    numbers = _planes(blocks[:, :128], 4, 64) | _planes(blocks[:, 128:192], 2, 32) << 4
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return _scaled(_half(blocks, 208) * scales, numbers.to(torch.int8) - 32)


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _levels(IQ4, _planes(blocks[:, 2:], 4, 16))


def _iq4_xs(blocks: Tensor) -> Tensor:
    low, high = _planes(blocks[:, 4:8], 4, 1), _planes(blocks[:, 2:4], 2, 1)
    scales = (low | high << 4).to(torch.int8) - 32
    return _scaled(_half(blocks, 0) * scales.float(), _levels(IQ4, _planes(blocks[:, 8:], 4, 16)))


def _mxfp4(blocks: Tensor) -> Tensor:
    """The scale is half of 2 to the power of the byte minus 127, because the levels are doubled."""
    scales = torch.ldexp(torch.ones(len(blocks), 1, dtype=torch.float64), blocks[:, :1].int() - 128).float()
    return scales * _levels(DOUBLED, _planes(blocks[:, 1:], 4, 16))


_UNPACKED: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
