"""x·Wᵀ for weights stored in half precision, at the speed that the processor allows.

Processors without bfloat16 arithmetic emulate it: on AVX2 a bfloat16 product of 512 rows runs 8 times slower than the same
in float32. There, products of several rows widen the weight a block at a time into a small buffer that stays in cache and
multiply in float32, which is also the more exact result. Single rows are bound by memory: they go through a compiled
kernel where Numba is installed (gemv.py, 1.6 times the speed of torch's) and through torch otherwise. Processors that have
the arithmetic, and GPUs, use torch throughout.

Shape suffixes: T rows, I input features, O output features.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

WIDEN_FROM_ROWS = 4
"""Fewer rows are multiplied one by one: each then costs one read of the weight, less than widening it."""
BLOCK_ELEMENTS = 1 << 22
_scratch = threading.local()


@cache
def has_half_arithmetic() -> bool:
    """Whether this processor multiplies bfloat16 by itself."""
    # torch 2.13 gives these under underscores only.
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def is_emulated(tensor: Tensor) -> bool:
    """Whether arithmetic on this tensor is emulated, so that widening to float32 is faster."""
    return tensor.is_cpu and tensor.dtype in (torch.bfloat16, torch.float16) and not has_half_arithmetic()


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x·Wᵀ + b over the last dimension, in x's dtype. Differentiable in x and in the weight."""
    if not is_emulated(weight_OI):
        return F.linear(x, weight_OI, bias_O)
    rows = x.numel() // x.shape[-1]
    if torch.is_grad_enabled() and (x.requires_grad or weight_OI.requires_grad):
        y = F.linear(x.float(), weight_OI.float())
    elif rows == 0:
        return F.linear(x, weight_OI, bias_O)
    elif rows < WIDEN_FROM_ROWS:
        y = _row_by_row(x.reshape(rows, -1), weight_OI).view(*x.shape[:-1], -1)
    else:
        y = _widened(x.reshape(rows, -1).float(), weight_OI).view(*x.shape[:-1], -1)
    return (y if bias_O is None else y + bias_O).to(x.dtype)


def _row_by_row(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """x·Wᵀ for a few rows, each reading the weight once; float32 from the compiled kernel, x's dtype from torch."""
    gemv = _compiled_gemv()
    if gemv is None or weight_OI.dtype != torch.bfloat16 or not weight_OI.is_contiguous():
        return torch.cat([F.linear(row, weight_OI) for row in x_TI[:, None]])
    bits_OI = weight_OI.view(torch.uint16).numpy()
    y_TO = torch.empty(x_TI.shape[0], weight_OI.shape[0], dtype=torch.float32)
    for x_I, y_O in zip(x_TI.float().numpy(), y_TO.numpy(), strict=True):
        gemv(bits_OI, x_I, y_O, torch.get_num_threads())
    return y_TO


@cache
def _compiled_gemv() -> Callable[..., None] | None:
    """The compiled kernel; None where Numba is missing or has no place for its cache."""
    threads = torch.get_num_threads()
    try:
        from engine.gemv import gemv
    except (ImportError, RuntimeError):
        return None
    nothing = torch.zeros(1, 1)
    gemv(nothing.to(torch.bfloat16).view(torch.uint16).numpy(), nothing[0].numpy(), torch.zeros(1).numpy(), threads)
    # Numba's start gives all cores to the OpenMP pool that it shares with torch; torch takes its own number back.
    torch.set_num_threads(threads)
    return gemv


def _widened(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """float32 x·Wᵀ, the weight widened block of rows by block of rows."""
    outputs, inputs = weight_OI.shape
    y_TO = x_TI.new_empty(x_TI.shape[0], outputs)
    step = max(1, BLOCK_ELEMENTS // inputs)
    for start in range(0, outputs, step):
        block = weight_OI[start : start + step]
        wide = _buffer(block.numel())[: block.numel()].view_as(block)
        wide.copy_(block)
        y_TO[:, start : start + step] = x_TI @ wide.T
    return y_TO


def _buffer(elements: int) -> Tensor:
    """This thread's float32 scratch of at least so many elements; fresh memory would cost more than the widening."""
    buffer: Tensor | None = getattr(_scratch, "buffer", None)
    if buffer is None or buffer.numel() < elements:
        buffer = torch.empty(max(elements, BLOCK_ELEMENTS), dtype=torch.float32)
        _scratch.buffer = buffer
    return buffer
