"""Matrices of 8, 4, 3 or 2 bits times a few vectors, and conversion of such matrices to bfloat16.

A weight is scale · (stored − 2^(bits−1)), with one bfloat16 scale for each group of 32, 64 or 128 weights. Each 32 values of
a vector are rounded to 8 bits and share a scale (rounded_vectors.py), so that processors with AVX512-VNNI or ARM's dot
products multiply four pairs of integers in a lane at once, and those with AVX2 two. The stored values are multiplied as
unsigned integers, and the offset times the vector's sums is subtracted at the end.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.kernels.compiler.compiling import BLOCK, JOB, add_kernel, kernel
from engine.kernels.compiler.instructions import (
    AHEAD,
    FLOAT,
    FLOATS,
    IN_ORDER,
    INDEX,
    INT,
    LANES,
    add_product,
    added_up,
    at,
    fetch_weights,
    in_fours,
    loop,
    narrowed,
    parts,
    repeated,
    spread,
    widened,
)
from engine.kernels.compiler.memory import call, record_at
from engine.kernels.compiler.parallel import kernels_at
from engine.kernels.dot_products import MULTIPLY
from engine.kernels.stored.byte_dots import RoundedVector, add_dots
from engine.kernels.stored.forms import form_at
from engine.kernels.stored.rounded_vectors import CHUNK, ROUNDED, UNIT
from engine.kernels.stored.scheme import BITS
from engine.kernels.stored.unpacking import rest_of_row, rest_places, unit_of_row

GROUP_SIZES = (32, 64, 128)
"""Group sizes, in weights that share a scale, that the kernels support."""
MULTIPLE_OF_OUTPUTS = 4
"""The number of rows of a low-bit matrix, and of a matrix that is multiplied with many rows, is a multiple of this."""
WIDENED_ROWS = 16
"""Number of matrix rows that are widened in one call."""
WIDENED = np.dtype([(name, np.int64) for name in ("kernels", "form", "values", "scales", "outputs", "inputs", "results")])
"""Arguments of the conversion of a whole low-bit matrix [O, I] to bfloat16."""
widened_at = record_at(WIDENED)
WIDEN = "void(int64, int64, int64, int64, int64, int64, int64)"
"""The signature of the kernels that write matrix rows as bfloat16. Arguments: (weights, scales, weights that share a scale,
first row, rows, inputs, result)."""


def _tile(
    builder: Any,
    bits: int,
    matrix: tuple[Any, Any],
    scales: tuple[Any, Any, Any],
    x: tuple[Any, int],
    inputs: Any,
    y: tuple[Any, Any],
) -> None:
    """Multiply 4 / R matrix rows of I weights, one after another, with R vectors.

    matrix: address and bytes of a row. scales: address and bytes of a row's scales, and how many weights share one. x:
    address of the prepared vectors, and R. y: address and stride of the results; the product of matrix row w and vector r
    goes to place `w + r · stride`.
    """
    rows, sums = x[1], []
    vectors = [_Rounded(builder, x[0], inputs, INDEX(r)) for r in range(rows)]
    for matrix_row in range(MULTIPLE_OF_OUTPUTS // rows):
        row_weights, row_scales = (
            builder.add(address, builder.mul(size, INDEX(matrix_row))) for address, size in (matrix, scales[:2])
        )
        sums += _MatrixRow(builder, row_weights, row_scales, scales[2], bits).products(vectors, inputs)
    for place, total in enumerate(added_up(builder, sums)):
        index = builder.add(builder.mul(y[1], INDEX(place % rows)), INDEX(place // rows))
        builder.store(total, builder.inttoptr(at(builder, y[0], index, 4), FLOAT.as_pointer()))


class _MatrixRow:
    """One row of a low-bit matrix, as a tile multiplies it."""

    def __init__(self, builder: Any, weights: Any, scales: Any, group: Any, bits: int) -> None:
        self._builder, self._weights, self._scales = builder, weights, scales
        self._group, self._bits = group, bits
        # Divisions by a number that is unknown at compile time would take as long as a dozen products.
        self._shift = INDEX(5)
        for size in GROUP_SIZES[1:]:
            is_it = builder.icmp_signed("==", group, INDEX(size))
            self._shift = builder.select(is_it, INDEX(size.bit_length() - 1), self._shift)
        self._lanes = 4 if bits == 4 else 8
        """Sums of four products each in 32 weights."""

    def products(self, vectors: list[_Rounded], inputs: Any) -> list[Any]:
        """Return for each vector a register of 16 partial sums, which add up to the product."""
        builder, few, rows = self._builder, self._lanes, len(vectors)
        chunks, units = (builder.and_(inputs, INDEX(-size)) for size in (CHUNK, UNIT[self._bits]))
        zero, nothing = ir.Constant(FLOATS, [0.0] * LANES), ir.Constant(FLOAT, 0.0)
        few_zeros = ir.Constant(ir.VectorType(FLOAT, few), [0.0] * few)
        long = loop(
            builder, INDEX(0), chunks, CHUNK, [zero] * (3 * rows), lambda index, sums: self._chunk(vectors, index, sums)
        )
        long = loop(builder, chunks, units, UNIT[self._bits], long, lambda index, sums: self._unit(vectors, index, sums))
        short = loop(
            builder,
            units,
            inputs,
            ROUNDED,
            [few_zeros, nothing] * rows,
            lambda index, sums: self._rest(vectors, index, sums),
        )
        made = []
        for r in range(rows):
            sum_of_16 = builder.fadd(long[3 * r], long[3 * r + 1], flags=IN_ORDER)
            sum_of_16 = builder.fsub(sum_of_16, long[3 * r + 2], flags=IN_ORDER)
            lanes = [*range(few), *[few] * (LANES - few)]
            filled = builder.shuffle_vector(short[2 * r], few_zeros, ir.Constant(ir.VectorType(INT, LANES), lanes))
            taken_off = builder.insert_element(zero, short[2 * r + 1], INT(0))
            rest = builder.fsub(filled, taken_off, flags=IN_ORDER)
            made.append(builder.fadd(sum_of_16, rest, flags=IN_ORDER))
        return made

    def _chunk(self, vectors: list[_Rounded], index: Any, sums: list[Any]) -> list[Any]:
        """Take 512 weights. Each vector has three sums: two of products, and one of the offset to be subtracted."""
        builder, bits = self._builder, self._bits
        unit = UNIT[bits]
        scales_of_16 = self._scales_from(index, LANES)
        own = [builder.fmul(scales_of_16, vector.scales(index, LANES), flags=IN_ORDER) for vector in vectors]
        sums = list(sums)
        for r, vector in enumerate(vectors):
            sums[3 * r + 2] = add_product(builder, sums[3 * r + 2], scales_of_16, vector.offsets(index, LANES))
        start = builder.add(self._weights, parts(builder, index, 8, bits))
        vector_bytes = vectors[0].size(builder, vectors[0].inputs)
        fetch_weights(builder, start, CHUNK * bits // 8, AHEAD[bits], (len(vectors), vector_bytes))
        for step in range(CHUNK // unit):
            stored = unit_of_row(builder, at(builder, start, INDEX(step * unit * bits // 8), 1), bits)
            first = step * unit // ROUNDED
            for r, vector in enumerate(vectors):
                dots = vector.dots(builder.add(index, INDEX(step * unit)), stored, bits)
                each = spread(builder, own[r], first, LANES * ROUNDED // unit, LANES)
                sums[3 * r + step % 2] = add_product(builder, sums[3 * r + step % 2], dots, each)
        return sums

    def _unit(self, vectors: list[_Rounded], index: Any, sums: list[Any]) -> list[Any]:
        """Take as many weights as are unpacked together. The sums are those of `_chunk`."""
        builder, bits = self._builder, self._bits
        count = UNIT[bits] // ROUNDED
        scales, sums = self._scales_from(index, count), list(sums)
        stored = unit_of_row(builder, builder.add(self._weights, parts(builder, index, 8, bits)), bits)
        zeros, lanes = ir.Constant(scales.type, [0.0] * count), [*range(count), *[count] * (LANES - count)]
        for r, vector in enumerate(vectors):
            own = builder.fmul(scales, vector.scales(index, count), flags=IN_ORDER)
            each = spread(builder, own, 0, LANES // count, LANES)
            sums[3 * r] = add_product(builder, sums[3 * r], vector.dots(index, stored, bits), each)
            taken_off = builder.fmul(scales, vector.offsets(index, count), flags=IN_ORDER)
            filled = builder.shuffle_vector(taken_off, zeros, ir.Constant(ir.VectorType(INT, LANES), lanes))
            sums[3 * r + 2] = builder.fadd(sums[3 * r + 2], filled, flags=IN_ORDER)
        return sums

    def _rest(self, vectors: list[_Rounded], index: Any, sums: list[Any]) -> list[Any]:
        """Take 32 weights. Each vector has a short sum of products, and one offset to be subtracted."""
        builder, bits = self._builder, self._bits
        scale = self._scale_at(index, 1)
        stored = rest_of_row(builder, builder.add(self._weights, parts(builder, index, 8, bits)), bits)
        made = []
        for r, vector in enumerate(vectors):
            own = repeated(builder, builder.fmul(scale, vector.scales(index, 1), flags=IN_ORDER), self._lanes)
            made.append(add_product(builder, sums[2 * r], vector.dots(index, stored, bits), own))
            made.append(add_product(builder, sums[2 * r + 1], scale, vector.offsets(index, 1)))
        return made

    def _scales_from(self, index: Any, count: int) -> Any:
        """Return the scale of each 32 of 32 · `count` weights."""
        builder = self._builder
        before, after = builder.block, builder.append_basic_block("scales")
        builder.position_at_end(after)
        scales = builder.phi(ir.VectorType(FLOAT, count))
        builder.position_at_end(before)
        for place, size in enumerate(GROUP_SIZES):
            if place + 1 < len(GROUP_SIZES):
                own, further = (builder.append_basic_block(name) for name in ("own", "further"))
                builder.cbranch(builder.icmp_signed("==", self._group, INDEX(size)), own, further)
                builder.position_at_end(own)
            each = min(size // ROUNDED, count)
            read = self._scale_at(index, count // each)
            repeats = read if each == 1 else self._repeated(read, each, count)
            scales.add_incoming(repeats, builder.block)
            builder.branch(after)
            if place + 1 < len(GROUP_SIZES):
                builder.position_at_end(further)
        builder.position_at_end(after)
        return scales

    def _scale_at(self, index: Any, count: int) -> Any:
        """Return `count` scales, beginning with that of the weight numbered `index`."""
        builder = self._builder
        return widened(builder, at(builder, self._scales, builder.lshr(index, self._shift), 2), count)

    def _repeated(self, scales: Any, each: int, count: int) -> Any:
        one = scales.type == FLOAT
        return repeated(self._builder, scales, count) if one else spread(self._builder, scales, 0, each, count)


class _Rounded(RoundedVector):
    """One of the vectors that `rounder` writes, as a tile reads it."""

    def dots(self, index: Any, stored: list[Any], bits: int) -> Any:
        """Return sums of four products each, as floats. stored: registers of weights; their values begin at `index`."""
        builder, size = self.builder, stored[0].type.count
        lanes = ir.VectorType(INT, size // 4)
        total = ir.Constant(lanes, [0] * (size // 4))
        for place, weights in enumerate(stored):
            address = at(builder, self.values, builder.add(index, INDEX(place * size)), 1)
            total = add_dots(builder, total, weights, address, are_small=bits < 8)
        return builder.sitofp(total, ir.VectorType(FLOAT, size // 4))


def _wide_group(bits: int) -> Any:
    """Return a function of (builder, address of 32 weights, their scale, address of 32 bfloat16 values) that dequantizes
    them."""

    def emit(builder: Any, address: Any, scale: Any, target: Any) -> None:
        # Registers hold 16 values at a time, because LLVM splits wider vectors of integers.
        size = LANES
        numbers = ir.VectorType(INT, size)

        def each(value: int) -> Any:
            return ir.Constant(numbers, [value] * size)

        made = []
        for register in rest_of_row(builder, address, bits):
            for first in range(0, register.type.count, size):
                lanes = ir.Constant(numbers, [*range(first, first + size)])
                values = builder.zext(builder.shuffle_vector(register, register, lanes), numbers)
                wide = builder.sitofp(builder.sub(values, each(1 << (bits - 1))), FLOATS)
                made.append(narrowed(builder, builder.fmul(wide, repeated(builder, scale, size))))
        short = builder.shuffle_vector(*made, ir.Constant(ir.VectorType(INT, ROUNDED), rest_places(bits)))
        builder.store(short, builder.inttoptr(target, short.type.as_pointer()), align=2)

    return emit


def _wide_rows(bits: int) -> Any:
    """Return a function like the kernels of `WIDEN`. The group size is a multiple of 32."""
    emit = _wide_group(bits)

    def wide(context: Any, weights: Any, scales: Any, group: Any, first: Any, count: Any, inputs: Any, target: Any) -> Any:
        return types.void(*[types.int64] * 7), generate

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weights, scales, group, first, count, inputs, target = arguments
        groups, row_bytes = builder.udiv(inputs, group), parts(builder, inputs, 8, bits)

        def row(place: Any, _: list[Any]) -> list[Any]:
            own = builder.add(first, place)
            row_weights = builder.add(weights, builder.mul(own, row_bytes))
            row_scales = at(builder, scales, builder.mul(own, groups), 2)
            row_target = at(builder, target, builder.mul(place, inputs), 2)

            def one_scale(index: Any, _: list[Any]) -> list[Any]:
                scale, begin = widened(builder, at(builder, row_scales, index, 2), 1), builder.mul(index, group)

                def thirty_two(within: Any, _: list[Any]) -> list[Any]:
                    weight = builder.add(begin, within)
                    address = builder.add(row_weights, parts(builder, weight, 8, bits))
                    emit(builder, address, scale, at(builder, row_target, weight, 2))
                    return []

                return loop(builder, INDEX(0), group, ROUNDED, [], thirty_two)

            return loop(builder, INDEX(0), groups, 1, [], one_scale)

        loop(builder, INDEX(0), count, 1, [], row)
        return context.get_dummy_value()

    return intrinsic(wide)


def _products(bits: int) -> Any:
    """Return a function like the kernels of `MULTIPLY`. Four vectors are multiplied at once, then two."""

    def product(
        context: Any,
        weights: Any,
        scales: Any,
        group: Any,
        count: Any,
        inputs: Any,
        x: Any,
        rows: Any,
        results: Any,
        stride: Any,
    ) -> Any:
        return types.void(*[types.int64] * 9), generate

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weights, scales, group, count, inputs, x, rows, results, stride = arguments
        row_bytes, vector = parts(builder, inputs, 8, bits), RoundedVector.size(builder, inputs)
        scale_bytes = builder.mul(builder.udiv(inputs, group), INDEX(2))

        def taking(vectors: int) -> Any:
            def every_place(row: Any, _: list[Any]) -> list[Any]:
                own = builder.add(x, builder.mul(row, vector))

                def tile(place: Any, _: list[Any]) -> list[Any]:
                    w = builder.add(weights, builder.mul(place, row_bytes))
                    s = builder.add(scales, builder.mul(place, scale_bytes))
                    y = at(builder, results, builder.add(builder.mul(row, stride), place), 4)
                    _tile(builder, bits, (w, row_bytes), (s, scale_bytes, group), (own, vectors), inputs, (y, stride))
                    return []

                return loop(builder, INDEX(0), count, MULTIPLE_OF_OUTPUTS // vectors, [], tile)

            return every_place

        in_fours(builder, rows, taking)
        return context.get_dummy_value()

    return intrinsic(product)


WORK: Any = None
"""The code of a kernel, which `add_kernel` puts in this place."""


def _multiply(
    weights: Any, scales: Any, group: Any, count: Any, inputs: Any, x: Any, rows: Any, results: Any, stride: Any
) -> None:
    WORK(weights, scales, group, count, inputs, x, rows, results, stride)


def _widen(weights: Any, scales: Any, group: Any, first: Any, count: Any, inputs: Any, target: Any) -> None:
    WORK(weights, scales, group, first, count, inputs, target)


for _bits in BITS:
    add_kernel(f"multiply_{_bits}", MULTIPLY, _multiply, _products(_bits))
    add_kernel(f"widen_{_bits}", WIDEN, _widen, _wide_rows(_bits))


@kernel(JOB, calls=("parallel_for", "widen_block"))
def widen_matrix(address: Any) -> None:
    """Widen the whole matrix, in blocks of rows."""
    job = widened_at(address)
    table = kernels_at(job.kernels)
    call(table.parallel_for, (table.widen_block, address, (job.outputs + WIDENED_ROWS - 1) // WIDENED_ROWS))


@kernel(BLOCK)
def widen_block(address: Any, block: Any) -> None:
    """Widen a few rows of the matrix."""
    job = widened_at(address)
    form = form_at(job.form)
    first = block * WIDENED_ROWS
    count = min(WIDENED_ROWS, job.outputs - first)
    call(form.widen, (job.values, job.scales, form.group, first, count, job.inputs, job.results + 2 * first * job.inputs))
