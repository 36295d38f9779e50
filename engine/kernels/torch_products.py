"""Products of plain matrices by torch, and what arithmetic this processor has.

Where the processor only emulates arithmetic in a dtype, the weight is widened one block at a time into a small buffer that
stays in cache, and multiplied in float32, which is also more exact. On AVX2 a product of 512 rows in bfloat16 takes 8 times
as long as in float32, and few processors multiply float16.

Shape suffixes: T rows, I input features, O output features.
"""

from __future__ import annotations

import threading
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

WIDEN_FROM_ROWS = 4
"""Minimum number of rows for widening. Fewer rows are multiplied one by one: each reads the weight once, which costs less
than widening it."""
BLOCK_ELEMENTS = 1 << 22
BLOCK_ROWS = 16
"""Number of rows in each product of `linear_by_blocks`."""
_scratch = threading.local()


@cache
def has_half_arithmetic() -> bool:
    """Return whether this processor has instructions that multiply bfloat16."""
    # torch 2.13 has these functions only under private names.
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


@cache
def has_float16_arithmetic() -> bool:
    """Return whether torch multiplies float16 with instructions of this processor."""
    own = getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None)  # missing in a torch without oneDNN
    return own is not None and bool(own())


def emulates(dtype: torch.dtype) -> bool:
    """Return whether this processor emulates arithmetic in a dtype, so that widening to float32 is faster."""
    if dtype == torch.float16:
        return not has_float16_arithmetic()
    return dtype == torch.bfloat16 and not has_half_arithmetic()


def is_emulated(tensor: Tensor) -> bool:
    """Return whether arithmetic on this tensor is emulated."""
    return tensor.is_cpu and emulates(tensor.dtype)


def multiplies_bfloat16(tensor: Tensor) -> bool:
    """Return whether this is a bfloat16 tensor on a processor that multiplies bfloat16 natively."""
    return tensor.is_cpu and tensor.dtype == torch.bfloat16 and has_half_arithmetic()


def torch_linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x·Wᵀ + b over the last dimension, in x's dtype. The result is differentiable in x and in the weight."""
    rows = x.numel() // x.shape[-1]
    if not is_emulated(weight_OI) or rows == 0:
        return F.linear(x, weight_OI, bias_O)
    if torch.is_grad_enabled() and (x.requires_grad or weight_OI.requires_grad):
        y = F.linear(x.float(), weight_OI.float())
    elif rows < WIDEN_FROM_ROWS:
        y = torch.cat([F.linear(row, weight_OI) for row in x.reshape(rows, 1, -1)]).view(*x.shape[:-1], -1)
    else:
        y = _widened(x.reshape(rows, -1).float(), weight_OI).view(*x.shape[:-1], -1)
    return (y if bias_O is None else y + bias_O).to(x.dtype)


def transposed_linear(x_TI: Tensor, weight_IO: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x·W + b in x's dtype, for a matrix that is stored with one row for each input."""
    if torch.is_grad_enabled() and (x_TI.requires_grad or weight_IO.requires_grad):
        y_TO = x_TI.float() @ weight_IO.float() if is_emulated(weight_IO) else x_TI @ weight_IO
    elif is_emulated(weight_IO) and x_TI.shape[0] >= WIDEN_FROM_ROWS:
        inputs, outputs = weight_IO.shape
        wide_TI, y_TO = x_TI.float(), x_TI.new_zeros(x_TI.shape[0], outputs, dtype=torch.float32)
        step = max(1, BLOCK_ELEMENTS // outputs)
        for start in range(0, inputs, step):
            y_TO.addmm_(wide_TI[:, start : start + step], _wide(weight_IO[start : start + step]))
    else:
        y_TO = x_TI @ weight_IO
    return (y_TO if bias_O is None else y_TO + bias_O).to(x_TI.dtype)


def linear_by_blocks(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x·Wᵀ + b, computed by torch with equally many rows at a time.

    Torch's order of summation depends on the number of rows. Here a row gets the same bits in any company.
    """
    rows = x_TI.shape[0]
    blocks = F.pad(x_TI, (0, 0, 0, -rows % BLOCK_ROWS)).split(BLOCK_ROWS)
    return torch.cat([F.linear(block, weight_OI, bias_O) for block in blocks])[:rows]


def _widened(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """Return float32 x·Wᵀ. The weight is widened one block of rows at a time."""
    outputs, inputs = weight_OI.shape
    y_TO = x_TI.new_empty(x_TI.shape[0], outputs)
    step = max(1, BLOCK_ELEMENTS // inputs)
    for start in range(0, outputs, step):
        y_TO[:, start : start + step] = x_TI @ _wide(weight_OI[start : start + step]).T
    return y_TO


def _wide(block: Tensor) -> Tensor:
    """Return a block of a weight in float32, in this thread's scratch: it is valid until the next call."""
    return _buffer(block.numel())[: block.numel()].view(block.shape).copy_(block)


def _buffer(elements: int) -> Tensor:
    """Return this thread's float32 scratch of at least so many elements; new memory would cost more than the widening."""
    buffer: Tensor | None = getattr(_scratch, "buffer", None)
    if buffer is None or buffer.numel() < elements:
        with torch.inference_mode(False):  # a tensor made in inference mode could not be written to outside of it
            buffer = torch.empty(max(elements, BLOCK_ELEMENTS), dtype=torch.float32)
        _scratch.buffer = buffer
    return buffer
