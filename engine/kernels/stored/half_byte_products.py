"""Matrices of numbers of four bits, E2M1, times a few vectors, as integers.

Twice a number w of E2M1 is an integer of at most 12, so that a table turns its code into the byte 2·w + 12. Each 16 values x
of a vector share a power of two s and become integers 128·high + low of at most 2¹³, in two bytes. Values of bfloat16 stay
exact if they are above 1/32 of the largest of the 16, and smaller ones are rounded to multiples of s, at most 2⁻¹² of it.

Σ w·x = s/2 · (Σ (2·w + 12) · (128·high + low) − 12 · Σ (128·high + low)), and products of bytes are added up four at a time
(byte_dots.py). The order of summation depends on the number of inputs alone.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir

from engine.kernels.compiler.arithmetic import as_bits, as_float, largest_magnitude, two_bytes
from engine.kernels.compiler.compiling import add_kernel, kernel
from engine.kernels.compiler.instructions import (
    BYTE,
    FLOAT,
    FLOATS,
    IN_ORDER,
    INDEX,
    INT,
    LANES,
    SHORT,
    add_product,
    fetch_weights,
    in_lanes,
    looked_up,
    loop,
    many,
    parts,
    read,
    spread,
)
from engine.kernels.compiler.memory import floats, signed_bytes
from engine.kernels.compiler.processor import MULTIPLIES_INTEGERS
from engine.kernels.dot_products import MULTIPLY, PREPARE
from engine.kernels.stored.block_types import BYTES_OF_E2M1, OFFSET_OF_E2M1
from engine.kernels.stored.byte_dots import RoundedVector, add_dots
from engine.kernels.stored.float_products import Matrix, multiply, product_of
from engine.kernels.stored.float_types import FLOAT_KINDS
from engine.kernels.stored.rounded_vectors import place_in_unit

GROUP = 16
"""Number of values of a vector that share a power of two."""
CHUNK, UNIT, REST = 512, 128, 32
"""Numbers of weights: of a step of a product, of those that are unpacked together, and of those that may be left behind."""
_AHEAD = 2048
"""Bytes that weights are prefetched ahead; see `fetch_weights`."""
_LOW_BITS = 7
"""Bits of the lower of two bytes of a value."""


class _Vector(RoundedVector):
    """One of the vectors that `prepare_rounded_halves` writes, as a product reads it.

    Scales are the halves of powers of two. Offsets are to be subtracted, times the scales of the weights.
    """

    group, value_bytes = GROUP, 2

    def dots(self, index: Any, registers: list[Any]) -> Any:
        """Return sums of eight products each as float32. registers: bytes of weights, whose values begin at `index`."""
        builder, size = self.builder, registers[0].type.count
        lanes = ir.VectorType(INT, size // 4)
        total = ir.Constant(lanes, [0] * lanes.count)
        for part in range(2):
            start = builder.add(builder.add(self.values, index), builder.mul(self.inputs, INDEX(part)))
            if part:
                total = builder.shl(total, ir.Constant(lanes, [_LOW_BITS] * lanes.count))
            for place, weights in enumerate(registers):
                address = builder.add(start, INDEX(place * size))
                total = add_dots(builder, total, weights, address, are_small=True)
        return builder.sitofp(total, many(FLOAT, lanes.count))


def _unpacked(builder: Any, address: Any, count: int) -> list[Any]:
    """Return the bytes of so many weights: those of the low halves of all bytes, and then those of the high ones."""
    data = read(builder, address, ir.VectorType(BYTE, count // 2))
    pairs = ir.VectorType(SHORT, count // 4)
    upper = builder.lshr(builder.bitcast(data, pairs), ir.Constant(pairs, [4] * pairs.count))
    return [looked_up(builder, codes, BYTES_OF_E2M1) for codes in (data, builder.bitcast(upper, data.type))]


def _row_products(builder: Any, matrix: Matrix, row: tuple[Any, Any], vectors: list[_Vector], inputs: Any) -> list[Any]:
    """Return for each vector a register of 16 partial sums, which add up to its product with one matrix row.

    row: the addresses of the row's numbers and of its scales. Each vector has three sums: two of products, and one of what
    is subtracted.
    """
    zero, (weights, own_scales) = ir.Constant(FLOATS, [0.0] * LANES), row

    def taking(size: int) -> Any:
        unit, groups = min(size, UNIT), size // GROUP

        def body(index: Any, sums: list[Any]) -> list[Any]:
            start, made = builder.add(weights, parts(builder, index, 2)), list(sums)
            if size == CHUNK:
                fetch_weights(builder, start, size // 2, _AHEAD, (len(vectors), vectors[0].size(builder, inputs)))
            scales = spread(builder, matrix.scales(own_scales, index, size), 0, matrix.kind.group // GROUP, groups)
            own = [builder.fmul(scales, vector.scales(index, groups), flags=IN_ORDER) for vector in vectors]
            for r, vector in enumerate(vectors):
                less = builder.fmul(scales, vector.offsets(index, groups), flags=IN_ORDER)
                for first in range(0, groups, LANES):
                    part = spread(builder, less, first, 1, min(groups, LANES))
                    made[3 * r + 2] = builder.fadd(made[3 * r + 2], in_lanes(builder, part), flags=IN_ORDER)
            for number in range(size // unit):
                offset = number * unit
                registers = _unpacked(builder, builder.add(start, INDEX(offset // 2)), unit)
                for r, vector in enumerate(vectors):
                    dots = vector.dots(builder.add(index, INDEX(offset)), registers)
                    each = spread(builder, own[r], offset // GROUP, GROUP // 8, unit // 8)
                    place = 3 * r + number % 2
                    made[place] = add_product(builder, made[place], in_lanes(builder, dots), in_lanes(builder, each))
            return made

        return body

    sums, begin = [zero] * (3 * len(vectors)), INDEX(0)
    for size in (CHUNK, UNIT, REST):
        end = builder.and_(inputs, INDEX(-size))
        sums, begin = loop(builder, begin, end, size, sums, taking(size)), end
    added = [builder.fadd(first, second, flags=IN_ORDER) for first, second in zip(sums[::3], sums[1::3], strict=True)]
    return [builder.fsub(total, less, flags=IN_ORDER) for total, less in zip(added, sums[2::3], strict=True)]


if MULTIPLIES_INTEGERS:
    for _kind in FLOAT_KINDS.values():
        if _kind.bits == 4:
            add_kernel(f"multiply_rounded_{_kind.key}", MULTIPLY, multiply, product_of(_kind, _Vector, _row_products))

_GROUP, _UNIT, _REST, _OFFSET = GROUP, UNIT, REST, np.float32(OFFSET_OF_E2M1)
_EXPONENT, _INVERSE, _HALF = np.uint32(0xFF << 23), np.uint32((2 * 127 + 12) << 23), np.uint32(13 << 23)
"""Exponents in a float32. Where the largest of 16 values has the exponent e, s = 2^(e − 12)."""
_LEAST = np.uint32(27 << 23)
"""That of 2⁻¹⁰⁰: smaller values are rounded as if one of their group were as large."""


@kernel(PREPARE)
def prepare_rounded_halves(values: Any, inputs: Any, target: Any) -> None:
    """Round each 16 float32 values to integers of 14 bits, in the order in which numbers of four bits are unpacked.

    The I higher bytes are followed by the I lower ones and two rows of float32, with one number for each 16 values: half of
    their power of two s, and s/2 · Σ rounded · 12.
    """
    groups, whole = inputs // _GROUP, inputs - inputs % _UNIT
    values_I = numba.carray(floats(values), (inputs,))
    high_I = numba.carray(signed_bytes(target), (inputs,))
    low_I = numba.carray(signed_bytes(target + inputs), (inputs,))
    scales_G = numba.carray(floats(target + 2 * inputs), (groups,))
    offsets_G = numba.carray(floats(target + 2 * inputs + 4 * groups), (groups,))
    for group in range(groups):
        first = group * _GROUP
        largest, zero = largest_magnitude(values_I, first, _GROUP)
        exponent = max(as_bits(largest) & _EXPONENT, _LEAST)
        inverse = as_float(_INVERSE - exponent)
        half = as_float(exponent - _HALF) + zero
        total = np.int32(0)
        unit = _UNIT if first < whole else _REST
        for index in range(first, first + _GROUP):
            value = np.int32(np.rint(values_I[index] * inverse))
            total += value
            place = index - index % unit + place_in_unit(index % unit, 4, unit)
            high_I[place], low_I[place] = two_bytes(value)
        scales_G[group] = half
        offsets_G[group] = half * np.float32(total) * _OFFSET
