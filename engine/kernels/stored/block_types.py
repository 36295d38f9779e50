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
    joined,
    load,
    looked_up,
    many,
    read,
    repeated,
    same,
    taken,
    wide_halves,
)
from engine.kernels.stored.code_levels import DOUBLED, IQ4

RUN = 32
"""Number of weights that are unpacked together."""
BYTES = ir.VectorType(BYTE, RUN)
OFFSET_OF_E2M1 = 12
BYTES_OF_E2M1 = [number + OFFSET_OF_E2M1 for number in DOUBLED]
"""Twice the number of each code of E2M1, plus the offset."""
_LEVELS = [level + 128 for level in IQ4]
"""The level of each code of IQ4_NL and IQ4_XS, plus 128."""


@dataclass(frozen=True)
class Group:
    """The weights of one step of a product, as LLVM values."""

    stored: list[Any]
    """Unsigned bytes of the weights: two runs of 32 in a register, or a single one."""
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


def vector_of(builder: Any, values: list[Any]) -> Any:
    """Return a vector of these values."""
    made = ir.Constant(ir.VectorType(values[0].type, len(values)), ir.Undefined)
    for place, value in enumerate(values):
        made = builder.insert_element(made, value, INT(place))
    return made


def _halves_at(builder: Any, addresses: list[Any], count: int) -> Any:
    """Return `count` float16 at each of these addresses as float32, one address after the other."""
    kind = SHORT if count == 1 else INT
    read = vector_of(builder, [load(builder, address, kind) for address in addresses])
    return wide_halves(builder, builder.bitcast(read, ir.VectorType(SHORT, count * len(addresses))))


def _planes(builder: Any, data: Any, firsts: tuple[int, ...], count: int, to: int = 0) -> Any:
    """Return copies of some bytes one after another: in each, `count` bits from the bit of its place in `firsts` on, as the
    bits from `to` on. All bits move in one direction.
    """
    size = data.type.count
    shorts = ir.VectorType(SHORT, size * len(firsts) // 2)
    copies = taken(builder, data, [*range(size)] * len(firsts)) if len(firsts) > 1 else data
    by = ir.Constant(shorts, [abs(to - first) for first in firsts for _ in range(size // 2)])
    moved = (builder.shl if to > min(firsts) else builder.lshr)(builder.bitcast(copies, shorts), by)
    return builder.and_(builder.bitcast(moved, copies.type), same(copies.type, ((1 << count) - 1) << to))


def _runs_of_nibbles(builder: Any, addresses: list[Any]) -> list[Any]:
    """Return numbers of four bits, two runs in a register, or one if there is one address.

    A run is the low bits of the 16 bytes at an address, and then their high ones.
    """
    read = [load(builder, address, many(BYTE, 16)) for address in addresses]
    if len(read) == 1:
        return [_planes(builder, read[0], (0, 4), 4)]
    made = []
    for both in zip(read[::2], read[1::2], strict=True):
        first, second = ([*range(start, start + 16)] for start in (0, 16))
        copies = taken(builder, joined(builder, [*both]), [*first, *first, *second, *second])
        shorts = ir.VectorType(SHORT, RUN)
        moved = builder.lshr(builder.bitcast(copies, shorts), ir.Constant(shorts, ([0] * 8 + [4] * 8) * 2))
        made.append(builder.and_(builder.bitcast(moved, copies.type), same(copies.type, 15)))
    return made


def _in_pairs(builder: Any, values: list[Any]) -> list[Any]:
    """Return each two vectors as one; a single one as it is."""
    pairs = zip(values[::2], values[1::2], strict=True)
    return values if len(values) == 1 else [joined(builder, [*both]) for both in pairs]


def _q8_0(builder: Any, address: Any, blocks: int) -> Group:
    places = [_place(builder, address, 34 * block) for block in range(blocks)]
    signed = _in_pairs(builder, [load(builder, _place(builder, place, 2), BYTES) for place in places])
    return Group([builder.xor(each, same(each.type, 0x80)) for each in signed], _halves_at(builder, places, 1))


def _q4_0(builder: Any, address: Any, blocks: int) -> Group:
    places = [_place(builder, address, 18 * block) for block in range(blocks)]
    return Group(_runs_of_nibbles(builder, [_place(builder, each, 2) for each in places]), _halves_at(builder, places, 1))


def _q4_1(builder: Any, address: Any, blocks: int) -> Group:
    places = [_place(builder, address, 20 * block) for block in range(blocks)]
    stored = _runs_of_nibbles(builder, [_place(builder, each, 4) for each in places])
    return Group(stored, *_scale_and_least(builder, places))


def _scale_and_least(builder: Any, places: list[Any]) -> tuple[Any, Any]:
    """Return the first float16 at each place, and the second ones."""
    both = _halves_at(builder, places, 2)
    even, odd = ([*range(first, 2 * len(places), 2)] for first in (0, 1))
    return taken(builder, both, even), taken(builder, both, odd)


def _runs_of_five_bits(builder: Any, places: list[Any]) -> list[Any]:
    """Return numbers of five bits: at each place are four bytes with the highest bits, and 16 with the others."""
    words, made = [load(builder, place, many(BYTE, 4)) for place in places], []
    runs = _runs_of_nibbles(builder, [_place(builder, place, 4) for place in places])
    for low, four in zip(runs, _in_pairs(builder, words), strict=True):
        own = taken(builder, four, [place // 8 for place in range(low.type.count)])  # a bit for each number
        bit = ir.Constant(low.type, [1 << place % 8 for place in range(low.type.count)])
        is_set = builder.icmp_unsigned("!=", builder.and_(own, bit), same(low.type, 0))
        made.append(builder.or_(low, builder.select(is_set, same(low.type, 16), same(low.type, 0))))
    return made


def _q5_0(builder: Any, address: Any, blocks: int) -> Group:
    places = [_place(builder, address, 22 * block) for block in range(blocks)]
    stored = _runs_of_five_bits(builder, [_place(builder, each, 2) for each in places])
    return Group(stored, _halves_at(builder, places, 1))


def _q5_1(builder: Any, address: Any, blocks: int) -> Group:
    places = [_place(builder, address, 24 * block) for block in range(blocks)]
    stored = _runs_of_five_bits(builder, [_place(builder, each, 4) for each in places])
    return Group(stored, *_scale_and_least(builder, places))


def _iq4_nl(builder: Any, address: Any, blocks: int) -> Group:
    places = [_place(builder, address, 18 * block) for block in range(blocks)]
    codes = _runs_of_nibbles(builder, [_place(builder, each, 2) for each in places])
    return Group([looked_up(builder, each, _LEVELS) for each in codes], _halves_at(builder, places, 1))


def _mxfp4(builder: Any, address: Any, blocks: int) -> Group:
    """A scale is 2 to the power of its byte minus 128, because the numbers are doubled."""
    codes = _runs_of_nibbles(builder, [_place(builder, address, 17 * block + 1) for block in range(blocks)])
    data = read(builder, address, ir.VectorType(BYTE, 16 * blocks))
    powers = builder.zext(taken(builder, data, [17 * block for block in range(blocks)]), ir.VectorType(INT, blocks))
    bits = builder.shl(builder.sub(powers, same(powers.type, 1)), same(powers.type, 23))
    small = builder.shl(same(powers.type, 1 << 21), powers)  # the exponents of float32 begin at 2^-126
    bits = builder.select(builder.icmp_unsigned("<", powers, same(powers.type, 2)), small, bits)
    scales = builder.bitcast(bits, ir.VectorType(FLOAT, blocks))
    return Group([looked_up(builder, each, BYTES_OF_E2M1) for each in codes], scales)


def _q4_k(builder: Any, address: Any, blocks: int) -> Group:
    assert blocks == 1
    data = [load(builder, _place(builder, address, 16 + 32 * part), BYTES) for part in range(4)]
    return Group([_planes(builder, each, (0, 4), 4) for each in data], *_eight_scales(builder, address))


def _q5_k(builder: Any, address: Any, blocks: int) -> Group:
    assert blocks == 1
    high, stored = load(builder, _place(builder, address, 16), BYTES), []
    for part in range(4):
        low = _planes(builder, load(builder, _place(builder, address, 48 + 32 * part), BYTES), (0, 4), 4)
        stored.append(builder.or_(low, _planes(builder, high, (2 * part, 2 * part + 1), 1, to=4)))
    return Group(stored, *_eight_scales(builder, address))


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
    d, least = (repeated(builder, builder.extract_element(both, INT(place)), 8) for place in (0, 1))
    added = builder.fneg(builder.fmul(least, leasts, flags=IN_ORDER), flags=IN_ORDER)
    return builder.fmul(d, scales, flags=IN_ORDER), added


def _scaled(builder: Any, place: Any, numbers: Any) -> Any:
    """Return the float16 at an address times some numbers, of type float32."""
    d = builder.extract_element(_halves_at(builder, [place], 1), INT(0))
    return builder.fmul(repeated(builder, d, numbers.type.count), numbers, flags=IN_ORDER)


def _pairs_of_two_bits(builder: Any, address: Any) -> list[Any]:
    """Return eight runs of numbers of two bits, two in a register: in each of two times 32 bytes are four of them."""
    halves = [load(builder, _place(builder, address, 32 * half), BYTES) for half in range(2)]
    return [_planes(builder, half, planes, 2) for half in halves for planes in ((0, 2), (4, 6))]


def _q2_k(builder: Any, address: Any, blocks: int) -> Group:
    assert blocks == 1
    both, wide = load(builder, address, many(BYTE, 16)), ir.VectorType(FLOAT, 16)
    scales, leasts = (
        _scaled(builder, _place(builder, address, place), builder.uitofp(_planes(builder, both, (first,), 4), wide))
        for place, first in ((80, 0), (82, 4))
    )
    return Group(_pairs_of_two_bits(builder, _place(builder, address, 16)), scales, builder.fneg(leasts, flags=IN_ORDER))


def _q3_k(builder: Any, address: Any, blocks: int) -> Group:
    assert blocks == 1
    low = _planes(builder, load(builder, _place(builder, address, 96), many(BYTE, 8)), (0, 4), 4)
    four = load(builder, _place(builder, address, 104), many(BYTE, 4))
    upper = joined(builder, [_planes(builder, four, planes, 2, to=4) for planes in ((0, 2), (4, 6))])
    six = builder.sub(builder.or_(low, upper), same(low.type, 32))
    scales = _scaled(builder, _place(builder, address, 108), builder.sitofp(six, ir.VectorType(FLOAT, 16)))
    high, stored = load(builder, address, BYTES), []
    for part, two in enumerate(_pairs_of_two_bits(builder, _place(builder, address, 32))):
        stored.append(builder.or_(two, _planes(builder, high, (2 * part, 2 * part + 1), 1, to=2)))
    return Group(stored, scales)


def _iq4_xs(builder: Any, address: Any, blocks: int) -> Group:
    assert blocks == 1
    upper = builder.zext(load(builder, _place(builder, address, 2), SHORT), INT)
    lower, eight = load(builder, _place(builder, address, 4), INT), ir.VectorType(INT, 8)

    def bits(value: Any, count: int) -> Any:
        shifts = ir.Constant(eight, [count * run for run in range(8)])
        return builder.and_(builder.lshr(repeated(builder, value, 8), shifts), same(eight, (1 << count) - 1))

    six = builder.or_(bits(lower, 4), builder.shl(bits(upper, 2), same(eight, 4)))
    numbers = builder.sitofp(builder.sub(six, same(eight, 32)), ir.VectorType(FLOAT, 8))
    codes = _runs_of_nibbles(builder, [_place(builder, address, 8 + 16 * run) for run in range(8)])
    return Group([looked_up(builder, each, _LEVELS) for each in codes], _scaled(builder, address, numbers))


def _q6_k(builder: Any, address: Any, blocks: int) -> Group:
    assert blocks == 1
    numbers = builder.sitofp(load(builder, _place(builder, address, 192), many(BYTE, 16)), ir.VectorType(FLOAT, 16))
    stored = []
    for half in range(2):
        low = load(builder, _place(builder, address, 64 * half), many(BYTE, 2 * RUN))
        high = load(builder, _place(builder, address, 128 + 32 * half), BYTES)
        for first, planes in ((0, (0, 2)), (4, (4, 6))):
            upper = _planes(builder, high, planes, 2, to=4)
            stored.append(builder.or_(_planes(builder, low, (first,), 4), upper))
    return Group(stored, _scaled(builder, _place(builder, address, 208), numbers))


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
