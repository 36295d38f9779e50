"""LLVM instructions of attention: products of keys and queries, the softmax of scores, and sums of weighted values.

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
    FLOATS,
    IN_ORDER,
    INDEX,
    INT,
    INTS,
    LANES,
    SHORT,
    SHORTS,
    add_pairs,
    add_product,
    added_up,
    added_up_in_lanes,
    at,
    fetch,
    joined,
    load,
    loop,
    many,
    repeated,
    widened,
)
from engine.kernels.compiler.processor import IS_ARM, MULTIPLIES_BFLOAT16

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


def _of_either_width(builder: Any, width: Any, emit: Any) -> None:
    """Emit code for values of 8 bits and of bfloat16, chosen by the bytes of a value. emit: a function of these bytes."""
    with builder.if_else(builder.icmp_signed("==", width, INDEX(1))) as (bytes_then, halves_then):
        with bytes_then:
            emit(1)
        with halves_then:
            emit(2)


def _floats_of_bytes(builder: Any, address: Any, size: int) -> Any:
    """Return `size` signed bytes as float32."""
    stored = builder.load(builder.inttoptr(address, many(BYTE, size).as_pointer()), align=1)
    return builder.sitofp(builder.sext(stored, many(INT, size)), many(FLOAT, size))


def _paired(builder: Any, low: Any, high: Any) -> Any:
    """Return pairs of bfloat16 of two vectors of float32, whose values bfloat16 holds exactly."""
    half = ir.Constant(INTS, [16] * LANES)
    return builder.or_(builder.lshr(builder.bitcast(low, INTS), half), builder.bitcast(high, INTS))


def _neighbors(builder: Any, address: Any) -> Any:
    """Return 32 signed bytes as pairs of bfloat16, each value and the next one."""
    low, high = (_floats_of_bytes(builder, builder.add(address, INDEX(half)), LANES) for half in (0, LANES))
    if IS_ARM:
        upper = (builder.lshr(builder.bitcast(half, INTS), ir.Constant(INTS, [16] * LANES)) for half in (low, high))
        return builder.bitcast(joined(builder, [builder.trunc(half, SHORTS) for half in upper]), INTS)
    narrowed = ir.FunctionType(INTS, [FLOATS, FLOATS])
    return builder.asm(narrowed, "vcvtne2ps2bf16 $1, $2, $0", "=v,v,v", [low, high], False)


@intrinsic  # type: ignore[untyped-decorator]
def widen_integers(context: Any, address: Any, count: Any, target: Any) -> Any:
    """Write `count` signed bytes as bfloat16 to the target, where the processor multiplies pairs of these.

    The count is a multiple of 32.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, count, target = arguments
        if not MULTIPLIES_BFLOAT16:  # no kernel comes here, but LLVM would have to know the instruction
            return context.get_dummy_value()

        def step(index: Any, _: list[Any]) -> list[Any]:
            fetch(builder, builder.add(builder.add(address, index), INDEX(AHEAD[8])))
            place = builder.inttoptr(at(builder, target, index, 2), INTS.as_pointer())
            builder.store(_neighbors(builder, builder.add(address, index)), place, align=2)
            return []

        loop(builder, INDEX(0), count, _WIDE, [], step)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


@intrinsic  # type: ignore[untyped-decorator]
def fetch_bytes(context: Any, address: Any, count: Any) -> Any:
    """Prefetch `count` bytes at an address, in steps of 256."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, count = arguments

        def step(index: Any, _: list[Any]) -> list[Any]:
            for line in range(0, 256, 64):
                fetch(builder, builder.add(builder.add(address, index), INDEX(line)), kept=True)
            return []

        loop(builder, INDEX(0), count, 256, [], step)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 2), generate


def scores_tile(keys: int, queries: int, *, fetches: bool = False) -> Any:
    """Return a function of (address of keys, address of bfloat16 queries, their size E, the same of more keys and queries,
    bytes of a number of a key, address of the results, stride).

    The product of key k and query r goes to place `k + r · stride` of the float32 results; the products of more keys and
    queries are added to it. E is a multiple of 32, and may be 0 for the further ones. Every tile adds up a product in the
    same order. fetches: whether the tile prefetches the keys.
    """

    def tile(
        context: Any,
        keys_KE: Any,
        queries_RE: Any,
        size: Any,
        more_keys_KE: Any,
        more_queries_RE: Any,
        more_size: Any,
        width: Any,
        results: Any,
        stride: Any,
    ) -> Any:
        return types.void(*[types.int64] * 9), generate

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first, more, (width, *to) = arguments[:3], arguments[3:6], arguments[6:]
        _of_either_width(builder, width, lambda own: emit(builder, (first, more), own, *to))
        return context.get_dummy_value()

    def added(builder: Any, sums: list[Any], given: Any, width: int) -> list[Any]:
        key_address, query_address, size = given
        key_rows = [at(builder, key_address, builder.mul(size, INDEX(k)), width) for k in range(keys)]
        query_rows = [at(builder, query_address, builder.mul(size, INDEX(r)), 2) for r in range(queries)]

        def dots(index: Any, sums: list[Any]) -> list[Any]:
            queries_R = [load(builder, at(builder, row, index, 2), INTS) for row in query_rows]
            made: list[Any] = [None] * len(sums)
            for k, row in enumerate(key_rows):
                place = at(builder, row, index, width)
                if fetches:
                    fetch(builder, builder.add(place, INDEX(AHEAD[16])), kept=True)
                key = _neighbors(builder, place) if width == 1 else load(builder, place, INTS)
                for r, query in enumerate(queries_R):
                    made[r * keys + k] = add_pairs(builder, sums[r * keys + k], key, query)
            return made

        return loop(builder, INDEX(0), size, _WIDE, sums, dots)

    def emit(builder: Any, parts: Any, width: int, result_address: Any, stride: Any) -> None:
        sums = [_all(0.0, LANES)] * (keys * queries)
        for given in parts:
            sums = added(builder, sums, given, width)
        if keys * queries == 1:
            (total,) = added_up(builder, sums)
            builder.store(total, builder.inttoptr(result_address, FLOAT.as_pointer()), align=4)
            return
        totals, kind = added_up_in_lanes(builder, sums), many(FLOAT, keys)
        for r in range(queries):
            lanes = ir.Constant(ir.VectorType(INT, keys), list(range(r * keys, (r + 1) * keys)))
            place = at(builder, result_address, builder.mul(stride, INDEX(r)), 4)
            own = builder.shuffle_vector(totals, totals, lanes)
            builder.store(own, builder.inttoptr(place, kind.as_pointer()), align=4)

    return intrinsic(tile)


def _weigher(rows: int, weight_bytes: int, parts: int, lanes: int, vectors: int, taking: Any) -> Any:
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
        _of_either_width(builder, width, lambda own: emit(builder, x_address, own, others))
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

    return _weigher(rows, 4, 1, size, 1, taking)


def weigh_pairs(rows: int, parts: int, *, fetches: bool = True) -> Any:
    """Return a weigher of 32 · `parts` values with bfloat16 weights, two vectors at a time: their number is even.

    fetches: whether it prefetches the vectors.
    """
    shorts = ir.VectorType(SHORT, _WIDE)
    halves = [[lane // 2 + half + (_WIDE if lane % 2 else 0) for lane in range(_WIDE)] for half in (0, LANES)]
    places_of_pairs = [ir.Constant(ir.VectorType(INT, _WIDE), own) for own in halves]

    def pairs_of(builder: Any, places: list[Any], width: int) -> list[Any]:
        """Return the pairs of the first 16 values of two vectors, and those of the next 16."""
        if width == 1:
            each = [
                [_floats_of_bytes(builder, builder.add(place, INDEX(half)), LANES) for place in places]
                for half in (0, LANES)
            ]
            return [_paired(builder, *both) for both in each]
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
                        fetch(builder, builder.add(place, INDEX(AHEAD[16])), kept=True)
                for pairs in pairs_of(builder, places, width):
                    made += [add_pairs(builder, sums[len(made) + r], pairs, weights[r]) for r in range(rows)]
            return made

        return add

    return _weigher(rows, 2, 2 * parts, LANES, 2, taking)
