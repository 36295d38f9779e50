"""Which kernels compute the products of a forward pass: compiled ones, or torch's.

`Engine.open` binds one KernelChoice for prompts and one for decoding to its model. Every product of a forward pass is given
the pass's choice; without one, torch computes it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from engine.errors import OptionError
from engine.kernels.plain_forms import FLOATS, FORMS, OF_PROMPTS, plain_form
from engine.kernels.trial import TRIAL_SHAPE, pays
from engine.progress import Progress, no_progress

KERNELS = "COMPRESS_KERNELS"
"""Environment variable that chooses the kernels of decoding, and of experts on a GPU: `compiled`, `torch`, or `auto`, which
tries both when a model is loaded. Rounding to K types uses compiled kernels unless the variable is `torch`."""
COMPILED_MAX_ROWS = 64
"""Maximum number of rows for the kernels for few rows. Above it, the kernels for many rows are used, and torch for matrices
that these do not take."""
FLOATS_MAX_ROWS = 16
"""Maximum number of rows for the kernels for few rows in float32 and float16. Torch computes more, up to those for many."""


@dataclass(frozen=True)
class KernelChoice:
    """Which products of one forward pass use compiled kernels, and on how many threads."""

    may_compile: bool = False
    """Whether compiled kernels may be used. Loading them costs more than they save, except for a model that generates."""
    max_few_rows: int = 0
    """Maximum number of rows for the kernels for few rows; 0 for a prompt.

    All products of a prompt use the kernels for many rows. These have their own order of summation, so a prompt gets
    bit-identical results whether it is read in pieces or as a whole.
    """
    threads: int | None = None
    """Threads of the compiled kernels; None for torch's number."""
    observer: Callable[[Tensor, Sequence[Any]], None] | None = None
    """Sees the input of every product, and the weights that are multiplied by it."""

    def with_threads(self, threads: int | None) -> KernelChoice:
        """Return this choice with another number of threads."""
        return replace(self, threads=threads)

    def takes_many(self, rows: int) -> bool:
        """Return whether products of so many rows use the kernels for many rows."""
        return rows > self.max_few_rows

    def for_few(self, rows: int, *tensors: Tensor) -> Any:
        """Return the module of compiled kernels if it serves so few rows of these tensors, else None."""
        return self.for_any(*tensors) if 1 <= rows <= self.max_few_rows else None

    def for_products(self, rows: int, *tensors: Tensor) -> Any:
        """Return the module of compiled kernels if it multiplies so many rows of these tensors and pays, else None."""
        if tensors and tensors[0].dtype in FLOATS:
            return self._for_floats(rows, *tensors)
        if not self.takes_many(rows):
            return self.for_few(rows, *tensors)
        return self.for_any(*tensors) if rows and self.may_compile and _many_pay() else None

    def for_any(self, *tensors: Tensor) -> Any:
        """Return the module of compiled kernels if it serves these tensors, else None."""
        if not self.may_compile or not all(map(is_served, tensors)):
            return None
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return None
        kernels = _load_kernels()
        if kernels is not None:
            kernels.use_threads(self.threads or torch.get_num_threads())
        return kernels

    def for_attention(self, query: Tensor, *others: Tensor) -> Any:
        """Return the module of compiled kernels if it attends for queries [B, H, L, E] of prompts, else None.

        others: tensors that are computed with. The kernels attend wherever their products for many rows pay.
        """
        if self.max_few_rows or query.dtype != torch.bfloat16 or not query.is_cpu:
            return None
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, *others)):
            return None
        return self.for_products(query.shape[0] * query.shape[2])

    def _for_floats(self, rows: int, *tensors: Tensor) -> Any:
        """Return the module of compiled kernels if it multiplies so many rows of float32 or float16 and pays, else None."""
        dtype, many = tensors[0].dtype, self.takes_many(rows)
        is_served = dtype in OF_PROMPTS if many else rows <= FLOATS_MAX_ROWS
        if not self.may_compile or not is_served or rows < 1:
            return None
        if torch.is_grad_enabled() or not all(each.is_cpu and each.is_contiguous() for each in tensors):
            return None
        kernels = _load_for_floats(dtype)
        if kernels is None or (many and not _many_pay(dtype)):
            return None
        kernels.use_threads(self.threads or torch.get_num_threads())
        return kernels


TORCH = KernelChoice()
"""Torch computes everything: training, calibration, and whatever else runs through a model once."""
PROMPT = KernelChoice(may_compile=True)
"""A prompt of a model that will decode."""
DECODING = KernelChoice(may_compile=True, max_few_rows=COMPILED_MAX_ROWS)
"""A step of decoding, for one sequence or several."""


def is_served(tensor: Tensor) -> bool:
    """Return whether the compiled kernels read this tensor of bfloat16."""
    return tensor.dtype == torch.bfloat16 and tensor.is_cpu and tensor.is_contiguous()


def wanted_kernels() -> str:
    """Return `auto`, `compiled` or `torch`. Raises OptionError if `COMPRESS_KERNELS` has another value."""
    wanted = os.environ.get(KERNELS, "auto")
    if wanted not in ("auto", "compiled", "torch"):
        raise OptionError(f"{KERNELS} is {wanted!r}; it must be auto, compiled or torch")
    return wanted


def prepare_decoding(
    dtype: torch.dtype,
    device: torch.device,
    needed: Callable[[Any], Iterable[Any]] | None = None,
    progress: Progress = no_progress,
) -> None:
    """Load the kernels that decode a model, so that the first token does not wait for them."""
    if dtype not in FORMS or device.type != "cpu" or (kernels := _import_kernels()) is None:
        return
    if dtype in FLOATS:
        _load(kernels, kernels.needed_for_floats(plain_form(kernels, dtype)), progress)
        if _load_for_floats(dtype) is not None and dtype in OF_PROMPTS:
            _many_pay(dtype)
        return
    _load(kernels, [] if needed is None else needed(kernels), progress)
    _many_pay()


def has_kernels(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the compiled kernels compute whole steps in this dtype on this device. This loads them."""
    return dtype == torch.bfloat16 and device.type == "cpu" and _load_kernels() is not None


def block_types_multiplied(dtype: torch.dtype, device: torch.device) -> Container[str]:
    """Return the types of GGUF's blocks and of packed floats that the kernels multiply as they are stored; none without
    kernels.
    """
    return (*_load_kernels().BLOCK_KINDS, *_load_kernels().FLOAT_KINDS) if has_kernels(dtype, device) else ()


def imported_kernels() -> Any:
    """Return the compiled kernels for work that is no product, whose speed is not tried; None where there are none."""
    if (kernels := _import_kernels()) is not None:
        _load(kernels, [kernels.KERNELS["parallel_for"]])
        kernels.use_threads(torch.get_num_threads())
    return kernels


def loaded_kernels() -> Any:
    """Return the compiled kernels if a model that generates has loaded them, else None."""
    return _load_kernels() if _load_kernels.cache_info().currsize else None


@cache
def _load_kernels() -> Any:
    """Return the compiled kernels, or None if they are unwanted, Numba is missing or cannot keep its cache, or torch is
    faster.

    Raises:
        OptionError: `COMPRESS_KERNELS` has an unknown value.
    """
    kernels = imported_kernels()
    if kernels is None:
        return None
    return kernels if wanted_kernels() == "compiled" or pays(kernels, 1, many=False) else None


@cache
def _load_for_floats(dtype: torch.dtype) -> Any:
    """Return the compiled kernels for weights in float32 or float16, or None as `_load_kernels`."""
    kernels = imported_kernels()
    if kernels is None:
        return None
    return kernels if wanted_kernels() == "compiled" or pays(kernels, 1, many=False, dtype=dtype) else None


def _import_kernels() -> Any:
    """Return the module of compiled kernels; None if it is unwanted, or Numba is missing or cannot keep its cache."""
    return None if wanted_kernels() == "torch" else _module()


@cache
def _module() -> Any:
    """Return the module of compiled kernels; None if Numba is missing or cannot keep its cache."""
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
def _many_pay(dtype: torch.dtype = torch.bfloat16) -> bool:
    """Return whether the compiled kernels also serve more than `COMPILED_MAX_ROWS` rows."""
    kernels = _load_kernels() if dtype == torch.bfloat16 else _load_for_floats(dtype)
    if kernels is None or not kernels.multiplies_many(*TRIAL_SHAPE):
        return False
    return wanted_kernels() == "compiled" or pays(kernels, 2 * COMPILED_MAX_ROWS, many=True, dtype=dtype)
