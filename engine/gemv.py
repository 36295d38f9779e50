"""One bfloat16 matrix times one float32 vector, compiled by Numba: the product that decoding consists of.

For processors that only emulate bfloat16 arithmetic, where torch's own product is bound by conversion instead of memory.
Optional (`pip install moe-compress[fast]`); without Numba the same products run in torch.

Shape suffixes: O output features, I input features.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic


@intrinsic  # type: ignore[untyped-decorator]
def _as_float(context: Any, bits: Any) -> Any:
    """The float32 with these 32 bits: a bfloat16 is the upper half of one."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return numba.float32(numba.uint32), generate


@numba.njit(parallel=True, fastmath=True, nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _gemv(weight_OI: Any, x_I: Any, y_O: Any) -> None:
    for row in numba.prange(weight_OI.shape[0]):  # each thread takes one run of consecutive rows
        total = np.float32(0.0)
        for column in range(weight_OI.shape[1]):
            total += _as_float(np.uint32(weight_OI[row, column]) << np.uint32(16)) * x_I[column]
        y_O[row] = total


def gemv(weight_OI: Any, x_I: Any, y_O: Any, threads: int) -> None:
    """y = W·x on so many threads. weight_OI: the bfloat16 weight's bits as uint16; x_I, y_O: float32."""
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    _gemv(weight_OI, x_I, y_O)
