"""Weighted sums of cached vectors of 8 bits, as they are stored: sums of four products of bytes.

64 values of four positions are read and put side by side, so that each register holds 16 values of all four. With more than
a few rows of weights, those of all positions are written to memory first, and all rows read them there before the next 64
values overwrite them. Weights, which have no sign, are rounded to 15 bits in steps of the row's own,
w = step · (128·high + low):

    Σ_p w_p · v_p = step · (128 · Σ_p high_p·v_p + Σ_p low_p·v_p)

Shape suffixes: R rows of weights, P positions, S steps of four positions, E size of a vector.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.kernels.attention.instructions import largest_of
from engine.kernels.compiler.compiling import helper, inline, kernel
from engine.kernels.compiler.instructions import (
    AHEAD,
    BYTE,
    FLOAT,
    FLOATS,
    IN_ORDER,
    INDEX,
    INT,
    INTS,
    LANES,
    SHORT,
    add_product,
    add_quadruples,
    added_up,
    at,
    fetch,
    joined,
    load,
    loop,
    many,
    repeated,
    same,
)
from engine.kernels.compiler.memory import address_of

TOGETHER = 4
"""Positions side by side."""
_BLOCK, _REGISTER, _ROWS = 64, 64, 2
"""Values of a vector that are summed at once, bytes of a register, and rows of weights that share one read of the values."""
FEW_ROWS = 8
"""Maximum number of rows of weights for which values are put side by side anew for each _ROWS rows."""
STEP_BYTES = 4 * _REGISTER
"""Bytes of 64 values of four positions."""
LARGEST_WEIGHT = np.float32(32767.0)
"""A row's largest weight, in steps. 512 products of it and of 127 add up to less than 2^31."""


def _interleaved(builder: Any, a: Any, b: Any) -> tuple[Any, Any]:
    """Return the values of a and b in turn, of the lower and of the upper half of each 16 bytes."""
    size = a.type.count
    half = size // 8  # values in half of 16 bytes
    halves = []
    for upper in (0, half):
        places = [
            2 * half * part + upper + value + (size if of_second else 0)
            for part in range(4)
            for value in range(half)
            for of_second in (False, True)
        ]
        halves.append(builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INT, size), places)))
    return halves[0], halves[1]


def _turned(builder: Any, rows: list[Any]) -> list[Any]:
    """Return 64 signed bytes of each of four vectors side by side. A register has 16 values of all of them: of each 16 bytes
    the first, second, third or fourth four values."""
    words = ir.VectorType(SHORT, _BLOCK // 2)
    pairs = [builder.bitcast(each, words) for two in (rows[:2], rows[2:]) for each in _interleaved(builder, *two)]
    made = [each for k in range(2) for each in _interleaved(builder, pairs[k], pairs[k + 2])]
    return [builder.bitcast(each, INTS) for each in made]


def _in_order(builder: Any, registers: list[Any]) -> list[Any]:
    """Return the sums of a block in the order of its values. Register j has the values 16·l + 4·j + e in lane 4·l + e."""

    def mixed(both: Any, places: list[int]) -> Any:
        a, b = both
        lanes = [4 * place + lane for place in places for lane in range(4)]
        return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INT, LANES), lanes))

    lower = [mixed(both, [0, 4, 1, 5]) for both in (registers[:2], registers[2:])]
    upper = [mixed(both, [2, 6, 3, 7]) for both in (registers[:2], registers[2:])]
    return [mixed(both, places) for both in (lower, upper) for places in ([0, 1, 4, 5], [2, 3, 6, 7])]


@intrinsic  # type: ignore[untyped-decorator]
def _add_up(
    context: Any, places: Any, steps: Any, size: Any, weights: Any, factors: Any, rows: Any, turned: Any, results: Any
) -> Any:
    """See `add_weighted_bytes`."""
    whole_block, half_block = ir.VectorType(BYTE, _BLOCK), ir.VectorType(BYTE, _BLOCK // 2)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        places, steps, size, weights, factors, rows, turned, results = arguments
        level_bytes = builder.mul(steps, INDEX(TOGETHER))

        def whole(place: Any) -> Any:
            return load(builder, place, whole_block)

        def half(place: Any) -> Any:
            return joined(builder, [load(builder, place, half_block), same(half_block, 0)])

        def from_cache(read: Any, first: Any) -> Any:
            """Return a function that returns the registers of a step. read: loads the values from `first` on."""

            def values(step: Any) -> list[Any]:
                begin = builder.add(load(builder, at(builder, places, step, 8), INDEX), first)
                each = [at(builder, begin, size, position) for position in range(TOGETHER)]
                for place in each:
                    fetch(builder, builder.add(place, INDEX(AHEAD[16])))
                return _turned(builder, [read(place) for place in each])

            return values

        def place_of(step: Any, number: int) -> Any:
            return builder.inttoptr(
                at(builder, at(builder, turned, INDEX(number), _REGISTER), step, STEP_BYTES), INTS.as_pointer()
            )

        def from_memory(step: Any) -> list[Any]:
            return [builder.load(place_of(step, number), align=_REGISTER) for number in range(4)]

        def to_memory(values: Any) -> Any:
            def write(step: Any, _: list[Any]) -> list[Any]:
                for number, each in enumerate(values(step)):
                    builder.store(each, place_of(step, number), align=_REGISTER)
                return []

            return write

        def summed(values: Any, vectors: int, row: Any) -> list[Any]:
            """Return the sums of 64 values, in four registers, of each of so many rows from this one on."""
            own = [
                builder.add(weights, builder.mul(level_bytes, at(builder, INDEX(number), row, 2)))
                for number in range(2 * vectors)
            ]

            def body(step: Any, sums: list[Any]) -> list[Any]:
                given = values(step)
                four = [load(builder, at(builder, level, step, TOGETHER), INT) for level in own]
                pairs = [(repeated(builder, weight, LANES), value) for weight in four for value in given]
                return [add_quadruples(builder, total, *both, INTS) for total, both in zip(sums, pairs, strict=True)]

            sums = loop(builder, INDEX(0), steps, 1, [same(INTS, 0)] * (8 * vectors), body)
            levels = [(sums[8 * r + j], sums[8 * r + 4 + j]) for r in range(vectors) for j in range(4)]
            return [builder.add(builder.shl(high, same(INTS, 7)), low) for high, low in levels]

        def write(sums: list[Any], registers: int, first: Any, row: Any) -> None:
            factor = repeated(builder, load(builder, at(builder, factors, row, 4), FLOAT), LANES)
            place = at(builder, results, builder.add(builder.mul(size, row), first), 4)
            for number, each in enumerate(_in_order(builder, [builder.sitofp(own, FLOATS) for own in sums])[:registers]):
                to = builder.inttoptr(builder.add(place, INDEX(_REGISTER * number)), FLOATS.as_pointer())
                builder.store(builder.fmul(each, factor, flags=IN_ORDER), to, align=4)

        def all_rows(values: Any, registers: int, first: Any) -> None:
            def taking(vectors: int) -> Any:
                def some(row: Any, _: list[Any]) -> list[Any]:
                    sums = summed(values, vectors, row)
                    for r in range(vectors):
                        write(sums[4 * r : 4 * r + 4], registers, first, builder.add(row, INDEX(r)))
                    return []

                return some

            even = builder.and_(rows, INDEX(-_ROWS))
            loop(builder, INDEX(0), even, _ROWS, [], taking(_ROWS))
            loop(builder, even, rows, 1, [], taking(1))

        def blocks(read: Any, registers: int) -> Any:
            """Return the body of a loop over blocks of values, of which so many registers are written."""

            def block(first: Any, _: list[Any]) -> list[Any]:
                values = from_cache(read, first)
                with builder.if_else(builder.icmp_signed("<=", rows, INDEX(FEW_ROWS))) as (few, many_rows):
                    with few:
                        all_rows(values, registers, first)
                    with many_rows:
                        loop(builder, INDEX(0), steps, 1, [], to_memory(values))
                        all_rows(from_memory, registers, first)
                return []

            return block

        end = builder.and_(size, INDEX(-_BLOCK))
        loop(builder, INDEX(0), end, _BLOCK, [], blocks(whole, 4))
        loop(builder, end, size, _BLOCK, [], blocks(half, 2))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), generate


@kernel("void(int64, int64, int64, int64, int64, int64, int64, int64)")
def add_weighted_bytes(
    places: Any, steps: Any, size: Any, weights: Any, factors: Any, rows: Any, turned: Any, results: Any
) -> None:
    """Write the sums of vectors of signed bytes times weights [R, 2, 4 S] and the rows' factors [R] to float32 [R, E].

    places: int64 [S], addresses of each four vectors, which lie one after the other. size: E, a multiple of 32. turned:
    memory for S · STEP_BYTES bytes from a cache line on, if there are more rows than FEW_ROWS.
    """
    _add_up(places, steps, size, weights, factors, rows, turned, results)


@inline
def steps_of(positions: Any) -> Any:
    """Return the number of steps of so many positions."""
    return (positions + TOGETHER - 1) // TOGETHER


@intrinsic  # type: ignore[untyped-decorator]
def _round_row(context: Any, weights: Any, count: Any, inverse: Any, high: Any, low: Any) -> Any:
    """Write the two bytes of `count` weights times `inverse`. Returns zero, or NaN where a weight is not finite."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weights, count, inverse, high, low = arguments
        whole = builder.and_(count, INDEX(-LANES))

        def taking(size: int) -> Any:
            kind, numbers, half = many(FLOAT, size), many(INT, size), repeated(builder, FLOAT(0.5), size)
            bits, lowest = repeated(builder, INT(7), size), repeated(builder, INT(127), size)
            nothing, factor = repeated(builder, FLOAT(0.0), size), repeated(builder, inverse, size)

            def step(index: Any, found: list[Any]) -> list[Any]:
                weight = load(builder, at(builder, weights, index, 4), kind)
                number = builder.fptosi(add_product(builder, half, weight, factor), numbers)
                for target, byte in ((high, builder.lshr(number, bits)), (low, builder.and_(number, lowest))):
                    place = builder.inttoptr(builder.add(target, index), many(BYTE, size).as_pointer())
                    builder.store(builder.trunc(byte, many(BYTE, size)), place, align=1)
                return [add_product(builder, found[0], weight, nothing)]

            return step

        found = loop(builder, INDEX(0), whole, LANES, [same(FLOATS, 0.0)], taking(LANES))[0]
        (zero,) = added_up(builder, [found])
        return loop(builder, whole, count, 1, [zero], taking(1))[0]

    return types.float32(types.int64, types.int64, types.float32, types.int64, types.int64), generate


@helper
def round_weights(weights_RP: Any, rounded_RLP: Any, factor_R: Any) -> None:
    """Write the two bytes of each weight, with zeros behind the last position, and the factor of each row."""
    rows, positions = weights_RP.shape
    for row in range(rows):
        weights = address_of(weights_RP) + 4 * row * positions
        largest = largest_of(weights, positions)
        inverse = LARGEST_WEIGHT / largest if largest > np.float32(0.0) else np.float32(0.0)
        high_P, low_P = rounded_RLP[row, 0], rounded_RLP[row, 1]
        zero = _round_row(weights, positions, inverse, address_of(high_P), address_of(low_P))
        high_P[positions:] = np.uint8(0)
        low_P[positions:] = np.uint8(0)
        factor_R[row] = largest / LARGEST_WEIGHT + zero
