"""The innermost products of prompts: a few matrix rows times a few vectors of a panel, whose sums stay in registers.

A step takes 4 bytes of each matrix row, repeats them in all lanes of a register, and multiplies this register with 64 bytes
of each vector. Nothing is added across lanes. The 4 bytes are a pair of bfloat16 as it is stored, where the processor
multiplies such pairs; a lane of a vector then has the same two inputs of one token. Otherwise they are one float32: a part
of the matrix and of the panel that stays in cache is copied first, and widened if it is bfloat16, once for all tiles of it.

Each sum is one lane, which is added up in the order of the inputs, whatever else the panel holds.
"""

from __future__ import annotations

from collections.abc import Callable
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

_STEP_BYTES = 4
"""Bytes of a matrix row in one step."""
VECTOR_BYTES = 4 * LANES
"""Bytes of a vector of a panel in one step."""
_UNROLLED = 4
"""Steps of one turn of the innermost loop."""
PANEL_VECTORS = 6 if MULTIPLIES_BFLOAT16 else 12
"""Maximum number of vectors of a panel. For each panel, the matrix is read once more, and copied where it must be."""


class Tile(NamedTuple):
    """How much is multiplied at once."""

    rows: tuple[int, ...]
    """Numbers of matrix rows, the largest first. They fill up every number of rows that there is: a multiple of 4."""
    vectors: int
    """Largest number of vectors. The sums of all rows and vectors, and the factors of one row, fill the registers."""
    steps: int
    """Steps of the part of a panel that stays in cache during a pass over the matrix rows."""


_NARROW = Tile((6, 4, 2), 1, 256)
"""Tiles of a processor whose registers are smaller than a vector."""
_OF_PAIRS = Tile((4,), 6, 1024) if HAS_WIDE_REGISTERS else _NARROW
"""Tiles of pairs of bfloat16."""
_OF_FLOATS = Tile((8, 4), 3, 128) if HAS_WIDE_REGISTERS else _NARROW
"""Tiles of float32."""


class _Way(NamedTuple):
    """How the 4 bytes of a step are multiplied."""

    one: Any
    """LLVM's type of the 4 bytes of a matrix row."""
    every: Any
    """That of the 64 bytes of a vector."""
    add: Callable[..., Any]
    """Emits the addition of their products to sums."""
    prefetches: bool
    """Whether the rows of the next tile are prefetched: a copy in cache needs none."""


_PAIRS, _FLOATS = _Way(INT, INTS, add_pairs, True), _Way(FLOAT, FLOATS, add_product, False)


def _emit_tile(builder: Any, way: _Way, rows: int, vectors: int, given: list[Any]) -> None:
    """Emit the products of so many rows and vectors. given: the arguments of `multiply_tile` after these numbers."""
    weights, row_bytes, step_bytes, panel, panel_step, steps, results, result_bytes = given
    own_rows = [builder.add(weights, builder.mul(row_bytes, INDEX(row))) for row in range(rows)]

    def products(count: int) -> Any:
        def step(index: Any, sums: list[Any]) -> list[Any]:
            each = [builder.add(index, INDEX(number)) for number in range(count)]
            places = [builder.mul(number, step_bytes) for number in each]
            for row in own_rows if way.prefetches else []:
                fetch(builder, builder.add(builder.add(row, places[0]), builder.mul(row_bytes, INDEX(rows))))
            for number, place in zip(each, places, strict=True):
                begin = builder.add(panel, builder.mul(number, panel_step))
                x = [load(builder, builder.add(begin, INDEX(VECTOR_BYTES * v)), way.every) for v in range(vectors)]
                made: list[Any] = []
                for row in own_rows:
                    weight = repeated(builder, load(builder, builder.add(row, place), way.one), LANES)
                    made += [way.add(builder, sums[len(made) + v], weight, own) for v, own in enumerate(x)]
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


def _tile_multiplier(tile: Tile, way: _Way) -> Any:
    """Return a function that adds the products of one tile to float32 results.

    Its arguments: numbers of rows and vectors; address of the first row, bytes from one matrix row to the next and from one
    step to the next; address of the panel and bytes of all its vectors in a step; steps; address of the results and bytes
    from one row of theirs to the next.
    """
    each_vectors = range(1, tile.vectors + 1)

    def multiply_tile(
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
        return types.void(*[types.int64] * 10), generate

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows, vectors, *given = arguments
        after = builder.append_basic_block("after")
        switch = builder.switch(builder.add(builder.mul(rows, INDEX(len(each_vectors) + 1)), vectors), after)
        for row_count in tile.rows:
            for vector_count in each_vectors:
                block = builder.append_basic_block("tile")
                switch.add_case(INDEX(row_count * (len(each_vectors) + 1) + vector_count), block)
                builder.position_at_end(block)
                _emit_tile(builder, way, row_count, vector_count, given)
                builder.branch(after)
        builder.position_at_end(after)
        return context.get_dummy_value()

    return intrinsic(multiply_tile)


def _multiplier(name: str, tile: Tile, way: _Way) -> Any:
    """Return a function of (matrix, its rows, panel, bytes of a step of it, steps, vectors, results) that adds the products
    of all rows and vectors to float32 results [rows, 16 · vectors of the whole panel].

    matrix: address, and bytes from one row to the next and from one step to the next. vectors: those that are multiplied,
    and those of a row of the results.
    """
    multiply_tile = _tile_multiplier(tile, way)
    each_rows, most_vectors = tile.rows, tile.vectors

    def largest(left: Any) -> Any:
        """Return the number of rows of the next tile, where so many are left."""
        for rows in each_rows:
            if rows <= left:
                return rows
        return 0

    rows_of_tile = helper(largest, f"rows_of_tile_of_{name}")

    def multiply(matrix: Any, count: Any, panel: Any, panel_step: Any, steps: Any, vectors: Any, results: Any) -> None:
        (weights, row_bytes, step_bytes), (multiplied, result_vectors) = matrix, vectors
        stride = VECTOR_BYTES * result_vectors
        for first in range(0, multiplied, most_vectors):
            own, row = min(most_vectors, multiplied - first), 0
            x, y = panel + VECTOR_BYTES * first, results + VECTOR_BYTES * first
            while row < count:
                rows = rows_of_tile(count - row)
                w = weights + row * row_bytes
                multiply_tile(rows, own, w, row_bytes, step_bytes, x, panel_step, steps, y + row * stride, stride)
                row += rows

    return helper(multiply, f"multiply_{name}")


_multiply_pairs = _multiplier("pairs", _OF_PAIRS, _PAIRS)
_multiply_floats = _multiplier("floats", _OF_FLOATS, _FLOATS)
_PART = _OF_FLOATS.steps
"""Number of inputs that are copied at once."""
_COPIED_VECTORS = _OF_FLOATS.vectors
"""Number of vectors that are copied at once."""


@helper
def _copy_vectors(panel: Any, first: Any, vectors: Any, inputs: Any, size: Any, target: Any) -> None:
    """Copy some vectors of a panel, from number `first` on, as float32 [inputs, places].

    vectors: numbers of those that are copied, and of those of the panel. size: bytes of a value of the panel, 2 or 4.
    """
    copied, every = vectors
    places = LANES * copied
    for step in range(inputs * size // _STEP_BYTES):
        source = panel + VECTOR_BYTES * (step * every + first)
        if size == 4:
            wide_Z = numba.carray(floats(target + 4 * places * step), (places,))
            source_Z = numba.carray(floats(source), (places,))
            for place in range(places):
                wide_Z[place] = source_Z[place]
        else:
            wide_2Z = numba.carray(floats(target + 8 * places * step), (2, places))
            both_Z = numba.carray(pairs(source), (places,))
            for place in range(places):
                wide_2Z[0, place] = as_float(both_Z[place] << np.uint32(16))
                wide_2Z[1, place] = as_float(both_Z[place] & np.uint32(0xFFFF0000))


@helper
def _multiply_part(
    matrix: Any, count: Any, panel: Any, inputs: Any, vectors: Any, results: Any, size: Any, scratch: Any
) -> None:
    """Multiply a matrix in float32 with a part of a panel, of which a few vectors are copied at a time.

    inputs: those of the part, an even number. size: bytes of a value of the panel. scratch: address of the copy.
    """
    for first in range(0, vectors, _COPIED_VECTORS):
        own = min(_COPIED_VECTORS, vectors - first)
        _copy_vectors(panel, first, (own, vectors), inputs, size, scratch)
        y = results + VECTOR_BYTES * first
        _multiply_floats(matrix, count, scratch, VECTOR_BYTES * own, inputs, (own, vectors), y)


@helper
def _multiply_in_float32(weights: Any, count: Any, inputs: Any, panel: Any, vectors: Any, results: Any, size: Any) -> None:
    """Add the products of `count` matrix rows and a panel, part by part. size: bytes of a value of both."""
    copied_WI, scratch = np.empty((count, _PART), np.float32), aligned(_PART * _COPIED_VECTORS * VECTOR_BYTES)
    matrix = address_of(copied_WI), 4 * _PART, 4
    for start in range(0, inputs, _PART):
        part = min(_PART, inputs - start)
        for row in range(count):
            source = weights + size * (row * inputs + start)
            if size == 4:
                wide_I = numba.carray(floats(source), (part,))
                for index in range(part):
                    copied_WI[row, index] = wide_I[index]
            else:
                half_I = numba.carray(halves(source), (part,))
                for index in range(part):
                    copied_WI[row, index] = widen(half_I[index])
        x = panel + size * LANES * vectors * start
        _multiply_part(matrix, count, x, part, vectors, results, size, address_of(scratch))
    keep(copied_WI)
    keep(scratch)


@kernel("void(int64, int64, int64, int64, int64, int64)")
def multiply_panel(weights: Any, count: Any, inputs: Any, panel: Any, vectors: Any, results: Any) -> None:
    """Add the products of `count` rows of bfloat16, a multiple of 4, and a panel to float32 results, row after row."""
    if MULTIPLIES_BFLOAT16:
        for start in range(0, inputs, 2 * _OF_PAIRS.steps):
            steps = min(2 * _OF_PAIRS.steps, inputs - start) // 2
            matrix = weights + 2 * start, 2 * inputs, _STEP_BYTES
            x = panel + 2 * LANES * vectors * start
            _multiply_pairs(matrix, count, x, VECTOR_BYTES * vectors, steps, (vectors, vectors), results)
    else:
        _multiply_in_float32(weights, count, inputs, panel, vectors, results, 2)


@kernel("void(int64, int64, int64, int64, int64, int64)")
def multiply_float_panel(weights: Any, count: Any, inputs: Any, panel: Any, vectors: Any, results: Any) -> None:
    """Do as `multiply_panel` with rows and a panel of float32. The panel is [inputs, 16 · `vectors`]."""
    _multiply_in_float32(weights, count, inputs, panel, vectors, results, 4)


@kernel("void(int64, int64, int64, int64, int64, int64)")
def multiply_paired(weights: Any, count: Any, inputs: Any, panel: Any, vectors: Any, results: Any) -> None:
    """Do as `multiply_panel` with a matrix of `count` rows that is stored as pairs of inputs, [inputs / 2, `count`, 2]."""
    if MULTIPLIES_BFLOAT16:
        matrix = weights, _STEP_BYTES, _STEP_BYTES * count
        _multiply_pairs(matrix, count, panel, VECTOR_BYTES * vectors, inputs // 2, (vectors, vectors), results)
        return
    row = count + LANES  # an odd number of lines of the cache for 32, 64, … rows, so that inputs share no part of it
    wide_IW, scratch = np.empty((inputs, row), np.float32), aligned(_PART * _COPIED_VECTORS * VECTOR_BYTES)
    for pair in range(inputs // 2):
        both_W = numba.carray(pairs(weights + 4 * pair * count), (count,))
        for index in range(count):
            wide_IW[2 * pair, index] = as_float(both_W[index] << np.uint32(16))
            wide_IW[2 * pair + 1, index] = as_float(both_W[index] & np.uint32(0xFFFF0000))
    for start in range(0, inputs, _PART):
        matrix = address_of(wide_IW) + 4 * row * start, 4, 4 * row
        x, part = panel + 2 * LANES * vectors * start, min(_PART, inputs - start)
        _multiply_part(matrix, count, x, part, vectors, results, 2, address_of(scratch))
    keep(wide_IW)
    keep(scratch)
