"""Weights in 8-bit floating point with a float32 scale for each block (arXiv 2412.19437, §3.3.2), read as plain ones.

Only how weights are stored is read. That such a model's own kernels round activations too is left out: here they stay in
the model's dtype.

Shape suffixes: O outputs, I inputs, P and Q blocks along them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from engine.errors import UnsupportedError
from engine.files.json_file import shown

SCALES = "_scale_inv"
"""What a weight's name is followed by in its scales'. Weights are multiplied by them: the inverse is of what made them."""
FLOAT8 = torch.float8_e4m3fn
_KNOWN: dict[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3", "float8_e4m3fn"),
    "activation_scheme": ("dynamic",),
}


def block_of(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of a block; None where the weights are not quantised. Raises UnsupportedError for any other kind."""
    quantisation = config.get("quantization_config")
    if quantisation is None:
        return None
    if not isinstance(quantisation, dict):
        raise UnsupportedError(f"quantization_config is {shown(quantisation)}; weights that are quantised so are not read")
    odd = [f"{key}={quantisation[key]!r}" for key, known in _KNOWN.items() if quantisation.get(key, known[0]) not in known]
    if "quant_method" not in quantisation:
        odd.append("no quant_method")
    block = quantisation.get("weight_block_size")
    sizes = block if isinstance(block, list) else []
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        odd.append(f"weight_block_size={shown(block)}")
    if odd:
        raise UnsupportedError(
            f"quantization_config has {', '.join(odd)[:300]}; of quantised weights those are read that are fp8 (e4m3) with "
            "a scale for each block, or packed by compressed-tensors; take the model's weights in bfloat16"
        )
    return sizes[0], sizes[1]


def dequantised(values_OI: Tensor, scales_PQ: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """value · scale of its block, [O, I]; a row of blocks at a time, so that little more than the result is in memory."""
    rows, columns = block
    made_OI = torch.empty(values_OI.shape, dtype=dtype)
    for place, start in enumerate(range(0, values_OI.shape[0], rows)):
        scale_I = scales_PQ[place].repeat_interleave(columns)[: values_OI.shape[1]]
        made_OI[start : start + rows] = values_OI[start : start + rows].float() * scale_I
    return made_OI
