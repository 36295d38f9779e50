"""FP8 weights with scales, read as plain weights or kept as they are stored.

A scale holds for a block of rows and columns (DeepSeek-V3, arXiv 2412.19437, §3.3.2), for a row, or for the whole tensor. It
is stored in float32, bfloat16, float16, or as a power of two in one byte (UE8M0).

Only the storage format is supported. The rounding of activations in such a model's own kernels is left out: activations
stay in the model's dtype, and static scales of activations are not read.

Shape suffixes: O outputs, I inputs, P and Q scales along them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.errors import UnsupportedError
from engine.files.element_type import BFLOAT16, FLOAT8_POWER, FLOAT16, FLOAT32
from engine.files.json_file import shown

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SCALES = "_scale_inv"
"""Suffix of the scales' tensor name. A weight is multiplied by its scale; "inverse" refers to the quantization step."""
SUFFIXES = (SCALES, "_scale")
"""All suffixes of scales: that of transformers, and that of compressed-tensors and vLLM."""
ACTIVATION_SCALES = (".activation_scale", ".input_scale", ".input_global_scale")
"""How names of static scales of activations end."""
SCALE_TYPES = (FLOAT32, BFLOAT16, FLOAT16, FLOAT8_POWER)
METHOD = "fp8"
"""Value of `quant_method` in `quantization_config`."""
_KNOWN: dict[str, tuple[Any, ...]] = {
    "quant_method": (METHOD,),
    "fmt": ("e4m3", "float8_e4m3fn"),
    "activation_scheme": ("dynamic", "static"),
    "scale_fmt": ("float", "ue8m0", None),
    "expert_dtype": ("fp8", None),
}
_STEP = 256
"""Rows that are dequantized at a time, about. It limits the memory of wide values."""


@dataclass(frozen=True)
class Float8:
    """The scales of FP8 weights, as config.json describes them."""

    block: tuple[int, int] | None
    """Rows and columns of a block; None for scales of whole rows or tensors, which their shapes tell apart."""

    def scales_shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the shapes that the scales of a weight [O, I] may have."""
        if self.block is not None:
            return [tuple(-(-size // step) for size, step in zip(shape, self.block, strict=True))]
        return [(), (1,), (1, 1), (shape[0], 1), (shape[0],)]


def float8_of(config: Mapping[str, Any]) -> Float8 | None:
    """Return how FP8 weights are scaled, or None if the weights are not quantized.

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
    if block is not None and (len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes)):
        odd.append(f"weight_block_size={shown(block)}")
    if odd:
        raise UnsupportedError(
            f"quantization_config has {', '.join(odd)[:300]}; quantized weights are read if they are fp8 (e4m3) with "
            "scales, or packed by compressed-tensors; take the model's weights in bfloat16"
        )
    return Float8(None if block is None else (sizes[0], sizes[1]))


def matrix_of_scales(
    scales: Tensor, block: tuple[int, int] | None, shape: tuple[int, ...]
) -> tuple[Tensor, tuple[int, int]]:
    """Return the scales in float32 [P, Q], and the rows and columns of a block. shape: that of the weight."""
    wide = scales.float()
    if block is not None:
        return wide, block
    return wide.view(-1, 1), (shape[0] if wide.numel() == 1 else 1, shape[1])


def dequantised(values_OI: Tensor, scales_PQ: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return value · scale of its block, [O, I]. Some rows are converted at a time, to limit the memory used."""
    import torch  # here: headers are read without it

    rows, columns = block
    made_OI = torch.empty(values_OI.shape, dtype=dtype)
    step = max(1, _STEP // rows)
    for place in range(0, scales_PQ.shape[0], step):
        own = slice(place * rows, (place + step) * rows)
        wide = values_OI[own].float()
        scale = scales_PQ[place : place + step].repeat_interleave(columns, 1)[:, : values_OI.shape[1]]
        made_OI[own] = wide.mul_(scale.repeat_interleave(rows, 0)[: wide.shape[0]])
    return made_OI


def dequantised_bytes(values_OI: Tensor, scales_PQ: Tensor, dtype: torch.dtype, *, block: tuple[int, int]) -> Tensor:
    """Return `dequantised` of a weight that is given as its bytes."""
    import torch  # here: headers are read without it

    return dequantised(values_OI.view(torch.float8_e4m3fn), scales_PQ, block, dtype)
