"""Blocks of GGUF's quantized types as instructions: the numbers of a block as integers, with their scales.

A weight is scale · (stored − offset) + least. `Group` describes consecutive runs of 32 weights, which several kernels
multiply (block_products.py). Layouts: github.com/ggml-org/ggml, `block_*` in src/ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from engine.kernels.compiler.instructions import (
    BYTE,
    FLOAT,
    IN_ORDER,
    INDEX,
    INT,
    SHORT,
    load,
    looked_up,
    many,
    read,
    wide_halves,
)

RUN = 32
"""Number of weights that are unpacked together."""
BYTES = ir.VectorType(BYTE, RUN)
OFFSET_OF_E2M1 = 12
BYTES_OF_E2M1 = [number + OFFSET_OF_E2M1 for number in (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)]
"""Twice the number of each code of E2M1, plus the offset."""
_LEVELS = [level + 128 for level in (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)]
"""The level of each code of IQ4_NL and IQ4_XS, plus 128."""


@dataclass(frozen=True)
class Group:
    """The weights of one step of a product, as LLVM values."""

    stored: list[Any]
    """Unsigned bytes of each run of 32 weights."""
    scales: Any
    """Float32 scales: one for each run, or two for each run, of 16 weights each."""
    leasts: Any = None
    """Float32 values that are added to the weights of each run, or two for each run as with scales; None for zeros."""


@dataclass(frozen=True)
class BlockKind:
    """One type of blocks."""

    name: str
    numbers: int
    """Weights of a block."""
    bytes: int
    """Bytes of a block."""
    offset: int
    blocks: int
    """Number of blocks in one step of a product, if a row has so many left."""
    unpacked: Callable[[Any, Any, int], Group]
    """Returns the group of consecutive blocks, given a builder, the first block's address and the number of blocks."""
    halves: bool = False
    """Whether each 16 weights have their own scale."""
    are_small: bool = True
    """Whether two products of stored bytes and signed ones always fit in 16 bits."""

    @property
    def key(self) -> str:
        """The type's name in names of kernels."""
        return self.name.lower()


def _place(builder: Any, address: Any, offset: int) -> Any:
    return builder.add(address, INDEX(offset))


def _same(kind: Any, value: int) -> Any:
    """Return a vector constant that repeats a value."""
    return ir.Constant(kind, [value] * kind.count)


def vector_of(builder: Any, values: list[Any]) -> Any:
    """Return a vector of these values."""
    made = ir.Constant(ir.VectorType(values[0].type, len(values)), ir.Undefined)
    for place, value in enumerate(values):
        made = builder.insert_element(made, value, INT(place))
    return made


def every(builder: Any, value: Any, size: int) -> Any:
    """Return a vector that repeats one value."""
    kind = ir.VectorType(value.type, size)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, INT(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(INT, size), [0] * size))


def joined(builder: Any, first: Any, second: Any) -> Any:
    """Return the values of two equal vectors one after the other."""
    size = 2 * first.type.count
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(INT, size), [*range(size)]))


def taken(builder: Any, values: Any, places: list[int]) -> Any:
    """Return the values of a vector at these places."""
    return builder.shuffle_vector(values, values, ir.Constant(ir.VectorType(INT, len(places)), places))


def _halves_at(builder: Any, addresses: list[Any], count: int) -> Any:
    """Return `count` float16 at each of these addresses as float32, one address after the other."""
    kind = SHORT if count == 1 else INT
    read = vector_of(builder, [load(builder, address, kind) for address in addresses])
    return wide_halves(builder, builder.bitcast(read, ir.VectorType(SHORT, count * len(addresses))))


def _nibbles(builder: Any, data: Any) -> tuple[Any, Any]:
    """Return the low and the high four bits of bytes."""
    pairs = ir.VectorType(SHORT, data.type.count // 2)
    upper = builder.bitcast(builder.lshr(builder.bitcast(data, pairs), _same(pairs, 4)), data.type)
    low = _same(data.type, 15)
    return builder.and_(data, low), builder.and_(upper, low)


def _run_of_nibbles(builder: Any, address: Any) -> Any:
    """Return 32 numbers of four bits: the low bits of 16 bytes, and then the high ones."""
    return joined(builder, *_nibbles(builder, load(builder, address, many(BYTE, 16))))


def _q8_0(builder: Any, address: Any, blocks: int) -> Group:
    places = [_place(builder, address, 34 * block) for block in range(blocks)]
    signed = [load(builder, _place(builder, place, 2), BYTES) for place in places]
    stored = [builder.xor(each, _same(BYTES, 0x80)) for each in signed]
    return Group(stored, _halves_at(builder, places, 1))


def _q4_0(builder: Any, address: Any, blocks: int) -> Group:
    places = [_place(builder, address, 18 * block) for block in range(blocks)]
    stored = [_run_of_nibbles(builder, _place(builder, place, 2)) for place in places]
    return Group(stored, _halves_at(builder, places, 1))


def _q4_1(builder: Any, address: Any, blocks: int) -> Group:
    places = [_place(builder, address, 20 * block) for block in range(blocks)]
    stored = [_run_of_nibbles(builder, _place(builder, place, 4)) for place in places]
    both = _halves_at(builder, places, 2)
    even, odd = ([*range(first, 2 * blocks, 2)] for first in (0, 1))
    return Group(stored, taken(builder, both, even), taken(builder, both, odd))


def _fifth_bits(builder: Any, address: Any) -> Any:
    """Return 32 bytes, 16 where the bit of the number's place is set, else 0."""
    bits = builder.bitcast(load(builder, address, INT), many(ir.IntType(1), RUN))
    return builder.select(bits, _same(BYTES, 16), _same(BYTES, 0))


def _five_bits(builder: Any, place: Any, first: int) -> Any:
    """Return 32 numbers of five bits: four bytes with their highest bits, and a run of nibbles."""
    low = _run_of_nibbles(builder, _place(builder, place, first + 4))
    return builder.or_(low, _fifth_bits(builder, _place(builder, place, first)))


def _q5_0(builder: Any, address: Any, blocks: int) -> Group:
    places = [_place(builder, address, 22 * block) for block in range(blocks)]
    return Group([_five_bits(builder, place, 2) for place in places], _halves_at(builder, places, 1))


def _q5_1(builder: Any, address: Any, blocks: int) -> Group:
    places = [_place(builder, address, 24 * block) for block in range(blocks)]
    both = _halves_at(builder, places, 2)
    even, odd = ([*range(first, 2 * blocks, 2)] for first in (0, 1))
    stored = [_five_bits(builder, place, 4) for place in places]
    return Group(stored, taken(builder, both, even), taken(builder, both, odd))


def _iq4_nl(builder: Any, address: Any, blocks: int) -> Group:
    places = [_place(builder, address, 18 * block) for block in range(blocks)]
    codes = [_run_of_nibbles(builder, _place(builder, place, 2)) for place in places]
    return Group([looked_up(builder, each, _LEVELS) for each in codes], _halves_at(builder, places, 1))


def _mxfp4(builder: Any, address: Any, blocks: int) -> Group:
    """A scale is 2 to the power of its byte minus 128, because the numbers are doubled."""
    places = [_place(builder, address, 17 * block) for block in range(blocks)]
    codes = [_run_of_nibbles(builder, _place(builder, place, 1)) for place in places]
    data = read(builder, address, ir.VectorType(BYTE, 16 * blocks))
    bytes_ = builder.zext(taken(builder, data, [17 * block for block in range(blocks)]), ir.VectorType(INT, blocks))
    power = builder.shl(builder.sub(bytes_, _same(bytes_.type, 1)), _same(bytes_.type, 23))
    small = builder.shl(_same(bytes_.type, 1 << 21), bytes_)  # the exponents of float32 begin at 2^-126
    power = builder.select(builder.icmp_unsigned("<", bytes_, _same(bytes_.type, 2)), small, power)
    scales = builder.bitcast(power, ir.VectorType(FLOAT, blocks))
    return Group([looked_up(builder, each, BYTES_OF_E2M1) for each in codes], scales)


def _q4_k(builder: Any, address: Any, blocks: int) -> Group:
    assert blocks == 1
    scales, leasts = _eight_scales(builder, address)
    stored: list[Any] = []
    for part in range(4):
        stored += _nibbles(builder, load(builder, _place(builder, address, 16 + 32 * part), BYTES))
    return Group(stored, scales, leasts)


def _q5_k(builder: Any, address: Any, blocks: int) -> Group:
    assert blocks == 1
    scales, leasts = _eight_scales(builder, address)
    high, stored = load(builder, _place(builder, address, 16), BYTES), list[Any]()
    for part in range(4):
        stored += _nibbles(builder, load(builder, _place(builder, address, 48 + 32 * part), BYTES))
    return Group([builder.or_(low, _bits(builder, high, run, 4, 1)) for run, low in enumerate(stored)], scales, leasts)


def _eight_scales(builder: Any, address: Any) -> tuple[Any, Any]:
    """Return the scales and the leasts of a block's eight runs: two float16, and then six bits for each."""
    both = _halves_at(builder, [address], 2)
    first, second, rest = (load(builder, _place(builder, address, 4 + 4 * word), INT) for word in range(3))

    def bits(value: Any, shift: int, mask: int) -> Any:
        return builder.and_(builder.lshr(value, INT(shift)), INT(mask * 0x01010101))

    def six(low: Any, shift: int, high: Any) -> Any:
        return builder.or_(bits(low, shift, 15), builder.shl(bits(high, 6, 3), INT(4)))

    words = [bits(first, 0, 63), six(rest, 0, first), bits(second, 0, 63), six(rest, 4, second)]
    numbers = builder.bitcast(vector_of(builder, words), ir.VectorType(BYTE, 16))
    scales, leasts = (
        builder.uitofp(taken(builder, numbers, [*range(start, start + 8)]), ir.VectorType(FLOAT, 8)) for start in (0, 8)
    )
    d, least = (every(builder, builder.extract_element(both, INT(place)), 8) for place in (0, 1))
    added = builder.fneg(builder.fmul(least, leasts, flags=IN_ORDER), flags=IN_ORDER)
    return builder.fmul(d, scales, flags=IN_ORDER), added


def _bits(builder: Any, data: Any, first: int, to: int, count: int) -> Any:
    """Return `count` bits of each byte from bit `first` on, as its bits from `to` on."""
    shorts = ir.VectorType(SHORT, data.type.count // 2)
    turned, by = builder.bitcast(data, shorts), _same(shorts, abs(to - first))
    turned = builder.shl(turned, by) if to > first else builder.lshr(turned, by)
    return builder.and_(builder.bitcast(turned, data.type), _same(data.type, ((1 << count) - 1) << to))


def _sixteen_scales(builder: Any, place: Any, numbers: Any) -> Any:
    """Return the float16 at an address times 16 numbers, of type float32."""
    d = builder.extract_element(_halves_at(builder, [place], 1), INT(0))
    return builder.fmul(every(builder, d, 16), numbers, flags=IN_ORDER)


def _q2_k(builder: Any, address: Any, blocks: int) -> Group:
    assert blocks == 1
    wide = ir.VectorType(FLOAT, 16)
    both = _nibbles(builder, load(builder, address, many(BYTE, 16)))
    scales, leasts = (
        _sixteen_scales(builder, _place(builder, address, place), builder.uitofp(each, wide))
        for place, each in zip((80, 82), both, strict=True)
    )
    parts = [load(builder, _place(builder, address, 16 + 32 * half), BYTES) for half in range(2)]
    stored = [_bits(builder, part, 2 * plane, 0, 2) for part in parts for plane in range(4)]
    return Group(stored, scales, builder.fneg(leasts, flags=IN_ORDER))


def _q3_k(builder: Any, address: Any, blocks: int) -> Group:
    assert blocks == 1
    low = joined(builder, *_nibbles(builder, load(builder, _place(builder, address, 96), many(BYTE, 8))))
    four = load(builder, _place(builder, address, 104), many(BYTE, 4))
    pairs = [_bits(builder, four, 2 * plane, 4, 2) for plane in range(4)]
    upper = joined(builder, *(joined(builder, *pairs[first : first + 2]) for first in (0, 2)))
    six = builder.sub(builder.or_(low, upper), _same(low.type, 32))
    scales = _sixteen_scales(builder, _place(builder, address, 108), builder.sitofp(six, ir.VectorType(FLOAT, 16)))
    high = load(builder, address, BYTES)
    parts = [load(builder, _place(builder, address, 32 + 32 * half), BYTES) for half in range(2)]
    stored = [_bits(builder, part, 2 * plane, 0, 2) for part in parts for plane in range(4)]
    return Group([builder.or_(low, _bits(builder, high, run, 2, 1)) for run, low in enumerate(stored)], scales)


def _iq4_xs(builder: Any, address: Any, blocks: int) -> Group:
    assert blocks == 1
    d = _halves_at(builder, [address], 1)
    upper = load(builder, _place(builder, address, 2), SHORT)
    lower = load(builder, _place(builder, address, 4), INT)
    eight = ir.VectorType(INT, 8)
    shifts = ir.Constant(eight, [2 * run for run in range(8)])
    high = builder.and_(builder.lshr(every(builder, builder.zext(upper, INT), 8), shifts), _same(eight, 3))
    shifts = ir.Constant(eight, [4 * run for run in range(8)])
    low = builder.and_(builder.lshr(every(builder, lower, 8), shifts), _same(eight, 15))
    six = builder.sub(builder.or_(low, builder.shl(high, _same(eight, 4))), _same(eight, 32))
    scales = builder.sitofp(six, ir.VectorType(FLOAT, 8))
    scales = builder.fmul(every(builder, builder.extract_element(d, INT(0)), 8), scales, flags=IN_ORDER)
    codes = [_run_of_nibbles(builder, _place(builder, address, 8 + 16 * run)) for run in range(8)]
    return Group([looked_up(builder, each, _LEVELS) for each in codes], scales)


def _q6_k(builder: Any, address: Any, blocks: int) -> Group:
    assert blocks == 1
    scales = builder.sitofp(load(builder, _place(builder, address, 192), many(BYTE, 16)), ir.VectorType(FLOAT, 16))
    scales = _sixteen_scales(builder, _place(builder, address, 208), scales)
    stored: list[Any] = []
    for half in range(2):
        low = [load(builder, _place(builder, address, 64 * half + 32 * part), BYTES) for part in range(2)]
        high = load(builder, _place(builder, address, 128 + 32 * half), BYTES)
        lower = [_nibbles(builder, each) for each in low]
        for plane in range(4):
            stored.append(builder.or_(lower[plane % 2][plane // 2], _bits(builder, high, 2 * plane, 4, 2)))
    return Group(stored, scales)


BLOCK_KINDS = {
    kind.name: kind
    for kind in (
        BlockKind("Q8_0", 32, 34, 128, 4, _q8_0, are_small=False),
        BlockKind("Q4_0", 32, 18, 8, 4, _q4_0),
        BlockKind("Q4_1", 32, 20, 0, 4, _q4_1),
        BlockKind("Q5_0", 32, 22, 16, 4, _q5_0),
        BlockKind("Q5_1", 32, 24, 0, 4, _q5_1),
        BlockKind("IQ4_NL", 32, 18, 128, 4, _iq4_nl, are_small=False),
        BlockKind("MXFP4_BLOCKS", 32, 17, OFFSET_OF_E2M1, 4, _mxfp4),
        BlockKind("Q2_K", 256, 84, 0, 1, _q2_k, halves=True),
        BlockKind("Q3_K", 256, 110, 4, 1, _q3_k, halves=True),
        BlockKind("Q4_K", 256, 144, 0, 1, _q4_k),
        BlockKind("Q5_K", 256, 176, 0, 1, _q5_k),
        BlockKind("Q6_K", 256, 210, 32, 1, _q6_k, halves=True),
        BlockKind("IQ4_XS", 256, 136, 128, 1, _iq4_xs, are_small=False),
    )
}
"""The types that products read as they are stored, by name."""
