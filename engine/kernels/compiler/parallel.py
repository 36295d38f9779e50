"""The loop that runs on several threads, and the one for work that is too little for that. Kernels call one of them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.compiler.compiling import TABLE, TABLE_OF_ADDRESSES, helper, inline, kernel
from engine.kernels.compiler.memory import address_of, call, keep, record_at, take_next

kernels_at = record_at(TABLE_OF_ADDRESSES)
TABLE_ADDRESS = int(TABLE.ctypes.data)
ONE_THREAD_BYTES = 1 << 18
"""Bytes of weights, keys or values below which one thread reads all of them: two would mostly wait for each other."""


@intrinsic  # type: ignore[untyped-decorator]
def threads_of_loops(context: Any) -> Any:
    """Return the number of threads of a parallel loop. Code that calls Numba's own function for it cannot be cached."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(types.intp.bitwidth), [])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "get_num_threads"), [])

    return types.int64(), generate


LINE_BYTES = 64
"""Bytes of a line of the caches: counters in one line would slow each other down."""


@helper
def take_blocks(block: Any, job: Any, count: Any, counters: Any, threads: Any, thread: Any) -> None:
    """Call block(job, index) for the indexes that this thread takes, until none is left.

    Each thread begins with its own run of consecutive indexes. A thread that has finished its own takes indexes of the
    others, so that one whose processor is busy with something else does not hold up all. counters: address of a line of the
    caches for each thread, which begins with a counter.
    """
    for turn in range(threads):
        own = (thread + turn) % threads
        first, end = own * count // threads, (own + 1) * count // threads
        index = first + take_next(counters + LINE_BYTES * own)
        while index < end:
            call(block, (job, np.int64(index)))
            index = first + take_next(counters + LINE_BYTES * own)


@kernel("void(int64, int64, int64)", is_parallel=True)
def parallel_for(block: Any, job: Any, count: Any) -> None:
    """Call block(job, index) for each index below `count`."""
    threads = threads_of_loops()
    taken = np.zeros(threads * LINE_BYTES // 8, np.int64)
    counters = address_of(taken)
    for thread in numba.prange(threads):
        take_blocks(block, job, count, counters, threads, thread)
    keep(taken)


@kernel("void(int64, int64, int64)")
def serial_for(block: Any, job: Any, count: Any) -> None:
    """Call block(job, index) for each index below `count`, on this thread."""
    for index in range(count):
        call(block, (job, np.int64(index)))


@inline
def loop_for(table: Any, size: Any) -> Any:
    """Return the address of the loop for work that reads so many bytes."""
    return table.serial_for if size < ONE_THREAD_BYTES else table.parallel_for


@inline
def loop_of(table: Any, threads: Any) -> Any:
    """Return the address of the loop for work that pays on any number of threads: one thread needs no parallel loop."""
    return table.serial_for if threads == 1 else table.parallel_for


def use_threads(count: int) -> None:
    """Set the number of threads of this thread's later calls, at most the number that Numba started with."""
    count = min(count, numba.config.NUMBA_NUM_THREADS)
    if numba.get_num_threads() != count:  # half the time of setting it
        numba.set_num_threads(count)


@cache
def uses_openmp() -> bool:
    """Return whether parallel loops are OpenMP's. The first of its threads has the first index, whatever their number."""
    numba.get_num_threads()  # Numba chooses at the first use
    return bool(numba.threading_layer() == "omp")


def threads_used() -> int:
    """Return the number of threads of this thread's calls."""
    count: int = numba.get_num_threads()
    return count
