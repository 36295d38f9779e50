"""Blocks of GGUF's quantized types as instructions: the numbers of a block as integers, with their scales.

A weight is scale · (stored − offset) + least. `Group` describes consecutive runs of 32 weights, which several kernels
multiply (block_products.py). Layouts: github.com/ggml-org/ggml, `block_*` in src/ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from engine.kernels.compiler.instructions import BYTE, FLOAT, IN_ORDER, INDEX, INT, SHORT, load, many, wide_halves

RUN = 32
"""Number of weights that are unpacked together."""
BYTES = ir.VectorType(BYTE, RUN)


@dataclass(frozen=True)
class Group:
    """The weights of one step of a product, as LLVM values."""

    stored: list[Any]
    """Unsigned bytes of each run of 32 weights."""
    scales: Any
    """Float32 scales: one for each run, or two for each run, of 16 weights each."""
    leasts: Any = None
    """Float32 values that are added to the weights of each run; None for zeros."""


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


def _q4_k(builder: Any, address: Any, blocks: int) -> Group:
    assert blocks == 1
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
    stored: list[Any] = []
    for part in range(4):
        stored += _nibbles(builder, load(builder, _place(builder, address, 16 + 32 * part), BYTES))
    d, least = (every(builder, builder.extract_element(both, INT(place)), 8) for place in (0, 1))
    added = builder.fneg(builder.fmul(least, leasts, flags=IN_ORDER), flags=IN_ORDER)
    return Group(stored, builder.fmul(d, scales, flags=IN_ORDER), added)


def _q6_k(builder: Any, address: Any, blocks: int) -> Group:
    assert blocks == 1
    d = _halves_at(builder, [_place(builder, address, 208)], 1)
    scales = builder.sitofp(load(builder, _place(builder, address, 192), many(BYTE, 16)), ir.VectorType(FLOAT, 16))
    stored: list[Any] = []
    shorts = ir.VectorType(SHORT, RUN // 2)
    for half in range(2):
        low = [load(builder, _place(builder, address, 64 * half + 32 * part), BYTES) for part in range(2)]
        high = load(builder, _place(builder, address, 128 + 32 * half), BYTES)
        lower = [_nibbles(builder, each) for each in low]
        for plane in range(4):
            # Two bits of each byte become bits 4 and 5.
            turned = builder.bitcast(high, shorts)
            shift = _same(shorts, abs(4 - 2 * plane))
            turned = builder.shl(turned, shift) if plane < 2 else builder.lshr(turned, shift)
            upper = builder.and_(builder.bitcast(turned, BYTES), _same(BYTES, 48))
            stored.append(builder.or_(lower[plane % 2][plane // 2], upper))
    return Group(stored, builder.fmul(every(builder, builder.extract_element(d, INT(0)), 16), scales, flags=IN_ORDER))


BLOCK_KINDS = {
    kind.name: kind
    for kind in (
        BlockKind("Q8_0", 32, 34, 128, 4, _q8_0),
        BlockKind("Q4_0", 32, 18, 8, 4, _q4_0),
        BlockKind("Q4_1", 32, 20, 0, 4, _q4_1),
        BlockKind("Q4_K", 256, 144, 0, 1, _q4_k),
        BlockKind("Q6_K", 256, 210, 32, 1, _q6_k, halves=True),
    )
}
"""The types that products read as they are stored, by name."""
