"""x·Wᵀ for plain and low-bit weights, with the fastest method for this processor.

Decoding multiplies a few rows and is bound by memory bandwidth; prompts multiply many and are bound by arithmetic. Both use
compiled kernels if Numba is installed (engine/kernels), and torch otherwise (torch_products.py).

Compiled kernels multiply low-bit weights as they are stored, or widen a block of rows at a time. For torch, a low-bit weight
is dequantized for its product and discarded afterwards, so only one matrix of a model is wide at a time.

Shape suffixes: T rows, I input features, O output features, D hidden, F expert width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.kernel_choice import TORCH, KernelChoice, loaded_kernels
from engine.kernels.plain_forms import plain_form
from engine.kernels.stored.block_weight import BlockWeight, RowWeight
from engine.kernels.stored.float_weight import FloatWeight
from engine.kernels.stored.quantized_weight import LowBitWeight, QuantizedWeight, Weight
from engine.kernels.torch_products import torch_linear

PADDED_OUTPUTS = 1024
"""Fewer outputs, such as a router's, are padded with zeros where the kernels for many rows need a multiple."""


def linear(x: Tensor, weight_OI: Weight, bias_O: Tensor | None = None, choice: KernelChoice = TORCH) -> Tensor:
    """Return x·Wᵀ + b over the last dimension, in x's dtype. The result is differentiable in x and in a plain weight."""
    return linears(x, (weight_OI,), (bias_O,), choice)[0]


def linears(
    x: Tensor, weights: Sequence[Weight], biases: Sequence[Tensor | None], choice: KernelChoice = TORCH
) -> list[Tensor]:
    """Return `linear` of x with each of several weights. A few rows take one compiled call for all weights."""
    if choice.observer is not None:
        choice.observer(x, weights)
    rows = x.numel() // x.shape[-1]
    kernels, many = choice.for_products(rows, x), choice.takes_many(rows)
    may_serve = kernels is not None and serves_rows(kernels, weights, many=many)
    form = kernel_form(kernels, weights, x.dtype) if may_serve else None
    if form is None and kernels is not None and len(weights) > 1:  # weights of several forms
        return [linear(x, weight, bias, choice) for weight, bias in zip(weights, biases, strict=True)]
    if form is None and kernels is not None and many and takes_padded(kernels, weights[0]):
        padded_OI = F.pad(plain(weights[0], x.dtype), (0, 0, 0, -weights[0].shape[0] % kernels.MULTIPLE_OF_OUTPUTS))
        y = linear(x, padded_OI, choice=choice)[..., : weights[0].shape[0]]
        return [y if biases[0] is None else y + biases[0]]
    if form is None:
        return [torch_linear(x, plain(weight, x.dtype), bias) for weight, bias in zip(weights, biases, strict=True)]
    outputs = [weight.shape[0] for weight in weights]
    taken = as_taken(x)
    made = kernels.products(taken.data_ptr(), rows, list(map(addresses, weights)), outputs, x.shape[-1], form, many=many)
    y = as_tensor(made, x.dtype).view(*x.shape[:-1], -1)
    pieces = (y,) if len(outputs) == 1 else y.split_with_sizes(outputs, dim=-1)
    return [piece if bias is None else piece + bias for piece, bias in zip(pieces, biases, strict=True)]


def wide_linear(kernels: Any, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """Return x·Wᵀ in float32 for a plain matrix in bfloat16, by the kernels for few rows."""
    rows, inputs = x_TI.shape
    x_TI = x_TI.float().contiguous()
    return torch.from_numpy(
        kernels.products(x_TI.data_ptr(), rows, [addresses(weight_OI)], [weight_OI.shape[0]], inputs, kernels.WIDE)
    )


def takes_padded(kernels: Any, weight: Weight) -> bool:
    """Return whether the kernels for many rows multiply this matrix once rows of zeros are added to it."""
    if not isinstance(weight, Tensor) or weight.shape[0] >= PADDED_OUTPUTS or _plain_form(kernels, weight) is None:
        return False  # a matrix that is trained has no form, padded or not
    return bool(kernels.multiplies_many(kernels.MULTIPLE_OF_OUTPUTS, weight.shape[1]))


def serves_rows(kernels: Any, weights: Sequence[Weight], *, many: bool) -> bool:
    """Return whether the kernels for few rows, or those for many, multiply these matrices."""
    return not many or all(kernels.multiplies_many(*weight.shape) for weight in weights)


def plain(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Return the matrix of a weight: a low-bit weight is dequantized to `dtype`, another weight is returned unchanged."""
    if not isinstance(weight, LowBitWeight):
        return weight
    kernels = loaded_kernels() if dtype == torch.bfloat16 else None
    form = None if kernels is None else weight.widened_form(kernels)
    if kernels is None or form is None:
        return weight.dequantised(dtype)
    return as_bfloat16(kernels.dequantized(weight.addresses, weight.shape, form))


def embedding(tokens: Tensor, weight_VD: Tensor | RowWeight, dtype: torch.dtype) -> Tensor:
    """Return the rows of the tokens, […, D]: those of a plain matrix as they are, others dequantized to `dtype`."""
    if isinstance(weight_VD, Tensor):
        return F.embedding(tokens, weight_VD)
    return plain(weight_VD.taken(tokens.flatten()), dtype).view(*tokens.shape, -1)


def kernel_form(
    kernels: Any, weights: Sequence[Weight], dtype: torch.dtype = torch.bfloat16
) -> tuple[int | str, int] | None:
    """Return the form that all these weights share, as the kernels need it; None if the kernels cannot serve the weights.

    dtype: of the vectors that are multiplied.
    """
    forms = {_own_form(kernels, each, dtype) for each in weights}
    return forms.pop() if len(forms) == 1 else None


def expert_form(
    kernels: Any, weights: Sequence[Weight], dtype: torch.dtype = torch.bfloat16
) -> tuple[int | str, int] | None:
    """Return the form in which the kernels multiply these matrices of experts in one call; None if they cannot, or if there
    are none.

    dtype: of the vectors that are multiplied.
    """
    forms = {_own_form(kernels, each, dtype) for each in weights}
    if not forms or None in forms:
        return None
    form: tuple[int | str, int] = forms.pop() if len(forms) == 1 else kernels.MIXED
    return form


def places_of(kernels: Any, weights: Sequence[Weight], form: tuple[int | str, int]) -> tuple[list[tuple[int, int]], Any]:
    """Return the addresses of matrices for a call in this form, and an object that must live as long as they are used."""
    places = [addresses(weight) for weight in weights]
    if form != kernels.MIXED:
        return places, None
    is_packed = [isinstance(weight, QuantizedWeight | FloatWeight) for weight in weights]
    scales = [scale if packed else 0 for (_, scale), packed in zip(places, is_packed, strict=True)]
    records, own = kernels.own_forms([_record_form(kernels, weight) for weight in weights], scales)
    return [(values, place) for (values, _), place in zip(places, own, strict=True)], records


def _record_form(kernels: Any, weight: Weight) -> Any:
    """Return the form that a matrix alone is multiplied in: for one in blocks, that of its own type."""
    return weight.widened_form(kernels) if isinstance(weight, BlockWeight) else _own_form(kernels, weight)


def _own_form(kernels: Any, weight: Weight, dtype: torch.dtype = torch.bfloat16) -> Any:
    if isinstance(weight, LowBitWeight):
        return weight.product_form(kernels) if dtype == torch.bfloat16 else None
    return _plain_form(kernels, weight, dtype)


def _plain_form(kernels: Any, weight: Tensor, dtype: torch.dtype = torch.bfloat16) -> tuple[int | str, int] | None:
    trains = torch.is_grad_enabled() and weight.requires_grad
    is_served = weight.dtype == dtype and weight.is_cpu and weight.is_contiguous()
    return plain_form(kernels, dtype) if is_served and not trains else None


def addresses(weight: Weight) -> tuple[int, int]:
    """Return the address of a weight's values, and that of its scales, of the form of blocks or of the record of floats."""
    return weight.addresses if isinstance(weight, LowBitWeight) else (weight.data_ptr(), 0)


def as_bfloat16(bits: Any) -> Tensor:
    """Return a kernel's result as a tensor."""
    return torch.from_numpy(bits).view(torch.bfloat16)


def as_taken(x: Tensor) -> Tensor:
    """Return vectors as the kernels take them: bfloat16 and float32 as they are, float16 in float32."""
    return x.float() if x.dtype == torch.float16 else x


def as_tensor(made: Any, dtype: torch.dtype) -> Tensor:
    """Return the result of products of vectors of this dtype, in it."""
    return as_bfloat16(made) if dtype == torch.bfloat16 else torch.from_numpy(made).to(dtype)
