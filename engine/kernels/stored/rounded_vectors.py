"""Vectors rounded to 8 bits, as they are multiplied with low-bit matrices and with blocks of GGUF's types.

Each 32 values share a scale. Where several weights share a byte, a product unpacks the first weights of 64 bytes into one
register, then the second ones, and so on. The values of a vector lie in the order in which weights are unpacked.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from engine.kernels.compiler.compiling import inline, kernel
from engine.kernels.compiler.memory import floats, signed_bytes
from engine.kernels.dot_products import PREPARE

ROUNDED = 32
"""Number of values of a vector that share a scale."""
CHUNK = 512
"""Number of weights in one step of a product. Their scales fill a vector register, or a part of one."""
UNIT = {8: 64, 4: 128, 3: 256, 2: 256}
"""Number of weights that are unpacked together, by their bits."""


@inline
def place_in_unit(weight: Any, bits: Any, unit: Any) -> Any:
    """Return the place of a weight of a unit, or of 32 weights at the end of a row, in the registers that it is unpacked to.

    With 8, 4 and 2 bits, the first weights of all bytes precede the second ones. With 3 bits, the first eight of each 32
    weights precede the second eight of each, and so on.
    """
    if bits == 8:
        return weight
    if bits == 3:
        return weight % ROUNDED // 8 * (unit // 4) + weight // ROUNDED * 8 + weight % 8
    in_a_byte = 8 // bits
    return weight // in_a_byte + weight % in_a_byte * (unit // in_a_byte)


@inline
def largest_of(values: Any, first: Any, count: Any) -> Any:
    """Return the largest magnitude of so many values from `first` on, and zero, or NaN where one of them is not finite."""
    largest = zero = np.float32(0.0)
    for index in range(first, first + count):
        largest = max(largest, abs(values[index]))
        zero += values[index] * np.float32(0.0)
    return largest, zero


@inline
def round_values(values: Any, inputs: Any, bits: Any, unit: Any, offset: Any, target: Any) -> None:
    """Round each 32 float32 values to 8 bits.

    The I bytes are followed by two rows of float32, with one number for each 32 values: the scales, and scale · Σ rounded ·
    offset. bits, unit: of the weights, for the order of the values: in whole units, and then in runs of 32.
    """
    groups = inputs // ROUNDED
    values_I, rounded_I = numba.carray(floats(values), (inputs,)), numba.carray(signed_bytes(target), (inputs,))
    scales_G = numba.carray(floats(target + inputs), (groups,))
    offsets_G = numba.carray(floats(target + inputs + 4 * groups), (groups,))
    whole = inputs - inputs % unit
    for group in range(groups):
        first = group * ROUNDED
        largest, zero = largest_of(values_I, first, ROUNDED)
        scale = largest / np.float32(127.0) + zero
        inverse = np.float32(127.0) / largest if largest > np.float32(0.0) else np.float32(0.0)
        total = np.int32(0)
        run = unit if first < whole else ROUNDED
        for index in range(first, first + ROUNDED):
            value = np.int32(np.rint(values_I[index] * inverse))
            total += value
            rounded_I[index - index % run + place_in_unit(index % run, bits, run)] = np.int8(value)
        scales_G[group] = scale
        offsets_G[group] = scale * np.float32(total) * offset


_UNIT_OF_8, _UNIT_OF_4, _UNIT_OF_3, _UNIT_OF_2 = (UNIT[bits] for bits in (8, 4, 3, 2))


@kernel(PREPARE)
def prepare_8(values: Any, inputs: Any, target: Any) -> None:
    """Prepare a vector for 8-bit weights."""
    round_values(values, inputs, 8, _UNIT_OF_8, np.float32(128.0), target)


@kernel(PREPARE)
def prepare_4(values: Any, inputs: Any, target: Any) -> None:
    """Prepare a vector for 4-bit weights."""
    round_values(values, inputs, 4, _UNIT_OF_4, np.float32(8.0), target)


@kernel(PREPARE)
def prepare_3(values: Any, inputs: Any, target: Any) -> None:
    """Prepare a vector for 3-bit weights."""
    round_values(values, inputs, 3, _UNIT_OF_3, np.float32(4.0), target)


@kernel(PREPARE)
def prepare_2(values: Any, inputs: Any, target: Any) -> None:
    """Prepare a vector for 2-bit weights."""
    round_values(values, inputs, 2, _UNIT_OF_2, np.float32(2.0), target)
