"""The innermost products of prompts: a few matrix rows times a few vectors of a panel, whose sums stay in registers.

A step takes 4 bytes of each matrix row, repeats them in all lanes of a register, and multiplies this register with 64 bytes
of each vector. Nothing is added across lanes. Where the processor multiplies pairs of bfloat16, the 4 bytes are a pair of
weights as it is stored, and a lane has the same two inputs of one token. Elsewhere they are one weight in float32: a part of
the matrix and of the panel that stays in cache is widened first, once for all tiles of it.

Each sum is one lane, which is added up in the order of the inputs, whatever else the panel holds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

from engine.kernels.compiler.arithmetic import as_float, widen
from engine.kernels.compiler.compiling import helper, kernel
from engine.kernels.compiler.instructions import (
    FLOAT,
    FLOATS,
    INDEX,
    INT,
    INTS,
    LANES,
    add_pairs,
    add_product,
    fetch,
    load,
    loop,
    repeated,
)
from engine.kernels.compiler.memory import address_of, aligned, floats, halves, keep, pairs
from engine.kernels.compiler.processor import HAS_WIDE_REGISTERS, MULTIPLIES_BFLOAT16

STEP_BYTES = 4
"""Bytes of a matrix row in one step."""
VECTOR_BYTES = 4 * LANES
"""Bytes of a vector of a panel in one step."""
_UNROLLED = 4
"""Steps of one turn of the innermost loop."""


class Tile(NamedTuple):
    """How much is multiplied at once."""

    rows: tuple[int, ...]
    """Numbers of matrix rows, the largest first. They fill up every number of rows that there is: a multiple of 4."""
    vectors: int
    """Largest number of vectors. The sums of all rows and vectors, and the factors of one row, fill the registers."""
    steps: int
    """Steps of the part of a panel that stays in cache during a pass over the matrix rows."""


_OF_PAIRS, _OF_FLOATS, _NARROW = Tile((4,), 6, 1024), Tile((8, 4), 3, 128), Tile((6, 4, 2), 1, 256)
TILE = (_OF_PAIRS if MULTIPLIES_BFLOAT16 else _OF_FLOATS) if HAS_WIDE_REGISTERS else _NARROW
"""Tiles of this processor. A vector is one register of 512 bits, or several smaller ones."""
_ROWS, _VECTORS, _STEPS = TILE
PANEL_VECTORS = 6 if MULTIPLIES_BFLOAT16 else 12
"""Maximum number of vectors of a panel. For each panel, the matrix is read once more, and widened where it must be."""
_ONE, _ALL, _add = (INT, INTS, add_pairs) if MULTIPLIES_BFLOAT16 else (FLOAT, FLOATS, add_product)


def _emit_tile(builder: Any, rows: int, vectors: int, given: list[Any]) -> None:
    """Emit the products of so many rows and vectors. given: the arguments of `_multiply_tile` after these numbers."""
    weights, row_bytes, step_bytes, panel, panel_step, steps, results, result_bytes = given
    own_rows = [builder.add(weights, builder.mul(row_bytes, INDEX(row))) for row in range(rows)]

    def products(count: int) -> Any:
        def step(index: Any, sums: list[Any]) -> list[Any]:
            each = [builder.add(index, INDEX(number)) for number in range(count)]
            places = [builder.mul(number, step_bytes) for number in each]
            for row in own_rows:
                fetch(builder, builder.add(builder.add(row, places[0]), builder.mul(row_bytes, INDEX(rows))))
            for number, place in zip(each, places, strict=True):
                begin = builder.add(panel, builder.mul(number, panel_step))
                x = [load(builder, builder.add(begin, INDEX(VECTOR_BYTES * v)), _ALL) for v in range(vectors)]
                made: list[Any] = []
                for row in own_rows:
                    weight = repeated(builder, load(builder, builder.add(row, place), _ONE), LANES)
                    made += [_add(builder, sums[len(made) + v], weight, own) for v, own in enumerate(x)]
                sums = made
            return sums

        return step

    targets = [
        builder.add(builder.add(results, builder.mul(result_bytes, INDEX(row))), INDEX(VECTOR_BYTES * v))
        for row in range(rows)
        for v in range(vectors)
    ]
    whole = builder.and_(steps, INDEX(-_UNROLLED))
    sums = [load(builder, target, FLOATS) for target in targets]
    sums = loop(builder, INDEX(0), whole, _UNROLLED, sums, products(_UNROLLED))
    sums = loop(builder, whole, steps, 1, sums, products(1))
    for target, total in zip(targets, sums, strict=True):
        builder.store(total, builder.inttoptr(target, FLOATS.as_pointer()), align=4)


@intrinsic  # type: ignore[untyped-decorator]
def _multiply_tile(
    context: Any,
    rows: Any,
    vectors: Any,
    weights: Any,
    row_bytes: Any,
    step_bytes: Any,
    panel: Any,
    panel_step: Any,
    steps: Any,
    results: Any,
    result_bytes: Any,
) -> Any:
    """Add the products of `rows` matrix rows and `vectors` vectors to float32 results.

    weights, panel, results: addresses. row_bytes, step_bytes: bytes from one matrix row to the next, and from one step to
    the next. panel_step: bytes of all vectors of the panel in a step. result_bytes: bytes from one row of the results to the
    next.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows, vectors, *given = arguments
        after = builder.append_basic_block("after")
        switch = builder.switch(builder.add(builder.mul(rows, INDEX(_VECTORS + 1)), vectors), after)
        for row_count in _ROWS:
            for vector_count in range(1, _VECTORS + 1):
                block = builder.append_basic_block("tile")
                switch.add_case(INDEX(row_count * (_VECTORS + 1) + vector_count), block)
                builder.position_at_end(block)
                _emit_tile(builder, row_count, vector_count, given)
                builder.branch(after)
        builder.position_at_end(after)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10), generate


@helper
def _rows_of_tile(left: Any) -> Any:
    """Return the number of rows of the next tile, where so many are left."""
    for rows in _ROWS:
        if rows <= left:
            return rows
    return 0


@helper
def _multiply_tiles(
    matrix: Any, count: Any, panel: Any, panel_step: Any, steps: Any, vectors: Any, results: Any, result_bytes: Any
) -> None:
    """Multiply `count` matrix rows with `vectors` vectors. matrix: address, row_bytes and step_bytes of `_multiply_tile`."""
    weights, row_bytes, step_bytes = matrix
    for first in range(0, vectors, _VECTORS):
        own, row = min(_VECTORS, vectors - first), 0
        x, y = panel + VECTOR_BYTES * first, results + VECTOR_BYTES * first
        while row < count:
            rows = _rows_of_tile(count - row)
            w = weights + row * row_bytes
            _multiply_tile(
                np.int64(rows), own, w, row_bytes, step_bytes, x, panel_step, steps, y + row * result_bytes, result_bytes
            )
            row += rows


@helper
def _multiply_widened(matrix: Any, count: Any, panel: Any, inputs: Any, vectors: Any, results: Any, scratch: Any) -> None:
    """Multiply a matrix in float32 with a part of a panel, which is widened a few vectors at a time.

    inputs: those of the part, an even number. scratch: address of float32 [_STEPS, _VECTORS, 16].
    """
    for first in range(0, vectors, _VECTORS):
        own = min(_VECTORS, vectors - first)
        places = LANES * own
        for pair in range(inputs // 2):
            both_Z = numba.carray(pairs(panel + VECTOR_BYTES * (pair * vectors + first)), (places,))
            wide_2Z = numba.carray(floats(scratch + 8 * places * pair), (2, places))
            for place in range(places):
                wide_2Z[0, place] = as_float(both_Z[place] << np.uint32(16))
                wide_2Z[1, place] = as_float(both_Z[place] & np.uint32(0xFFFF0000))
        y = results + VECTOR_BYTES * first
        _multiply_tiles(matrix, count, scratch, VECTOR_BYTES * own, inputs, own, y, VECTOR_BYTES * vectors)


@kernel("void(int64, int64, int64, int64, int64, int64)")
def multiply_panel(weights: Any, count: Any, inputs: Any, panel: Any, vectors: Any, results: Any) -> None:
    """Add the products of `count` rows of bfloat16, a multiple of 4, and a panel to float32 results, row after row."""
    stride = VECTOR_BYTES * vectors
    if MULTIPLIES_BFLOAT16:
        for start in range(0, inputs, 2 * _STEPS):
            steps = min(2 * _STEPS, inputs - start) // 2
            matrix, x = (weights + 2 * start, 2 * inputs, STEP_BYTES), panel + start // 2 * stride
            _multiply_tiles(matrix, count, x, stride, steps, vectors, results, stride)
        return
    wide_WI, scratch = np.empty((count, _STEPS), np.float32), aligned(_STEPS * _VECTORS * VECTOR_BYTES)
    matrix = address_of(wide_WI), STEP_BYTES * _STEPS, STEP_BYTES
    for start in range(0, inputs, _STEPS):
        size = min(_STEPS, inputs - start)
        for row in range(count):
            row_I = numba.carray(halves(weights + 2 * (row * inputs + start)), (size,))
            for index in range(size):
                wide_WI[row, index] = widen(row_I[index])
        x = panel + start // 2 * stride
        _multiply_widened(matrix, count, x, size, vectors, results, address_of(scratch))
    keep(wide_WI)
    keep(scratch)


@kernel("void(int64, int64, int64, int64, int64, int64)")
def multiply_paired(weights: Any, count: Any, inputs: Any, panel: Any, vectors: Any, results: Any) -> None:
    """Do as `multiply_panel` with a matrix of `count` rows that is stored as pairs of inputs, [inputs / 2, `count`, 2]."""
    stride = VECTOR_BYTES * vectors
    if MULTIPLIES_BFLOAT16:
        matrix = weights, STEP_BYTES, STEP_BYTES * count
        _multiply_tiles(matrix, count, panel, stride, inputs // 2, vectors, results, stride)
        return
    row = count + LANES  # an odd number of lines of the cache for 16, 32, 64, … rows, so that inputs share no part of it
    wide_IW, scratch = np.empty((inputs, row), np.float32), aligned(_STEPS * _VECTORS * VECTOR_BYTES)
    for pair in range(inputs // 2):
        both_W = numba.carray(pairs(weights + 4 * pair * count), (count,))
        for index in range(count):
            wide_IW[2 * pair, index] = as_float(both_W[index] << np.uint32(16))
            wide_IW[2 * pair + 1, index] = as_float(both_W[index] & np.uint32(0xFFFF0000))
    for start in range(0, inputs, _STEPS):
        matrix = address_of(wide_IW) + STEP_BYTES * row * start, STEP_BYTES, STEP_BYTES * row
        x, size = panel + start // 2 * stride, min(_STEPS, inputs - start)
        _multiply_widened(matrix, count, x, size, vectors, results, address_of(scratch))
    keep(wide_IW)
    keep(scratch)
