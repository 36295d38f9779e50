"""Numbers rounded to GGUF's MXFP4: blocks of 32 numbers in E2M1 that share a power of two.

Numbers that are in MXFP4 already keep their values: the scale of a block follows from its
largest number alone, and every number of E2M1 is one at half or a quarter of the scale too, if the largest of them allows
that scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

MXFP4 = "MXFP4"
_BLOCK = 32
_LARGEST_EXPONENT = 2
"""Exponent of the largest number of E2M1, which is 6."""
_BIAS = 127
_BETWEEN = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""The middles between two neighbors of 0, 0.5, 1, 1.5, 2, 3, 4 and 6. A number there becomes the smaller one."""


def rounded_to_mxfp4(numbers: Tensor) -> Tensor:
    """Return the blocks of a matrix as bytes, uint8 [rows, bytes of a row]. numbers: finite, [rows, inputs].

    A block has its power of two plus 127, and then bytes of two numbers: the first half of the block in their low halves.
    """
    rows = len(numbers)
    blocks = numbers.float().reshape(-1, _BLOCK)
    largest, exponent = torch.frexp(blocks.abs().amax(1, keepdim=True))  # largest in [0.5, 1)
    power = (exponent - 1 - _LARGEST_EXPONENT).clamp(-_BIAS, _BIAS).where(largest > 0, -_BIAS)
    scaled = torch.ldexp(blocks.double(), -power)
    sizes = torch.bucketize(scaled.abs(), torch.tensor(_BETWEEN, dtype=torch.float64))
    codes = (sizes + 8 * ((scaled < 0) & (sizes > 0))).to(torch.uint8)
    halves = codes[:, : _BLOCK // 2] | codes[:, _BLOCK // 2 :] << 4
    return torch.cat([(power + _BIAS).to(torch.uint8), halves], 1).reshape(rows, -1)
