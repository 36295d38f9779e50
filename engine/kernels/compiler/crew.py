"""Threads that stay with one step of decoding from its first loop to its last: a crew.

A parallel loop of OpenMP costs some microseconds, mostly for system calls that wake threads, and a step has dozens of loops.
The threads of a crew enter one loop of OpenMP. The first thread computes the step, and opens a loop of its own wherever work
is shared. The others wait for open loops without sleeping.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.compiler.compiling import TABLE_OF_ADDRESSES, helper, kernel
from engine.kernels.compiler.memory import add_shared, integers, read_shared, record_at, write_shared
from engine.kernels.compiler.parallel import LINE_BYTES, take_blocks
from engine.kernels.compiler.processor import IS_ARM

_LINE = LINE_BYTES // 8
CREW = np.dtype(
    [
        *((name, np.int64) for name in ("block", "job", "count", "threads", "counters", "loops")),
        ("unused", np.int64, _LINE - 6),
        ("open", np.int64, _LINE),  # number of the open loop; 0 while none is, negative when there will be no more
        ("busy", np.int64, _LINE),  # number of threads that may be in a loop
    ]
)
"""A crew: the current loop, and two integers that all threads read and write, in a line of the caches each."""
crew_at = record_at(CREW)
_FIELDS: Any = CREW.fields
_OPEN, _BUSY = (_FIELDS[name][1] for name in ("open", "busy"))
OWN_TABLE = np.dtype([*TABLE_OF_ADDRESSES.descr, ("crew", np.int64)])
"""A step's copy of the table of kernels, and the address of its crew."""
own_table_at = record_at(OWN_TABLE)
_YIELD = 1
"""ARM's number of the hint that a thread waits for another."""
_PATIENCE = 4096
"""Number of looks at a shared integer after which a thread that waits lets others have its processor."""


@intrinsic  # type: ignore[untyped-decorator]
def _pause(context: Any) -> Any:
    """Wait for a moment, in which another thread of the same core may run."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = ir.IntType(32)
        name, given = ("llvm.aarch64.hint", [number(_YIELD)]) if IS_ARM else ("llvm.x86.sse2.pause", [])
        kind = ir.FunctionType(ir.VoidType(), [each.type for each in given])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, name), given)
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def _let_others_run(context: Any) -> Any:
    """Let another thread have the processor, if one waits for it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), generate


@helper
def _wait(looks: Any) -> Any:
    """Wait between two looks at a shared integer. Returns the number of looks so far."""
    if looks < _PATIENCE:
        _pause()
    else:
        _let_others_run()
    return looks + 1


@helper
def begin_crew(crew: Any, threads: Any, counters: Any) -> None:
    """Prepare the record at an address. counters: address of `threads` lines."""
    own = crew_at(crew)
    own.threads, own.counters, own.loops = threads, counters, 0
    write_shared(crew + _OPEN, 0)
    write_shared(crew + _BUSY, 0)


@helper
def end_crew(crew: Any) -> None:
    """Let the other threads leave."""
    write_shared(crew + _OPEN, -1)


@kernel("void(int64, int64, int64)")
def crew_for(block: Any, job: Any, count: Any) -> None:
    """Call block(job, index) for each index below `count`, as `parallel_for` does. The first integer of the job's record is
    the address of an OWN_TABLE.

    A thread that comes late finds the loop closed, and nobody waits for it.
    """
    crew = own_table_at(integers(job)[0]).crew
    own = crew_at(crew)
    counters = numba.carray(integers(own.counters), (own.threads * _LINE,))
    for thread in range(own.threads):
        counters[thread * _LINE] = 0
    own.block, own.job, own.count = block, job, count
    own.loops += 1
    write_shared(crew + _OPEN, own.loops)
    take_blocks(block, job, count, own.counters, own.threads, 0)
    write_shared(crew + _OPEN, 0)
    looks = 0
    while read_shared(crew + _BUSY) != 0:
        looks = _wait(looks)


@helper
def serve(crew: Any, thread: Any) -> None:
    """Take part in the loops of a crew until it ends."""
    own, served, looks = crew_at(crew), 0, 0
    while True:
        loop = read_shared(crew + _OPEN)
        if loop < 0:
            return
        if loop == 0 or loop == served:
            looks = _wait(looks)
            continue
        add_shared(crew + _BUSY, 1)
        if read_shared(crew + _OPEN) == loop:  # it cannot be closed and left before this thread has ended its work
            take_blocks(own.block, own.job, own.count, own.counters, own.threads, thread)
            served, looks = loop, 0
        add_shared(crew + _BUSY, -1)
