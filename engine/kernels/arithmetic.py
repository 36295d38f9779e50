"""Numbers: bfloat16 to float32 and back, and the exponential function, in operations that vectorize."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from engine.kernels.compiling import inline
from engine.kernels.memory import halves


@intrinsic  # type: ignore[untyped-decorator]
def as_float(context: Any, bits: Any) -> Any:
    """The float32 with these 32 bits: a bfloat16 is the upper half of one."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return numba.float32(numba.uint32), generate


@intrinsic  # type: ignore[untyped-decorator]
def _as_bits(context: Any, value: Any) -> Any:
    """The 32 bits of a float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return numba.uint32(numba.float32), generate


@inline
def widen(bits: Any) -> Any:
    """A bfloat16's bits as float32."""
    return as_float(np.uint32(bits) << np.uint32(16))


@inline
def narrow(value: Any) -> Any:
    """float32 to the nearest bfloat16's bits, ties to even."""
    bits = _as_bits(value)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@inline
def narrow_pair(low: Any, high: Any) -> Any:
    """Two float32 values as neighbouring bfloat16, the first one in the lower half."""
    return np.uint32(narrow(low)) | np.uint32(narrow(high)) << np.uint32(16)


@inline
def exp(x: Any) -> Any:
    """e^x in float32 to 2 units in the last place, in operations that vectorize: 2^n · e^r with |r| ≤ ln(2) / 2."""
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    n = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
    r = (x - n * np.float32(0.693359375)) + n * np.float32(2.12194440e-4)
    series = np.float32(1.0 / 720.0)
    for coefficient in (1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0):
        series = series * r + np.float32(coefficient)
    return series * as_float(np.uint32(np.int32(n) + np.int32(127)) << np.uint32(23))


@inline
def wide_vector(address: Any, length: Any) -> Any:
    """A copy in float32 of the bfloat16 values at an address."""
    bits = numba.carray(halves(address), (length,))
    wide = np.empty(length, np.float32)
    for index in range(length):
        wide[index] = widen(bits[index])
    return wide
