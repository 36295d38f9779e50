"""Matrices of 8 or 4 bits times a few vectors, and conversion of such matrices to bfloat16.

A weight is scale · (stored − 2^(bits−1)), with one bfloat16 scale for each group of 32 or 128 weights. Each 32 values of a
vector are rounded to 8 bits and share a scale, so that processors with AVX512-VNNI multiply four pairs of integers in a lane
at once. The stored values are multiplied as unsigned integers, and the offset times the vector's sums is subtracted at the
end.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.kernels.arithmetic import widen
from engine.kernels.compiling import BLOCK, JOB, inline, kernel
from engine.kernels.dot_products import MULTIPLY, PREPARE
from engine.kernels.forms import form_at
from engine.kernels.instructions import (
    AHEAD,
    BYTE,
    FLOAT,
    FLOATS,
    INDEX,
    INT,
    LANES,
    SHORT,
    add_product,
    add_quadruples,
    added_up,
    at,
    fetch,
    load,
    loop,
    many,
    narrowed,
    parts,
    repeated,
    spread,
    widened,
)
from engine.kernels.memory import call, floats, halves, record_at, signed_bytes
from engine.kernels.parallel import kernels_at
from engine.kernels.processor import MULTIPLIES_INTEGERS

ROUNDED = 32
"""Number of values of a vector that share a scale where vectors are rounded to 8 bits."""
GROUP_SIZES = (32, 128)
"""Group sizes, in weights that share a scale, that the kernels support."""
MULTIPLE_OF_OUTPUTS = 4
"""The number of rows of a low-bit matrix, and of a matrix that is multiplied with many rows, is a multiple of this."""
WIDENED_ROWS = 16
"""Number of matrix rows that are widened in one call."""
_CHUNK = 512
"""Number of weights in one step of a product. Their scales fill a vector register, or a quarter of one."""
WIDENED = np.dtype([(name, np.int64) for name in ("kernels", "form", "values", "scales", "outputs", "inputs", "results")])
"""Arguments of the conversion of a whole low-bit matrix [O, I] to bfloat16."""
widened_at = record_at(WIDENED)
WIDEN = "void(int64, int64, int64, int64, int64, int64, int64)"
"""The signature of the kernels that write matrix rows as bfloat16. Arguments: (weights, scales, weights that share a scale,
first row, rows, inputs, result)."""


def _low_bit_tile(rows: int, bits: int) -> Any:
    """Return a function of (address of weights, address of their scales, weights that share one, address of R prepared
    vectors, I, address of the results, stride).

    The function multiplies 4 / R matrix rows of I weights, one after another, with R vectors. The product of matrix row w
    and vector r goes to place `w + r · stride`.
    """

    def tile(context: Any, weights: Any, scales: Any, group: Any, x_RI: Any, inputs: Any, results: Any, stride: Any) -> Any:
        return types.void(*[types.int64] * 7), generate

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weights, scales, group, x_address, inputs, result_address, stride = arguments
        vectors = [_Rounded(builder, x_address, inputs, r) for r in range(rows)]
        # Divisions by a number that is unknown at compile time would take as long as a dozen products.
        shift = builder.select(builder.icmp_signed("==", group, INDEX(ROUNDED)), INDEX(5), INDEX(7))
        weight_bytes = parts(builder, inputs, 8, bits)
        scale_bytes = builder.mul(builder.lshr(inputs, shift), INDEX(2))
        sums = []
        for matrix_row in range(MULTIPLE_OF_OUTPUTS // rows):
            row_weights = builder.add(weights, builder.mul(weight_bytes, INDEX(matrix_row)))
            row_scales = builder.add(scales, builder.mul(scale_bytes, INDEX(matrix_row)))
            sums += _MatrixRow(builder, row_weights, row_scales, group, shift, bits).products(vectors, inputs)
        for place, total in enumerate(added_up(builder, sums)):
            index = builder.add(builder.mul(stride, INDEX(place % rows)), INDEX(place // rows))
            builder.store(total, builder.inttoptr(at(builder, result_address, index, 4), FLOAT.as_pointer()))
        return context.get_dummy_value()

    return intrinsic(tile)


class _MatrixRow:
    """One row of a low-bit matrix, as a tile multiplies it."""

    def __init__(self, builder: Any, weights: Any, scales: Any, group: Any, shift: Any, bits: int) -> None:
        """shift: the base-2 logarithm of `group`, the number of weights that share a scale."""
        self._builder, self._weights, self._scales = builder, weights, scales
        self._group, self._shift, self._bits = group, shift, bits

    def products(self, vectors: list[_Rounded], inputs: Any) -> list[Any]:
        """Return for each vector a register of 16 partial sums, which add up to the product."""
        builder, bits, rows = self._builder, self._bits, len(vectors)
        whole = builder.and_(inputs, INDEX(-_CHUNK))
        zero, nothing = ir.Constant(FLOATS, [0.0] * LANES), ir.Constant(FLOAT, 0.0)
        few_zeros = ir.Constant(ir.VectorType(FLOAT, bits), [0.0] * bits)
        long = loop(
            builder, INDEX(0), whole, _CHUNK, [zero] * (3 * rows), lambda index, sums: self._chunk(vectors, index, sums)
        )
        short = loop(
            builder,
            whole,
            inputs,
            ROUNDED,
            [few_zeros, nothing] * rows,
            lambda index, sums: self._rest(vectors, index, sums),
        )
        made = []
        for r in range(rows):
            sum_of_16 = builder.fsub(builder.fadd(long[3 * r], long[3 * r + 1]), long[3 * r + 2])
            lanes = [*range(bits), *[bits] * (LANES - bits)]
            filled = builder.shuffle_vector(short[2 * r], few_zeros, ir.Constant(ir.VectorType(INT, LANES), lanes))
            taken_off = builder.insert_element(zero, short[2 * r + 1], INT(0))
            made.append(builder.fadd(sum_of_16, builder.fsub(filled, taken_off)))
        return made

    def _chunk(self, vectors: list[_Rounded], index: Any, sums: list[Any]) -> list[Any]:
        """Take 512 weights. Each vector has three sums: two of products, and one of the offset to be subtracted."""
        builder, bits = self._builder, self._bits
        unit = 64 * 8 // bits  # weights in the 64 bytes of a register
        scales_of_16 = self._scales_of_chunk(at(builder, self._scales, builder.lshr(index, self._shift), 2))
        own = [builder.fmul(scales_of_16, vector.scales(index, LANES)) for vector in vectors]
        sums = list(sums)
        for r, vector in enumerate(vectors):
            sums[3 * r + 2] = add_product(builder, sums[3 * r + 2], scales_of_16, vector.offsets(index, LANES))
        start = builder.add(self._weights, parts(builder, index, 8, bits))
        for step in range(_CHUNK // unit):
            stored = _stored(builder, at(builder, start, INDEX(64 * step), 1), bits, 64)
            fetch(builder, at(builder, start, INDEX(64 * step + AHEAD[bits]), 1))
            first = step * unit // ROUNDED
            for r, vector in enumerate(vectors):
                dots = vector.dots(builder.add(index, INDEX(step * unit)), stored, 64)
                each = spread(builder, own[r], first, LANES * ROUNDED // unit, LANES)
                sums[3 * r + step % 2] = add_product(builder, sums[3 * r + step % 2], dots, each)
        return sums

    def _rest(self, vectors: list[_Rounded], index: Any, sums: list[Any]) -> list[Any]:
        """Take 32 weights. Each vector has a short sum of products, and one offset to be subtracted."""
        builder, bits = self._builder, self._bits
        scale = widened(builder, at(builder, self._scales, builder.lshr(index, self._shift), 2), 1)
        stored = _stored(builder, builder.add(self._weights, parts(builder, index, 8, bits)), bits, 4 * bits)
        made = []
        for r, vector in enumerate(vectors):
            own = repeated(builder, builder.fmul(scale, vector.scales(index, 1)), bits)
            made.append(add_product(builder, sums[2 * r], vector.dots(index, stored, 4 * bits), own))
            made.append(add_product(builder, sums[2 * r + 1], scale, vector.offsets(index, 1)))
        return made

    def _scales_of_chunk(self, address: Any) -> Any:
        """Return the scale of each 32 of 512 weights."""
        builder = self._builder
        with builder.if_else(builder.icmp_signed("==", self._group, INDEX(ROUNDED))) as (one_each, shared):
            with one_each:
                own, after_own = widened(builder, address, LANES), builder.block
            with shared:
                of_four = spread(builder, widened(builder, address, 4), 0, 4, LANES)
                after_shared = builder.block
        scales = builder.phi(FLOATS)
        scales.add_incoming(own, after_own)
        scales.add_incoming(of_four, after_shared)
        return scales


class _Rounded:
    """One of the vectors that `round_values` writes, as a tile reads it."""

    def __init__(self, builder: Any, address: Any, inputs: Any, place: int) -> None:
        self._builder = builder
        own = builder.add(inputs, builder.lshr(inputs, INDEX(2)))
        self._values = builder.add(address, builder.mul(own, INDEX(place)))
        self._scales = builder.add(self._values, inputs)
        self._offsets = builder.add(self._scales, builder.lshr(inputs, INDEX(3)))

    def scales(self, index: Any, size: int) -> Any:
        return self._read(self._scales, index, size)

    def offsets(self, index: Any, size: int) -> Any:
        return self._read(self._offsets, index, size)

    def _read(self, address: Any, index: Any, size: int) -> Any:
        place = at(self._builder, address, parts(self._builder, index, ROUNDED), 4)
        return load(self._builder, place, many(FLOAT, size))

    def dots(self, index: Any, stored: list[Any], size: int) -> Any:
        """Return sums of four products each, as floats. stored: registers of `size` bytes, contiguous in memory."""
        builder, lanes = self._builder, ir.VectorType(INT, size // 4)
        total = ir.Constant(lanes, [0] * (size // 4))
        for place, weights in enumerate(stored):
            address = at(builder, self._values, builder.add(index, INDEX(place * size)), 1)
            if MULTIPLIES_INTEGERS:
                unsigned, signed = builder.bitcast(weights, lanes), load(builder, address, lanes)
                total = add_quadruples(builder, total, unsigned, signed, lanes)
            else:
                total = builder.add(total, self._dots_of_four(weights, address, size))
        return builder.sitofp(total, ir.VectorType(FLOAT, size // 4))

    def _dots_of_four(self, weights: Any, address: Any, size: int) -> Any:
        """Return sums of four products without AVX512-VNNI, so that every processor can compile this file."""
        builder, wide = self._builder, ir.VectorType(INT, size)
        values = builder.sext(load(builder, address, ir.VectorType(BYTE, size)), wide)
        products = builder.mul(builder.zext(weights, wide), values)
        places = (ir.Constant(ir.VectorType(INT, size // 4), [*range(first, size, 4)]) for first in range(4))
        first, *others = (builder.shuffle_vector(products, products, each) for each in places)
        for other in others:
            first = builder.add(first, other)
        return first


def _wide_group(bits: int) -> Any:
    """Return a function of (address of 32 weights, their scale, address of 32 bfloat16 values) that dequantizes them."""

    def wide(context: Any, weights: Any, scale: Any, results: Any) -> Any:
        return types.void(types.int64, types.float32, types.int64), generate

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, scale, target = arguments
        # The loop takes 16 values at a time, because LLVM splits wider vectors of integers.
        size = ROUNDED // 2
        both = [address] if bits == 4 else [address, builder.add(address, INDEX(size))]
        stored = [part for half in both for part in _stored(builder, half, bits, size)]
        numbers = ir.VectorType(INT, size)

        def each(value: int) -> Any:
            return ir.Constant(numbers, [value] * size)

        made = []
        for values in stored:
            signed = builder.sub(builder.zext(values, numbers), each(1 << (bits - 1)))
            wide = builder.sitofp(signed, ir.VectorType(FLOAT, size))
            made.append(narrowed(builder, builder.fmul(wide, repeated(builder, scale, size))))
        in_turns = [place // 2 + place % 2 * size for place in range(ROUNDED)]
        order = ir.Constant(ir.VectorType(INT, ROUNDED), in_turns if bits == 4 else [*range(ROUNDED)])
        short = builder.shuffle_vector(*made, order)
        builder.store(short, builder.inttoptr(target, short.type.as_pointer()), align=2)
        return context.get_dummy_value()

    return intrinsic(wide)


def _stored(builder: Any, address: Any, bits: int, size: int) -> list[Any]:
    """Return `size` bytes of weights as registers of bytes. With 4 bits the first of each two weights precede the second."""
    kind = ir.VectorType(BYTE, size)
    loaded = load(builder, address, kind)
    if bits == 8:
        return [loaded]
    low, pairs = ir.Constant(kind, [15] * size), ir.VectorType(SHORT, size // 2)
    upper = builder.lshr(builder.bitcast(loaded, pairs), ir.Constant(pairs, [4] * (size // 2)))
    return [builder.and_(loaded, low), builder.and_(builder.bitcast(upper, kind), low)]


_ONE_OF_8, _TWO_OF_8, _FOUR_OF_8 = (_low_bit_tile(rows, 8) for rows in (1, 2, 4))
_ONE_OF_4, _TWO_OF_4, _FOUR_OF_4 = (_low_bit_tile(rows, 4) for rows in (1, 2, 4))
_WIDE_OF_8, _WIDE_OF_4 = _wide_group(8), _wide_group(4)


@kernel(MULTIPLY)
def multiply_8(
    weights: Any, scales: Any, group: Any, count: Any, inputs: Any, x: Any, rows: Any, results: Any, stride: Any
) -> None:
    """Multiply 8-bit matrix rows with vectors that `prepare_8` made."""
    row = 0
    while row < rows:
        vectors = 4 if rows - row >= 4 else (2 if rows - row >= 2 else 1)
        own = x + row * (inputs + inputs // 4)
        for place in range(0, count, MULTIPLE_OF_OUTPUTS // vectors):
            w, s = weights + place * inputs, scales + place * (inputs // group) * 2
            y = results + 4 * (row * stride + place)
            if vectors == 4:
                _FOUR_OF_8(w, s, group, own, inputs, y, stride)
            elif vectors == 2:
                _TWO_OF_8(w, s, group, own, inputs, y, stride)
            else:
                _ONE_OF_8(w, s, group, own, inputs, y, stride)
        row += vectors


@kernel(MULTIPLY)
def multiply_4(
    weights: Any, scales: Any, group: Any, count: Any, inputs: Any, x: Any, rows: Any, results: Any, stride: Any
) -> None:
    """Multiply 4-bit matrix rows with vectors that `prepare_4` made."""
    row = 0
    while row < rows:
        vectors = 4 if rows - row >= 4 else (2 if rows - row >= 2 else 1)
        own = x + row * (inputs + inputs // 4)
        for place in range(0, count, MULTIPLE_OF_OUTPUTS // vectors):
            w, s = weights + place * (inputs // 2), scales + place * (inputs // group) * 2
            y = results + 4 * (row * stride + place)
            if vectors == 4:
                _FOUR_OF_4(w, s, group, own, inputs, y, stride)
            elif vectors == 2:
                _TWO_OF_4(w, s, group, own, inputs, y, stride)
            else:
                _ONE_OF_4(w, s, group, own, inputs, y, stride)
        row += vectors


@inline
def round_values(values: Any, inputs: Any, in_pairs: Any, offset: Any, target: Any) -> None:
    """Round each 32 float32 values to 8 bits.

    The I bytes are followed by two rows of float32, with one number for each 32 values: the scales, and scale · Σ rounded ·
    offset. in_pairs: for weights that are stored two in a byte, the first of each two values precede the second ones: in
    runs of 128 values for whole chunks, then in runs of 32.
    """
    groups = inputs // ROUNDED
    values_I, rounded_I = numba.carray(floats(values), (inputs,)), numba.carray(signed_bytes(target), (inputs,))
    scales_G = numba.carray(floats(target + inputs), (groups,))
    offsets_G = numba.carray(floats(target + inputs + 4 * groups), (groups,))
    whole = inputs - inputs % _CHUNK
    for group in range(groups):
        first = group * ROUNDED
        largest = zero = np.float32(0.0)
        for index in range(first, first + ROUNDED):
            largest = max(largest, abs(values_I[index]))
            zero += values_I[index] * np.float32(0.0)  # NaN where a value is not finite
        scale = largest / np.float32(127.0) + zero
        inverse = np.float32(127.0) / largest if largest > np.float32(0.0) else np.float32(0.0)
        total = np.int32(0)
        run = 128 if first < whole else ROUNDED
        for index in range(first, first + ROUNDED):
            value = np.int32(np.rint(values_I[index] * inverse))
            total += value
            place = index
            if in_pairs:
                within = index % run
                place = index - within + within // 2 + (run // 2 if within % 2 else 0)
            rounded_I[place] = np.int8(value)
        scales_G[group] = scale
        offsets_G[group] = scale * np.float32(total) * offset


@kernel(PREPARE)
def prepare_8(values: Any, inputs: Any, target: Any) -> None:
    """Prepare a vector for 8-bit weights."""
    round_values(values, inputs, False, np.float32(128.0), target)


@kernel(PREPARE)
def prepare_4(values: Any, inputs: Any, target: Any) -> None:
    """Prepare a vector for 4-bit weights."""
    round_values(values, inputs, True, np.float32(8.0), target)


@kernel(WIDEN)
def widen_8(weights: Any, scales: Any, group: Any, first: Any, count: Any, inputs: Any, target: Any) -> None:
    """Write 8-bit matrix rows as bfloat16, each weight rounded once. The group size is a multiple of 32."""
    for row in range(count):
        stored, own = weights + (first + row) * inputs, target + 2 * row * inputs
        scales_C = numba.carray(halves(scales + (first + row) * (inputs // group) * 2), (inputs // group,))
        for index in range(inputs // group):
            scale = widen(scales_C[index])
            for place in range(index * group, (index + 1) * group, ROUNDED):
                _WIDE_OF_8(stored + place, scale, own + 2 * place)


@kernel(WIDEN)
def widen_4(weights: Any, scales: Any, group: Any, first: Any, count: Any, inputs: Any, target: Any) -> None:
    """Write 4-bit matrix rows as bfloat16, each weight rounded once. The group size is a multiple of 32."""
    for row in range(count):
        stored, own = weights + (first + row) * (inputs // 2), target + 2 * row * inputs
        scales_C = numba.carray(halves(scales + (first + row) * (inputs // group) * 2), (inputs // group,))
        for index in range(inputs // group):
            scale = widen(scales_C[index])
            for place in range(index * group, (index + 1) * group, ROUNDED):
                _WIDE_OF_4(stored + place // 2, scale, own + 2 * place)


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
