"""LLVM instructions of attention: the softmax of scores, and sums of weighted values.

Rows of float32 are processed 16 at a time, and the rest one by one. Where the processor multiplies pairs of bfloat16,
weights are rounded to bfloat16, as in torch's products of probabilities and values, and two positions are added at once.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.kernels.compiler.arithmetic import FIRST, HIGHEST, LN2_HIGH, LN2_LOW, LOG2_E, LOWEST, SERIES
from engine.kernels.compiler.instructions import (
    AHEAD,
    BYTE,
    FLOAT,
    IN_ORDER,
    INDEX,
    INT,
    INTS,
    LANES,
    SHORT,
    add_pairs,
    add_product,
    at,
    fetch,
    load,
    loop,
    many,
    repeated,
    widened,
)

_WIDE = 2 * LANES


def _all(value: float, size: int) -> Any:
    """Return a constant vector that repeats a float32."""
    return ir.Constant(many(FLOAT, size), [value] * size if size > 1 else value)


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _halved(builder: Any, vector: Any, join: Any) -> Any:
    """Return one value: halves of a vector are joined until one lane is left."""
    lanes = LANES
    while lanes > 1:
        lanes //= 2
        lower, upper = (
            builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(INT, lanes), list(range(start, start + lanes))))
            for start in (0, lanes)
        )
        vector = join(lower, upper)
    return builder.extract_element(vector, INT(0))


def exponential(builder: Any, x: Any, size: int) -> Any:
    """Return e^x of each value, as `arithmetic.exp` computes it; NaN stays NaN."""
    kind, integers = many(FLOAT, size), many(INT, size)
    low, high = _all(LOWEST, size), _all(HIGHEST, size)
    x = builder.select(builder.fcmp_ordered("<", x, low), low, x)
    x = builder.select(builder.fcmp_ordered(">", x, high), high, x)
    name = "llvm.floor.f32" if size == 1 else f"llvm.floor.v{size}f32"
    floor = builder.module.declare_intrinsic(name, fnty=ir.FunctionType(kind, [kind]))
    n = builder.call(floor, [add_product(builder, _all(0.5, size), x, _all(LOG2_E, size))])
    r = add_product(builder, add_product(builder, x, n, _all(-LN2_HIGH, size)), n, _all(-LN2_LOW, size))
    series = _all(FIRST, size)
    for coefficient in SERIES:
        series = add_product(builder, _all(coefficient, size), series, r)

    def integer(value: int) -> Any:
        return ir.Constant(integers, [value] * size if size > 1 else value)

    power = builder.shl(builder.add(builder.fptosi(n, integers), integer(127)), integer(23))
    return builder.fmul(series, builder.bitcast(power, kind), flags=IN_ORDER)


@intrinsic  # type: ignore[untyped-decorator]
def largest_of(context: Any, address: Any, count: Any) -> Any:
    """Return the largest of `count` float32 values; −∞ for none."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, count = arguments
        whole = builder.and_(count, INDEX(-LANES))

        def taking(size: int) -> Any:
            def step(index: Any, found: list[Any]) -> list[Any]:
                return [_larger(builder, load(builder, at(builder, address, index, 4), many(FLOAT, size)), found[0])]

            return step

        lanes = loop(builder, INDEX(0), whole, LANES, [_all(float("-inf"), LANES)], taking(LANES))[0]
        one = _halved(builder, lanes, lambda a, b: _larger(builder, a, b))
        return loop(builder, whole, count, 1, [one], taking(1))[0]

    return types.float32(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def exponentials(context: Any, address: Any, count: Any, scale: Any, largest: Any) -> Any:
    """Replace `count` float32 values x by e^(scale · x − largest). Returns their sum."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, count, scale, largest = arguments
        less, whole = builder.fneg(largest), builder.and_(count, INDEX(-LANES))

        def taking(size: int) -> Any:
            factor, offset = repeated(builder, scale, size), repeated(builder, less, size)

            def step(index: Any, sums: list[Any]) -> list[Any]:
                kind, place = many(FLOAT, size), at(builder, address, index, 4)
                made = exponential(builder, add_product(builder, offset, load(builder, place, kind), factor), size)
                builder.store(made, builder.inttoptr(place, kind.as_pointer()), align=4)
                return [builder.fadd(sums[0], made, flags=IN_ORDER)]

            return step

        lanes = loop(builder, INDEX(0), whole, LANES, [_all(0.0, LANES)], taking(LANES))[0]
        one = _halved(builder, lanes, lambda a, b: builder.fadd(a, b, flags=IN_ORDER))
        return loop(builder, whole, count, 1, [one], taking(1))[0]

    return types.float32(types.int64, types.int64, types.float32, types.float32), generate


def _of_widths(builder: Any, width: Any, widths: tuple[int, ...], emit: Any) -> None:
    """Emit code for values of so many bytes, or for values of 8 bits and of bfloat16, chosen by the bytes of a value.

    emit: a function of these bytes.
    """
    if len(widths) == 1:
        emit(*widths)
        return
    with builder.if_else(builder.icmp_signed("==", width, INDEX(1))) as (bytes_then, halves_then):
        with bytes_then:
            emit(1)
        with halves_then:
            emit(2)


def _floats_of_bytes(builder: Any, address: Any, size: int) -> Any:
    """Return `size` signed bytes as float32."""
    stored = builder.load(builder.inttoptr(address, many(BYTE, size).as_pointer()), align=1)
    return builder.sitofp(builder.sext(stored, many(INT, size)), many(FLOAT, size))


def _weigher(
    rows: int, weight_bytes: int, parts: int, lanes: int, vectors: int, taking: Any, widths: tuple[int, ...]
) -> Any:
    """Return a function of (address of P vectors, bytes of a value, values from one vector to the next, P, address of R rows
    of P weights, values from one row to the next, address of the results, stride).

    The function adds Σ_p weight_rp · vector_p, of `parts · lanes` values, to the float32 results of row r at `r · stride`,
    so many vectors at a time. taking: returns the body of that loop, whose sums are those of each part by row.
    """
    kind = many(FLOAT, lanes)

    def weigh(
        context: Any,
        x_PE: Any,
        width: Any,
        step: Any,
        count: Any,
        weights_RP: Any,
        weight_stride: Any,
        results: Any,
        stride: Any,
    ) -> Any:
        return types.void(*[types.int64] * 8), generate

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x_address, width, *others = arguments
        _of_widths(builder, width, widths, lambda own: emit(builder, x_address, own, others))
        return context.get_dummy_value()

    def emit(builder: Any, x_address: Any, width: int, others: list[Any]) -> None:
        step, count, weight_address, weight_stride, result_address, stride = others
        weight_rows = [at(builder, weight_address, builder.mul(weight_stride, INDEX(r)), weight_bytes) for r in range(rows)]
        places = [
            at(builder, result_address, builder.add(builder.mul(stride, INDEX(r)), INDEX(lanes * part)), 4)
            for part in range(parts)
            for r in range(rows)
        ]
        body = taking(builder, x_address, width, step, weight_rows)
        sums = loop(builder, INDEX(0), count, vectors, [load(builder, place, kind) for place in places], body)
        for place, total in zip(places, sums, strict=True):
            builder.store(total, builder.inttoptr(place, kind.as_pointer()), align=4)

    return intrinsic(weigh)


def weigh(rows: int, size: int) -> Any:
    """Return a weigher of `size` values with float32 weights, one vector at a time."""

    def taking(builder: Any, x_address: Any, width: int, step: Any, weight_rows: list[Any]) -> Any:
        def add(index: Any, sums: list[Any]) -> list[Any]:
            place = at(builder, x_address, builder.mul(index, step), width)
            x = _floats_of_bytes(builder, place, size) if width == 1 else widened(builder, place, size)
            weights = [repeated(builder, load(builder, at(builder, row, index, 4), FLOAT), size) for row in weight_rows]
            return [add_product(builder, total, weight, x) for total, weight in zip(sums, weights, strict=True)]

        return add

    return _weigher(rows, 4, 1, size, 1, taking, (1, 2))


def weigh_pairs(rows: int, parts: int, *, fetches: bool = True) -> Any:
    """Return a weigher of 32 · `parts` values of bfloat16 with bfloat16 weights, two vectors at a time.

    The number of vectors is even. fetches: whether it prefetches them.
    """
    shorts = ir.VectorType(SHORT, _WIDE)
    halves = [[lane // 2 + half + (_WIDE if lane % 2 else 0) for lane in range(_WIDE)] for half in (0, LANES)]
    places_of_pairs = [ir.Constant(ir.VectorType(INT, _WIDE), own) for own in halves]

    def pairs_of(builder: Any, places: list[Any]) -> list[Any]:
        """Return the pairs of the first 16 values of two vectors, and those of the next 16."""
        own = [load(builder, place, shorts) for place in places]
        return [builder.bitcast(builder.shuffle_vector(*own, mixed), INTS) for mixed in places_of_pairs]

    def taking(builder: Any, x_address: Any, width: int, step: Any, weight_rows: list[Any]) -> Any:
        def add(index: Any, sums: list[Any]) -> list[Any]:
            first = at(builder, x_address, builder.mul(index, step), width)
            second = at(builder, first, step, width)
            weights = [repeated(builder, load(builder, at(builder, row, index, 2), INT), LANES) for row in weight_rows]
            made: list[Any] = []
            for part in range(parts):
                places = [at(builder, vector, INDEX(_WIDE * part), width) for vector in (first, second)]
                if fetches:
                    for place in places:
                        fetch(builder, builder.add(place, INDEX(AHEAD[16])))
                for pairs in pairs_of(builder, places):
                    made += [add_pairs(builder, sums[len(made) + r], pairs, weights[r]) for r in range(rows)]
            return made

        return add

    return _weigher(rows, 2, 2 * parts, LANES, 2, taking, (2,))
