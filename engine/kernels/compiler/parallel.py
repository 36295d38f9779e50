"""The loop that runs on several threads, and the one for work that is too little for that. Kernels call one of them."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from engine.kernels.compiler.compiling import TABLE, TABLE_OF_ADDRESSES, inline, kernel
from engine.kernels.compiler.memory import call, record_at

kernels_at = record_at(TABLE_OF_ADDRESSES)
TABLE_ADDRESS = int(TABLE.ctypes.data)
ONE_THREAD_BYTES = 1 << 18
"""Bytes of weights, keys or values below which one thread reads all of them: two would mostly wait for each other."""


@kernel("void(int64, int64, int64)", is_parallel=True)
def parallel_for(block: Any, job: Any, count: Any) -> None:
    """Call block(job, index) for each index below `count`. Each thread takes one run of consecutive indexes."""
    for index in numba.prange(count):
        call(block, (job, np.int64(index)))


@kernel("void(int64, int64, int64)")
def serial_for(block: Any, job: Any, count: Any) -> None:
    """Call block(job, index) for each index below `count`, on this thread."""
    for index in range(count):
        call(block, (job, np.int64(index)))


@inline
def loop_for(table: Any, size: Any) -> Any:
    """Return the address of the loop for work that reads so many bytes."""
    return table.serial_for if size < ONE_THREAD_BYTES else table.parallel_for


def use_threads(count: int) -> None:
    """Set the number of threads of this thread's later calls, at most the number that Numba started with."""
    count = min(count, numba.config.NUMBA_NUM_THREADS)
    if numba.get_num_threads() != count:  # half the time of setting it
        numba.set_num_threads(count)


def threads_used() -> int:
    """Return the number of threads of this thread's calls."""
    count: int = numba.get_num_threads()
    return count
