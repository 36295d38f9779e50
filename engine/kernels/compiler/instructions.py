"""LLVM instructions that several kernels are built from: loading, widening, loops, sums and prefetching.

Each function takes an LLVM builder and emits instructions. Addresses and indexes are LLVM values of 64 bits.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from engine.kernels.compiler.processor import (
    IS_ARM,
    LONG_VECTOR,
    MIXES_SIGNS,
    MULTIPLIES_INTEGERS,
    PREFETCHING,
    SECOND_LEVEL,
    SHIFTS_BYTES,
    WIDENS_HALVES,
)

LANES = 16
"""Number of float32 values in a vector register."""
FLOAT, BYTE, SHORT, INT, INDEX = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
FLOATS, INTS, SHORTS = ir.VectorType(FLOAT, LANES), ir.VectorType(INT, LANES), ir.VectorType(SHORT, LANES)
IN_ORDER = ("contract",)
"""Flags of operations whose order must stay. Operations without flags may be reordered (compiling.py), differently for each
number of rows of a product."""
LINE = 64
"""Bytes of a line of the caches."""
AHEAD = {32: 8192, 16: 8192, 8: 4096, 4: 8192, 3: 2048, 2: 2048}
"""Bytes that weights of so many bits are prefetched ahead; see `fetch_weights`."""


def fetch_weights(builder: Any, start: Any, size: int, ahead: int, vectors: tuple[int, Any]) -> None:
    """Prefetch the weights that lie `ahead` bytes after these `size` bytes of weights, as `PREFETCHING` says.

    Into the second-level cache they are prefetched from twice as far: it is larger. vectors: how many the weights are
    multiplied with, and the bytes of each.
    """

    def lines(cache: int | None) -> None:
        if cache is not None:
            distance = 2 * ahead if cache == SECOND_LEVEL else ahead
            for line in range(distance, distance + size, LINE):
                fetch(builder, builder.add(start, INDEX(line)), cache)

    count, vector_bytes = vectors
    if count > 1:
        lines(PREFETCHING.several)
    elif PREFETCHING.one_vector == PREFETCHING.one_long_vector:
        lines(PREFETCHING.one_vector)
    else:
        with builder.if_else(builder.icmp_signed(">", vector_bytes, INDEX(LONG_VECTOR))) as (long, short):
            with long:
                lines(PREFETCHING.one_long_vector)
            with short:
                lines(PREFETCHING.one_vector)


def fetch(builder: Any, address: Any, cache: int = SECOND_LEVEL) -> None:
    """Prefetch the memory at an address into a cache. An invalid address has no effect."""
    pointer = BYTE.as_pointer()
    prefetch = builder.module.declare_intrinsic(
        "llvm.prefetch", [pointer], ir.FunctionType(ir.VoidType(), [pointer, INT, INT, INT])
    )
    read, of_data = INT(0), INT(1)
    builder.call(prefetch, [builder.inttoptr(address, pointer), read, INT(cache), of_data])


def many(kind: Any, size: int) -> Any:
    """Return the type of a vector of `size` values, or the value's own type for a size of one."""
    return kind if size == 1 else ir.VectorType(kind, size)


def at(builder: Any, address: Any, index: Any, size: int) -> Any:
    """Return the address of the value numbered `index`, where each value takes `size` bytes."""
    return builder.add(address, builder.mul(index, INDEX(size)))


def load(builder: Any, address: Any, kind: Any) -> Any:
    """Load the value of this type at an aligned address."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=2)


def read(builder: Any, address: Any, kind: Any) -> Any:
    """Load the value of this type at any address."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def widened(builder: Any, address: Any, size: int) -> Any:
    """Return `size` bfloat16 values as float32. A bfloat16 is the upper half of a float32."""
    half = ir.Constant(many(INT, size), 16 if size == 1 else [16] * size)
    bits = builder.zext(load(builder, address, many(SHORT, size)), many(INT, size))
    return builder.bitcast(builder.shl(bits, half), many(FLOAT, size))


def wide_halves(builder: Any, bits: Any) -> Any:
    """Return float32 values of a vector of float16, which is given as its bits."""
    size = bits.type.count
    wide, numbers = ir.VectorType(FLOAT, size), ir.VectorType(INT, size)

    def every(value: int) -> Any:
        return ir.Constant(numbers, [value] * size)

    if WIDENS_HALVES:
        return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), size)), wide)
    given = builder.zext(bits, numbers)
    magnitude = builder.shl(builder.and_(given, every(0x7FFF)), every(13))
    # A float16 has 5 bits of exponent with a bias of 15, and a float32 8 bits with one of 127.
    value = builder.bitcast(builder.fmul(builder.bitcast(magnitude, wide), ir.Constant(wide, [2.0**112] * size)), numbers)
    endless = builder.icmp_unsigned(">=", magnitude, every(0x7C00 << 13))
    value = builder.select(endless, builder.or_(magnitude, every(0xFF << 23)), value)
    sign = builder.shl(builder.and_(given, every(0x8000)), every(16))
    return builder.bitcast(builder.or_(value, sign), wide)


def widened_halves(builder: Any, address: Any, size: int) -> Any:
    """Return `size` float16 values as float32."""
    wide = wide_halves(builder, load(builder, address, ir.VectorType(SHORT, size)))
    return builder.extract_element(wide, INT(0)) if size == 1 else wide


def unchanged(builder: Any, address: Any, size: int) -> Any:
    """Return `size` float32 values."""
    return load(builder, address, many(FLOAT, size))


def rounded(builder: Any, values: Any) -> Any:
    """Return 16 integers whose upper halves are the bfloat16 values nearest to 16 float32 values, with ties to even."""

    def each(value: int) -> Any:
        return ir.Constant(INTS, [value] * LANES)

    bits = builder.bitcast(values, INTS)
    odd = builder.and_(builder.lshr(bits, each(16)), each(1))
    return builder.add(builder.add(bits, each(0x7FFF)), odd)


def narrowed(builder: Any, values: Any) -> Any:
    """Return the bits of the bfloat16 values that are nearest to 16 float32 values, as `narrow`."""
    return builder.trunc(builder.lshr(rounded(builder, values), ir.Constant(INTS, [16] * LANES)), SHORTS)


def loop(builder: Any, start: Any, end: Any, step: int, values: list[Any], body: Any) -> list[Any]:
    """Emit values = body(index, values) for each index from `start`, a multiple of `step`, to `end`."""
    before = builder.block
    head, inside, after = (builder.append_basic_block(name) for name in ("head", "inside", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    index, carried = builder.phi(INDEX), [builder.phi(value.type) for value in values]
    builder.cbranch(builder.icmp_signed("<", index, end), inside, after)
    builder.position_at_end(inside)
    made = body(index, carried)
    following = builder.add(index, INDEX(step))
    for phi, first, later in zip([index, *carried], [start, *values], [following, *made], strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(later, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return carried


def in_fours(builder: Any, rows: Any, taking: Any) -> None:
    """Emit work on `rows` vectors: four at a time, then two, then one. taking: returns the body of the loop for a number."""
    fours, twos = (builder.and_(rows, INDEX(-vectors)) for vectors in (4, 2))
    loop(builder, INDEX(0), fours, 4, [], taking(4))
    loop(builder, fours, twos, 2, [], taking(2))
    loop(builder, twos, rows, 1, [], taking(1))


def add_halves(builder: Any, sums: list[Any], count: int) -> list[Any]:
    """Reduce the sums to `count` sums, by adding the second half of them to the first half as often as needed."""
    while len(sums) > count:
        half = len(sums) // 2
        sums = [builder.fadd(a, b, flags=IN_ORDER) for a, b in zip(sums[:half], sums[half:], strict=True)]
    return sums


def _merged(builder: Any, a: Any, b: Any, group: int) -> Any:
    """Halve the groups of so many lanes by adding their halves. The groups of a are followed by those of b."""

    def mixed(places: list[int]) -> Any:
        return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INT, len(places)), places))

    starts = range(0, 2 * LANES, group)
    lower = [start + lane for start in starts for lane in range(group // 2)]
    upper = [start + lane for start in starts for lane in range(group // 2, group)]
    return builder.fadd(mixed(lower), mixed(upper), flags=IN_ORDER)


def added_up(builder: Any, vectors: list[Any]) -> list[Any]:
    """Return the sum of each of up to 4 vectors. Halves are always added to halves; the vectors share the first steps."""
    four = [vectors[place % len(vectors)] for place in range(4)]
    first, second = _merged(builder, four[0], four[1], LANES), _merged(builder, four[2], four[3], LANES)
    fours = _merged(builder, first, second, LANES // 2)  # four lanes of each vector
    twos = _merged(builder, fours, fours, 4)
    ones = _merged(builder, twos, twos, 2)
    return [builder.extract_element(ones, INT(place)) for place in range(len(vectors))]


def parts(builder: Any, index: Any, divisor: int, factor: int = 1) -> Any:
    """Return index · factor / divisor, which has no remainder."""
    return builder.udiv(builder.mul(index, INDEX(factor)), INDEX(divisor))


def same(kind: Any, value: float) -> Any:
    """Return a vector constant of this type that repeats a value."""
    return ir.Constant(kind, [value] * kind.count)


def taken(builder: Any, values: Any, places: list[int]) -> Any:
    """Return the values of a vector at these places."""
    return builder.shuffle_vector(values, values, ir.Constant(ir.VectorType(INT, len(places)), places))


def spread(builder: Any, values: Any, first: int, times: int, size: int) -> Any:
    """Return a vector of the values from `first` on, each repeated `times` times."""
    return taken(builder, values, [first + lane // times for lane in range(size)])


def in_lanes(builder: Any, values: Any) -> Any:
    """Return a register of 16 float32 that begins with these values, and is zero behind them."""
    if values.type.count == LANES:
        return values
    nothing = ir.Constant(values.type, [0.0] * values.type.count)
    places = [min(lane, values.type.count) for lane in range(LANES)]
    return builder.shuffle_vector(values, nothing, ir.Constant(ir.VectorType(INT, LANES), places))


def repeated(builder: Any, value: Any, size: int) -> Any:
    """Return a vector that repeats one value."""
    if size == 1:
        return value
    one = builder.insert_element(ir.Constant(many(value.type, size), ir.Undefined), value, INT(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(INT, size), [0] * size))


def add_product(builder: Any, total: Any, a: Any, b: Any) -> Any:
    """Return total + a · b, rounded once where the processor has a fused multiply-add."""
    return builder.fadd(total, builder.fmul(a, b, flags=IN_ORDER), flags=IN_ORDER)


def add_pairs(builder: Any, total: Any, a: Any, b: Any) -> Any:
    """Return total + the products of pairs of bfloat16 (AVX512-BF16, or BFDOT of ARM). Each lane gets the sum of two."""
    if IS_ARM:
        return _by_fours(builder, "bfdot.v4f32.v8bf16", ir.VectorType(_BFloat(), 8), total, a, b)
    dot = ir.FunctionType(FLOATS, [FLOATS, INTS, INTS])
    return builder.asm(dot, "vdpbf16ps $3, $2, $0", "=v,0,v,v", [total, a, b], False)


def add_quadruples(builder: Any, total: Any, unsigned: Any, signed: Any, lanes: Any) -> Any:
    """Return total + the products of bytes (AVX512-VNNI, or dot products of ARM): in each lane, the sum of four."""
    if MIXES_SIGNS:
        return _by_fours(builder, "usdot.v4i32.v16i8", ir.VectorType(BYTE, 16), total, unsigned, signed)
    if IS_ARM:  # u · s = (u − 128) · s + 64 · s + 64 · s, where all factors are signed bytes
        moved = builder.xor(unsigned, ir.Constant(lanes, [-0x7F7F7F80] * lanes.count))
        half = ir.Constant(lanes, [0x40404040] * lanes.count)
        for factor in (moved, half, half):
            total = _by_fours(builder, "sdot.v4i32.v16i8", ir.VectorType(BYTE, 16), total, factor, signed)
        return total
    dot = ir.FunctionType(lanes, [lanes] * 3)
    return builder.asm(dot, "vpdpbusd $3, $2, $0", "=v,0,v,v", [total, unsigned, signed], False)


def looked_up(builder: Any, codes: Any, table: list[int]) -> Any:
    """Return the byte of a table of 16 bytes at the place in the low four bits of each byte."""
    kind, size = codes.type, codes.type.count
    if SHIFTS_BYTES:  # the instruction ignores the bits above those of places, and the table repeats itself
        places = ir.Constant(kind, table * (size // 16))
        return builder.asm(ir.FunctionType(kind, [kind] * 2), "vpermb $1, $2, $0", "=v,v,v", [places, codes], False)
    low, made, each = builder.and_(codes, same(kind, 15)), [], 16 if IS_ARM else min(size, 32)
    if not MULTIPLIES_INTEGERS and not IS_ARM:  # there is no instruction for it
        found = same(kind, 0)
        for place, value in enumerate(table):
            found = builder.select(builder.icmp_unsigned("==", low, same(kind, place)), same(kind, value), found)
        return found
    own = ir.VectorType(BYTE, each)
    places, look_up = ir.Constant(own, table * (each // 16)), ir.FunctionType(own, [own] * 2)
    for (part,) in cut(builder, each, low):
        if IS_ARM:
            name = "llvm.aarch64.neon.tbl1.v16i8"
            function = builder.module.globals.get(name) or ir.Function(builder.module, look_up, name)
            made.append(builder.call(function, [places, part]))
        else:
            made.append(builder.asm(look_up, "vpshufb $2, $1, $0", "=x,x,x", [places, part], False))
    return joined(builder, made)


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's type of a bfloat16, which llvmlite has no class for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self))

    def __hash__(self) -> int:
        return hash(type(self))


def _by_fours(builder: Any, instruction: str, taken: Any, total: Any, a: Any, b: Any) -> Any:
    """Return what an instruction of ARM makes of each four lanes of 32 bits: of those of `total`, a and b.

    taken: the type that it takes for those of a and b.
    """
    made, name = [], f"llvm.aarch64.neon.{instruction}"
    for part, *factors in cut(builder, 4, total, a, b):
        kind = ir.FunctionType(part.type, [part.type, taken, taken])
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        made.append(builder.call(function, [part, *(builder.bitcast(factor, taken) for factor in factors)]))
    return joined(builder, made)


def cut(builder: Any, size: int, *vectors: Any) -> list[tuple[Any, ...]]:
    """Return parts of `size` numbers of each vector."""
    starts = range(0, vectors[0].type.count, size)
    places = [ir.Constant(ir.VectorType(INT, size), [*range(first, first + size)]) for first in starts]
    return [tuple(builder.shuffle_vector(each, each, place) for each in vectors) for place in places]


def joined(builder: Any, vectors: list[Any]) -> Any:
    """Return one vector of the numbers of 1, 2, 4, … vectors."""
    while len(vectors) > 1:
        places = ir.Constant(ir.VectorType(INT, 2 * vectors[0].type.count), [*range(2 * vectors[0].type.count)])
        vectors = [builder.shuffle_vector(*pair, places) for pair in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


def pairs_of_words(builder: Any, a: Any, b: Any) -> Any:
    """Return the products of 16 pairs of integers of 16 bits, added up two by two: eight sums (AVX2)."""
    return _avx2(builder, "vpmaddwd", ir.VectorType(INT, 8), a, b)


def pairs_of_bytes(builder: Any, unsigned: Any, signed: Any) -> Any:
    """Return the products of 32 pairs of bytes, added up two by two: 16 sums of 16 bits, which saturate (AVX2)."""
    return _avx2(builder, "vpmaddubsw", ir.VectorType(SHORT, 16), unsigned, signed)


def _avx2(builder: Any, instruction: str, made: Any, a: Any, b: Any) -> Any:
    function = ir.FunctionType(made, [a.type, b.type])
    return builder.asm(function, f"{instruction} $2, $1, $0", "=x,x,x", [a, b], False)
