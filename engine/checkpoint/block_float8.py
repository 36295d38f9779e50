"""FP8 weights with one float32 scale per block (DeepSeek-V3, arXiv 2412.19437, §3.3.2), read as plain weights.

Only the storage format is supported. The rounding of activations in such a model's own kernels is left out: activations
stay in the model's dtype.

Shape suffixes: O outputs, I inputs, P and Q blocks along them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine.errors import UnsupportedError
from engine.files.json_file import shown

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SCALES = "_scale_inv"
"""Suffix of the scales' tensor name. A weight is multiplied by its scale; "inverse" refers to the quantization step."""
_KNOWN: dict[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3", "float8_e4m3fn"),
    "activation_scheme": ("dynamic",),
}


def block_of(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the rows and columns of a block, or None if the weights are not quantized.

    Raises UnsupportedError for any other kind of quantization.
    """
    quantisation = config.get("quantization_config")
    if quantisation is None:
        return None
    if not isinstance(quantisation, dict):
        raise UnsupportedError(f"quantization_config is {shown(quantisation)}; weights quantized in this way are not read")
    odd = [f"{key}={quantisation[key]!r}" for key, known in _KNOWN.items() if quantisation.get(key, known[0]) not in known]
    if "quant_method" not in quantisation:
        odd.append("no quant_method")
    block = quantisation.get("weight_block_size")
    sizes = block if isinstance(block, list) else []
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        odd.append(f"weight_block_size={shown(block)}")
    if odd:
        raise UnsupportedError(
            f"quantization_config has {', '.join(odd)[:300]}; quantized weights are read if they are fp8 (e4m3) with a "
            "scale for each block, or packed by compressed-tensors; take the model's weights in bfloat16"
        )
    return sizes[0], sizes[1]


def dequantised(values_OI: Tensor, scales_PQ: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return value · scale of its block, [O, I]. One row of blocks is converted at a time, to limit the memory used."""
    import torch  # here: headers are read without it

    rows, columns = block
    made_OI = torch.empty(values_OI.shape, dtype=dtype)
    for place, start in enumerate(range(0, values_OI.shape[0], rows)):
        scale_I = scales_PQ[place].repeat_interleave(columns)[: values_OI.shape[1]]
        made_OI[start : start + rows] = values_OI[start : start + rows].float() * scale_I
    return made_OI
