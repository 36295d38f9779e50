"""Conversion between bfloat16 and float32, and the exponential function, in operations that vectorize; the largest value."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from engine.kernels.compiler.compiling import inline
from engine.kernels.compiler.memory import halves


@intrinsic  # type: ignore[untyped-decorator]
def as_float(context: Any, bits: Any) -> Any:
    """Return the float32 with these 32 bits. A bfloat16 is the upper half of a float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return numba.float32(numba.uint32), generate


@intrinsic  # type: ignore[untyped-decorator]
def as_bits(context: Any, value: Any) -> Any:
    """Return the 32 bits of a float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return numba.uint32(numba.float32), generate


@inline
def widen(bits: Any) -> Any:
    """Return the float32 value of a bfloat16, which is given as its bits."""
    return as_float(np.uint32(bits) << np.uint32(16))


@inline
def narrow(value: Any) -> Any:
    """Return the bits of the bfloat16 that is nearest to a float32 value, with ties to even."""
    bits = as_bits(value)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@inline
def narrow_pair(low: Any, high: Any) -> Any:
    """Round two float32 values to bfloat16 and return them in one number, the first value in the lower half."""
    return np.uint32(narrow(low)) | np.uint32(narrow(high)) << np.uint32(16)


LOWEST, HIGHEST, LOG2_E = -87.0, 88.0, 1.4426950408889634
"""The exponents between which e^x is computed, and 1 / ln(2)."""
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
"""Two parts of ln(2); the first ends after 9 digits of two, so that its multiples are exact."""
FIRST, SERIES = 1.0 / 720.0, (1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0)
"""Coefficients of the series of e^r, from the highest power on."""


@inline
def exp(x: Any) -> Any:
    """Return e^x in float32, accurate to 2 units in the last place, as 2^n · e^r with |r| ≤ ln(2) / 2."""
    x = min(max(x, np.float32(LOWEST)), np.float32(HIGHEST))
    n = np.floor(x * np.float32(LOG2_E) + np.float32(0.5))
    r = (x - n * np.float32(LN2_HIGH)) - n * np.float32(LN2_LOW)
    series = np.float32(FIRST)
    for coefficient in SERIES:
        series = series * r + np.float32(coefficient)
    return series * as_float(np.uint32(np.int32(n) + np.int32(127)) << np.uint32(23))


@inline
def largest_magnitude(values: Any, first: Any, count: Any) -> Any:
    """Return the largest magnitude of so many values from `first` on, and zero, or NaN where one of them is not finite."""
    largest = zero = np.float32(0.0)
    for index in range(first, first + count):
        largest = max(largest, abs(values[index]))
        zero += values[index] * np.float32(0.0)
    return largest, zero


@inline
def two_bytes(number: Any) -> Any:
    """Return the signed bytes of an integer of 15 bits, which is 128 · the first + the second."""
    high = (number + np.int32(64)) >> np.int32(7)
    return np.int8(high), np.int8(number - (high << np.int32(7)))


@inline
def place_of_largest(values_N: Any) -> Any:
    """Return the place of the largest value, the first one where several are."""
    best = 0
    for place in range(1, values_N.shape[0]):
        if values_N[place] > values_N[best]:
            best = place
    return best


@inline
def wide_vector(address: Any, length: Any) -> Any:
    """Return a float32 copy of the bfloat16 values at an address."""
    bits = numba.carray(halves(address), (length,))
    wide = np.empty(length, np.float32)
    for index in range(length):
        wide[index] = widen(bits[index])
    return wide
