"""x·Wᵀ for weights stored in half precision or as low-bit weights, with the fastest method for this processor.

Decoding multiplies a few rows and is bound by memory bandwidth. In bfloat16 these products use compiled kernels if Numba is
installed (engine/kernels), and torch otherwise. Products of many rows use torch, except on processors that only emulate
bfloat16 arithmetic (on AVX2 a product of 512 rows takes 8 times as long as in float32). There the weight is widened one
block at a time into a small buffer that stays in cache, and multiplied in float32, which is also more exact.

A low-bit weight is dequantized for its product and discarded afterwards, so only one matrix of a model is wide at a time.

Shape suffixes: T rows, I input features, O output features, D hidden, F expert width.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.errors import OptionError
from engine.kernels.quantized_weight import QuantizedWeight, Weight
from engine.kernels.trial import TRIAL_SHAPE, pays
from engine.progress import Progress, no_progress

SHAPES_KEPT = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Environment variables for the number of shapes whose compiled products oneDNN, and torch's layer above it, keep. Each
takes about 1 MB, and the default is 1,024 shapes. The shapes vary: each expert of each batch has another number of tokens,
and each block of a long prompt another number of keys."""
for _name in SHAPES_KEPT:  # these variables are read when the first product is computed
    os.environ.setdefault(_name, "64")

KERNELS = "COMPRESS_KERNELS"
"""Environment variable for what decodes, and on a GPU runs experts: `compiled`, `torch`, or `auto`, which tries both when a
model is loaded."""
COMPILED_MAX_ROWS = 64
"""Maximum number of rows for the compiled kernels. Above it, the kernels for products are used if the processor multiplies
bfloat16, and torch does everything else."""
WIDEN_FROM_ROWS = 4
"""Minimum number of rows for widening. Fewer rows are multiplied one by one: each reads the weight once, which costs less
than widening it."""
BLOCK_ELEMENTS = 1 << 22
_local = threading.local()


@cache
def has_half_arithmetic() -> bool:
    """Return whether this processor has instructions that multiply bfloat16."""
    # torch 2.13 has these functions only under private names.
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def is_emulated(tensor: Tensor) -> bool:
    """Return whether arithmetic on this tensor is emulated, so that widening to float32 is faster."""
    return tensor.is_cpu and tensor.dtype in (torch.bfloat16, torch.float16) and not has_half_arithmetic()


def multiplies_bfloat16(tensor: Tensor) -> bool:
    """Return whether this is a bfloat16 tensor on a processor that multiplies bfloat16 natively."""
    return tensor.is_cpu and tensor.dtype == torch.bfloat16 and has_half_arithmetic()


def linear(x: Tensor, weight_OI: Weight, bias_O: Tensor | None = None) -> Tensor:
    """Return x·Wᵀ + b over the last dimension, in x's dtype. The result is differentiable in x and in a plain weight."""
    return linears(x, (weight_OI,), (bias_O,))[0]


def linears(x: Tensor, weights: Sequence[Weight], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """Return `linear` of x with each of several weights. A few rows take one compiled call for all weights."""
    rows = x.numel() // x.shape[-1]
    kernels = product_kernels(rows, x)
    form = None if kernels is None or not serves_rows(kernels, rows, weights) else kernel_form(kernels, weights)
    if form is None:
        return [_linear(x, plain(weight, x.dtype), bias) for weight, bias in zip(weights, biases, strict=True)]
    outputs = [weight.shape[0] for weight in weights]
    many = takes_many(rows)
    made = kernels.products(x.data_ptr(), rows, list(map(addresses, weights)), outputs, x.shape[-1], form, many=many)
    y = as_bfloat16(made).view(*x.shape[:-1], -1)
    pieces = (y,) if len(outputs) == 1 else y.split_with_sizes(outputs, dim=-1)
    return [piece if bias is None else piece + bias for piece, bias in zip(pieces, biases, strict=True)]


def _linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
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


def is_decoding() -> bool:
    """Return whether this thread is inside `decoding`."""
    return getattr(_local, "is_decoding", False)


def is_reading() -> bool:
    """Return whether this thread is inside `reading`."""
    return getattr(_local, "is_reading", False)


def may_compile() -> bool:
    """Return whether this thread is inside `decoding` or `reading`."""
    return is_decoding() or is_reading()


def compiled_kernels(rows: int, *tensors: Tensor) -> Any:
    """Return the module of compiled kernels if it serves so many rows of these tensors inside `decoding`, else None."""
    return any_kernels(*tensors) if is_decoding() and 1 <= rows <= COMPILED_MAX_ROWS else None


def takes_many(rows: int) -> bool:
    """Return whether products of so many rows use the kernels for many rows.

    All products of prompts do. These kernels have their own order of summation, so a prompt gets bit-identical results
    whether it is read in pieces or as a whole.
    """
    return is_reading() or rows > COMPILED_MAX_ROWS


def product_kernels(rows: int, *tensors: Tensor) -> Any:
    """Return `compiled_kernels` for products. Kernels for many rows count too, in `decoding` or `reading`, if they pay."""
    if not takes_many(rows):
        return compiled_kernels(rows, *tensors)
    return any_kernels(*tensors) if rows and may_compile() and _many_pay() else None


def serves_rows(kernels: Any, rows: int, weights: Sequence[Weight]) -> bool:
    """Return whether `product_kernels` multiply these matrices with so many rows."""
    return not takes_many(rows) or all(kernels.multiplies_many(*weight.shape) for weight in weights)


def any_kernels(*tensors: Tensor) -> Any:
    """Return the module of compiled kernels if it serves these tensors inside `decoding` or `reading`, else None."""
    if not may_compile() or not all(map(_is_served, tensors)):
        return None
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return None
    kernels = _load_kernels()
    threads = torch.get_num_threads()
    if kernels is not None and getattr(_local, "threads", None) != threads:
        kernels.use_threads(threads)
        _local.threads = threads
    return kernels


def _is_served(tensor: Tensor) -> bool:
    return tensor.dtype == torch.bfloat16 and tensor.is_cpu and tensor.is_contiguous()


def plain(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Return the matrix of a weight: a low-bit weight is dequantized to `dtype`, another weight is returned unchanged."""
    if not isinstance(weight, QuantizedWeight):
        return weight
    kernels = (
        _loaded_kernels() if dtype == torch.bfloat16 and _is_served(weight.scales_OC) and _lies_packed(weight) else None
    )
    if kernels is not None and weight.group_size % kernels.ROUNDED == 0:
        return as_bfloat16(kernels.dequantized(weight.addresses, weight.shape, (weight.bits, weight.group_size)))
    return weight.dequantised(dtype)


def _lies_packed(weight: QuantizedWeight) -> bool:
    """Return whether the rows lie without gaps."""
    return weight.packed_OB.is_contiguous() and weight.packed_OB.shape[1] * 8 == weight.shape[1] * weight.bits


def kernel_form(kernels: Any, weights: Sequence[Weight]) -> tuple[int, int] | None:
    """Return the form that all these weights share, as the kernels need it; None if the kernels cannot serve the weights."""
    forms = {
        _packed_form(kernels, each) if isinstance(each, QuantizedWeight) else _plain_form(kernels, each) for each in weights
    }
    return forms.pop() if len(forms) == 1 else None


def _plain_form(kernels: Any, weight: Tensor) -> tuple[int, int] | None:
    trains = torch.is_grad_enabled() and weight.requires_grad
    form: tuple[int, int] = kernels.PLAIN
    return form if _is_served(weight) and not trains else None


def _packed_form(kernels: Any, weight: QuantizedWeight) -> tuple[int, int] | None:
    served = (
        kernels.MULTIPLIES_INTEGERS
        and _is_served(weight.scales_OC)
        and _lies_packed(weight)
        and weight.shape[0] % kernels.MULTIPLE_OF_OUTPUTS == 0
        and weight.group_size in kernels.GROUP_SIZES
    )
    return (weight.bits, weight.group_size) if served else None


def addresses(weight: Weight) -> tuple[int, int]:
    """Return the addresses of a weight's values and of its scales; 0 if the weight has no scales."""
    return weight.addresses if isinstance(weight, QuantizedWeight) else (weight.data_ptr(), 0)


def prepare_decoding(
    dtype: torch.dtype,
    device: torch.device,
    needed: Callable[[Any], Iterable[Any]] | None = None,
    progress: Progress = no_progress,
) -> None:
    """Load the kernels that `decoding` will use, so that the first token does not wait for them."""
    if dtype != torch.bfloat16 or device.type != "cpu" or (kernels := _import_kernels()) is None:
        return
    _load(kernels, [] if needed is None else needed(kernels), progress)
    _many_pay()


@contextmanager
def decoding() -> Iterator[None]:
    """Enable the compiled kernels in this thread. Outside of decoding, loading them would cost more than they save."""
    with _set("is_decoding"):
        yield


@contextmanager
def reading() -> Iterator[None]:
    """Enable the kernels for many rows in this thread. It is used around the prompts of a model that will decode."""
    with _set("is_reading"):
        yield


@contextmanager
def _set(name: str) -> Iterator[None]:
    before = getattr(_local, name, False)
    setattr(_local, name, True)
    try:
        yield
    finally:
        setattr(_local, name, before)


def as_bfloat16(bits: Any) -> Tensor:
    """Return a kernel's result as a tensor."""
    return torch.from_numpy(bits).view(torch.bfloat16)


def _loaded_kernels() -> Any:
    """Return the compiled kernels if `decoding` has loaded them, else None."""
    return _load_kernels() if _load_kernels.cache_info().currsize else None


def wanted_kernels() -> str:
    """Return `auto`, `compiled` or `torch`. Raises OptionError if `COMPRESS_KERNELS` has another value."""
    wanted = os.environ.get(KERNELS, "auto")
    if wanted not in ("auto", "compiled", "torch"):
        raise OptionError(f"{KERNELS} is {wanted!r}; it must be auto, compiled or torch")
    return wanted


@cache
def _load_kernels() -> Any:
    """Return the compiled kernels, or None if they are unwanted, Numba is missing or cannot keep its cache, or torch is
    faster.

    Raises:
        OptionError: `COMPRESS_KERNELS` has an unknown value.
    """
    kernels = _import_kernels()
    if kernels is None:
        return None
    _load(kernels, [kernels.KERNELS["parallel_for"]])
    return kernels if wanted_kernels() == "compiled" or pays(kernels, 1, many=False) else None


def _import_kernels() -> Any:
    """The module of compiled kernels; None if they are not wanted, Numba is missing or has no place for its cache."""
    if wanted_kernels() == "torch":
        return None
    try:
        from engine.kernels import compiled
    except (ImportError, RuntimeError):
        return None
    return compiled


def _load(kernels: Any, needed: Iterable[Any], progress: Progress = no_progress) -> None:
    """Load these kernels. Numba's start gives all cores to the OpenMP pool that it shares with torch, which takes its own
    number of threads back."""
    threads = torch.get_num_threads()
    kernels.prepare(needed, progress)
    torch.set_num_threads(threads)


@cache
def _many_pay() -> bool:
    """Return whether the compiled kernels also serve more than `COMPILED_MAX_ROWS` rows."""
    kernels = _load_kernels()
    if kernels is None or not kernels.multiplies_many(*TRIAL_SHAPE):
        return False
    return wanted_kernels() == "compiled" or pays(kernels, 2 * COMPILED_MAX_ROWS, many=True)


def _widened(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """Return float32 x·Wᵀ. The weight is widened one block of rows at a time."""
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
    """Return this thread's float32 scratch of at least so many elements; new memory would cost more than the widening."""
    buffer: Tensor | None = getattr(_local, "buffer", None)
    if buffer is None or buffer.numel() < elements:
        with torch.inference_mode(False):  # a tensor made in inference mode could not be written to outside of it
            buffer = torch.empty(max(elements, BLOCK_ELEMENTS), dtype=torch.float32)
        _local.buffer = buffer
    return buffer
