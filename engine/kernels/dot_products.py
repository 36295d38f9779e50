"""Plain matrices times a few vectors: each dot product is summed in one order, whatever the number of vectors.

A tile multiplies up to four matrix rows with up to four vectors, so that each weight is read once for all of them. Vectors
are float32. For weights in bfloat16 they are rounded to it where the processor multiplies pairs of bfloat16 (AVX512-BF16).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.kernels.compiler.arithmetic import narrow
from engine.kernels.compiler.compiling import KERNELS, add_kernel, kernel
from engine.kernels.compiler.instructions import (
    AHEAD,
    FLOAT,
    FLOATS,
    INDEX,
    INTS,
    LANES,
    add_halves,
    add_pairs,
    add_product,
    added_up,
    at,
    fetch_weights,
    in_fours,
    load,
    loop,
    many,
    unchanged,
    widened,
    widened_halves,
)
from engine.kernels.compiler.memory import floats, halves
from engine.kernels.compiler.processor import LONG_VECTOR, MULTIPLIES_BFLOAT16

MULTIPLY = "void(int64, int64, int64, int64, int64, int64, int64, int64, int64)"
"""The signature of the kernels that multiply a few vectors:
(weights, scales, weights that share a scale, matrix rows, inputs, prepared
vectors, how many they are, results, stride). The product of matrix row w and vector r goes to place `w + r · stride` of the
float32 results."""
PREPARE = "void(int64, int64, int64)"
"""The signature of the kernels that prepare float32 values for `MULTIPLY`. Arguments: (values, how many, result)."""
_PAIR_SUMS = 2
"""Number of vector registers that accumulate one product of pairs of bfloat16, so that additions do not wait for each other.
A product of float32 has one register: with four, memory was read more slowly where vectors are long, and four vectors did
not fit into the registers of AVX2."""
_TILE = types.void(types.int64, types.int64, types.int64, types.int64, types.int64)


def _products(bits: int, read: Callable[[Any, Any, int], Any]) -> Any:
    """Return a function like the kernels of `MULTIPLY`, without scales, for vectors of float32.

    The function takes one matrix row at a time, because memory delivers one stream faster than several. bits: of a weight.
    read: emits the float32 values of weights at an address.
    """

    def product(context: Any, weights: Any, count: Any, inputs: Any, x: Any, rows: Any, results: Any, stride: Any) -> Any:
        return types.void(*[types.int64] * 7), generate

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weights, count, inputs, x, rows, results, stride = arguments

        def matrix_row(place: Any, _: list[Any]) -> list[Any]:
            w = at(builder, weights, builder.mul(place, inputs), bits // 8)

            def taking(vectors: int) -> Any:
                def tile(row: Any, _: list[Any]) -> list[Any]:
                    own = [builder.add(row, INDEX(r)) for r in range(vectors)]
                    x_rows = [at(builder, x, builder.mul(each, inputs), 4) for each in own]
                    for each, total in zip(own, _dot_products(builder, (w, bits, read), x_rows, inputs), strict=True):
                        index = builder.add(builder.mul(each, stride), place)
                        builder.store(total, builder.inttoptr(at(builder, results, index, 4), FLOAT.as_pointer()))
                    return []

                return tile

            in_fours(builder, rows, taking)
            return []

        loop(builder, INDEX(0), count, 1, [], matrix_row)
        return context.get_dummy_value()

    return intrinsic(product)


def _dot_products(builder: Any, weights: tuple[Any, int, Any], x_rows: list[Any], inputs: Any) -> list[Any]:
    """Emit the products of one matrix row with vectors of float32. weights: address of the row, and as in `_products`."""
    address, bits, read = weights
    rows, vector_bytes = len(x_rows), builder.mul(inputs, INDEX(4))

    def multiplied(size: int) -> Any:
        def step(index: Any, sums: list[Any]) -> list[Any]:
            own = at(builder, address, index, bits // 8)
            w = read(builder, own, size)
            if size == LANES:
                fetch_weights(builder, own, size * bits // 8, AHEAD[bits], (rows, vector_bytes))
            x = [load(builder, at(builder, row, index, 4), many(FLOAT, size)) for row in x_rows]
            return [add_product(builder, total, w, each) for total, each in zip(sums, x, strict=True)]

        return step

    whole = builder.and_(inputs, INDEX(-LANES))
    zeros = [ir.Constant(FLOATS, [0.0] * LANES)] * rows
    sums = loop(builder, INDEX(0), whole, LANES, zeros, multiplied(LANES))
    return loop(builder, whole, inputs, 1, added_up(builder, sums), multiplied(1))


def _pair_tile(rows: int, matrix_rows: int) -> Any:
    """Return a function of (address of matrix rows of I bfloat16, address of vectors of I bfloat16, I, address of the
    results, stride), for `rows` vectors and `matrix_rows` matrix rows at once, on processors with AVX512-BF16.

    The product of matrix row w and vector r goes to place `w + r · stride` of the float32 results.
    """
    size = 2 * LANES

    def tile(context: Any, weights_WI: Any, x_RI: Any, inputs: Any, results: Any, stride: Any) -> Any:
        return _TILE, generate

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weight_address, x_address, inputs, result_address, stride = arguments
        x_rows = [at(builder, x_address, builder.mul(inputs, INDEX(r)), 2) for r in range(rows)]
        w_rows = [at(builder, weight_address, builder.mul(inputs, INDEX(w)), 2) for w in range(matrix_rows)]
        products, vector_bytes = rows * matrix_rows, builder.mul(inputs, INDEX(2))

        def dots(parts: int) -> Any:
            def step(index: Any, sums: list[Any]) -> list[Any]:
                made: list[Any] = []
                for part in range(parts):
                    place = builder.add(index, INDEX(part * size))
                    w = [load(builder, at(builder, row, place, 2), INTS) for row in w_rows]
                    for row in w_rows:
                        fetch_weights(builder, at(builder, row, place, 2), 2 * size, AHEAD[16], (rows, vector_bytes))
                    for row in x_rows:
                        x = load(builder, at(builder, row, place, 2), INTS)
                        for each in w:
                            made.append(add_pairs(builder, sums[len(made)], each, x))
                return made

            return step

        def alone(index: Any, totals: list[Any]) -> list[Any]:
            w = [widened(builder, at(builder, row, index, 2), 1) for row in w_rows]
            x = [widened(builder, at(builder, row, index, 2), 1) for row in x_rows]
            factors = [(x_r, w_r) for x_r in x for w_r in w]
            return [add_product(builder, total, *pair) for total, pair in zip(totals, factors, strict=True)]

        most, whole = builder.and_(inputs, INDEX(-size * _PAIR_SUMS)), builder.and_(inputs, INDEX(-size))
        zeros = [ir.Constant(FLOATS, [0.0] * LANES)] * (products * _PAIR_SUMS)
        sums = loop(builder, INDEX(0), most, size * _PAIR_SUMS, zeros, dots(_PAIR_SUMS))
        sums = loop(builder, most, whole, size, add_halves(builder, sums, products), dots(1))
        totals = [total for first in range(0, products, 4) for total in added_up(builder, sums[first : first + 4])]
        for number, total in enumerate(loop(builder, whole, inputs, 1, totals, alone)):
            r, w = divmod(number, matrix_rows)
            place = at(builder, result_address, builder.add(builder.mul(stride, INDEX(r)), INDEX(w)), 4)
            builder.store(total, builder.inttoptr(place, FLOAT.as_pointer()))
        return context.get_dummy_value()

    return intrinsic(tile)


_ROW_OF_1, _FOUR_OF_1, _PAIR_OF_1 = _pair_tile(1, 1), _pair_tile(1, 4), _pair_tile(1, 2)
_PAIR_OF_2, _PAIR_OF_3, _PAIR_OF_4 = _pair_tile(2, 2), _pair_tile(3, 2), _pair_tile(4, 2)


WORK: Any = None
"""The code of a kernel, which `add_kernel` puts in this place."""


def _multiply(
    weights: Any, scales: Any, group: Any, count: Any, inputs: Any, x: Any, rows: Any, results: Any, stride: Any
) -> None:
    WORK(weights, count, inputs, x, rows, results, stride)


for _name, _bits, _read in (
    ("multiply_wide", 16, widened),
    ("multiply_float16", 16, widened_halves),
    ("multiply_float32", 32, unchanged),
):
    add_kernel(_name, MULTIPLY, _multiply, _products(_bits, _read))


@kernel(MULTIPLY)
def multiply_pairs(
    weights: Any, scales: Any, group: Any, count: Any, inputs: Any, x: Any, rows: Any, results: Any, stride: Any
) -> None:
    """Multiply bfloat16 matrix rows with bfloat16 vectors. Two matrix rows at once share each read of the vectors, and four
    share those of one long vector. A short one is multiplied row by row, because memory delivers one stream fastest.
    """
    place = 0
    while place < count:
        w = weights + 2 * place * inputs
        if rows == 1 and 2 * inputs > LONG_VECTOR and place + 4 <= count:
            _FOUR_OF_1(w, x, inputs, results + 4 * place, stride)
            place += 4
            continue
        alone = rows == 1 or place + 1 == count
        row = 0
        while row < rows:
            own = x + 2 * row * inputs
            y = results + 4 * (row * stride + place)
            vectors = 1 if alone else min(4, rows - row)
            if alone:
                _ROW_OF_1(w, own, inputs, y, stride)
            elif vectors == 4:
                _PAIR_OF_4(w, own, inputs, y, stride)
            elif vectors == 3:
                _PAIR_OF_3(w, own, inputs, y, stride)
            elif vectors == 2:
                _PAIR_OF_2(w, own, inputs, y, stride)
            else:
                _PAIR_OF_1(w, own, inputs, y, stride)
            row += vectors
        place += 1 if alone else 2


@kernel(PREPARE)
def prepare_wide(values: Any, inputs: Any, target: Any) -> None:
    """Copy float32 values unchanged."""
    values_I, plain_I = numba.carray(floats(values), (inputs,)), numba.carray(floats(target), (inputs,))
    for index in range(inputs):
        plain_I[index] = values_I[index]


@kernel(PREPARE)
def prepare_pairs(values: Any, inputs: Any, target: Any) -> None:
    """Round float32 values to bfloat16."""
    values_I, half_I = numba.carray(floats(values), (inputs,)), numba.carray(halves(target), (inputs,))
    for index in range(inputs):
        half_I[index] = narrow(values_I[index])


VALUE_BYTES = 2 if MULTIPLIES_BFLOAT16 else 4
"""Bytes of one value of a vector that is multiplied with bfloat16 weights."""
KERNELS["multiply_plain"] = multiply_pairs if MULTIPLIES_BFLOAT16 else KERNELS["multiply_wide"]
KERNELS["prepare_plain"] = prepare_pairs if MULTIPLIES_BFLOAT16 else prepare_wide
