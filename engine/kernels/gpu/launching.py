"""Shared by all passes on a GPU: the kernels of a step, which compute the norms of prompts too, and graphs."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from engine.kernels.kernel_choice import wanted_kernels

_log = logging.getLogger(__name__)

WIDEST_NORM = 1 << 14
"""Most numbers of a row that one program of the kernel of norms reads."""
_RECORDING = threading.Lock()


@cache
def step_kernels() -> Any:
    """Return the module of Triton's kernels of a step. Raises ImportError without Triton."""
    from engine.kernels.gpu import triton_step

    return triton_step


def power_of_two(number: int) -> int:
    """Return the least power of two that is no smaller."""
    return 1 << max(0, number - 1).bit_length()


def recorded(launch: Callable[[], object], pool: Any) -> torch.cuda.CUDAGraph:
    """Return what `launch` launches as a graph, in memory of `pool` (torch.cuda.graph_pool_handle).

    It has to have run once before. A process may record one graph at a time. After a failure, the caller has its own
    stream again. No garbage is collected meanwhile: CUDA may not destroy a graph while another is recorded.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with _RECORDING, _uncollected():
        torch.cuda.synchronize()
        with torch.cuda.stream(stream), torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
            launch()
    return graph


@contextmanager
def _uncollected() -> Iterator[None]:
    """Collect no garbage inside."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def rms_norm_on_gpu(x: Tensor, weight: Tensor, epsilon: float) -> Tensor | None:
    """Return the RMS norm over the last dimension in one launch, where torch takes seven; None if torch must compute it."""
    size = x.shape[-1]
    is_half = x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16)
    if not x.is_cuda or not is_half or torch.is_grad_enabled() or size > WIDEST_NORM or not x.numel() or not _norms_work():
        return None
    return normed_rows(x.contiguous(), weight, epsilon)


def normed_rows(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return the RMS norm over the last dimension of a contiguous tensor, which Triton must be able to compute."""
    y, size = torch.empty_like(x), x.shape[-1]
    step_kernels().norm_rows[(x.numel() // size,)](x, weight, y, epsilon, INPUTS=size, WIDE=power_of_two(size))
    return y


@cache
def _norms_work() -> bool:
    """Return whether the kernel is wanted and runs on this GPU."""
    if wanted_kernels() == "torch":
        return False
    try:
        ones = torch.ones(1, 32, dtype=torch.bfloat16, device="cuda")
        made = torch.zeros_like(ones)
        step_kernels().norm_rows[(1,)](2 * ones, ones[0], made, 0.0, INPUTS=32, WIDE=32)
        return bool(torch.equal(made, ones))
    except Exception as error:  # raised by Triton, its C compiler, ptxas or the driver, none of which torch needs
        _log.debug("norms run through torch: %s", error)
        return False
