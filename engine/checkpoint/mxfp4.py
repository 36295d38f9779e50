"""MXFP4 (OCP Microscaling Formats v1.0, §5.1): blocks of 32 four-bit numbers that share a power of two as scale.

Shape suffixes: … any, C blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine.kernels.stored.code_levels import MAGNITUDES

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BLOCK = 32
BYTES = BLOCK // 2
"""Bytes of a block's numbers; the first number of each pair is in the low half of its byte."""
METHOD = "mxfp4"
"""Value of `quant_method` in `quantization_config`."""
BLOCKS, POWERS = "_blocks", "_scales"
"""Name suffixes of a packed tensor's two parts."""
_BIAS, _NAN = 127, 255
"""E8M0: a scale is 2 to the power of its byte minus 127; a byte of 255 is NaN."""


def is_packed(config: Mapping[str, Any]) -> bool:
    """Return whether config.json says that weights are packed as MXFP4."""
    quantisation = config.get("quantization_config")
    return isinstance(quantisation, dict) and quantisation.get("quant_method") == METHOD


def unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers […, C · 32] in bfloat16, which represents them exactly.

    blocks: uint8 […, C, 16]; scales: uint8 […, C].
    """
    import torch  # here: headers are read without it

    numbers = torch.tensor([*MAGNITUDES, *(-number for number in MAGNITUDES)], dtype=torch.bfloat16)
    pairs = torch.cartesian_prod(numbers, numbers).flip(-1)  # indexed by byte: the low half first
    powers = torch.ldexp(torch.ones(256), torch.arange(256) - _BIAS).bfloat16()
    powers[_NAN] = torch.nan
    return (pairs[blocks.int()].flatten(-2) * powers[scales.int()][..., None]).flatten(-2)


def unpacked_rows(blocks_OB: Tensor, scales_OC: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers [O, C · 32] of rows of blocks, rounded once to `dtype`."""
    return unpacked(blocks_OB.unflatten(1, (-1, BYTES)), scales_OC).to(dtype)
