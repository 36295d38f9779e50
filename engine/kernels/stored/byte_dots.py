"""Vectors that are rounded to bytes, as products read them, and sums of four products of bytes, by what the processor has:
AVX512-VNNI, dot products of ARM, AVX2, or plain integers.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from engine.kernels.compiler.instructions import (
    BYTE,
    FLOAT,
    INT,
    SHORT,
    add_quadruples,
    at,
    cut,
    joined,
    load,
    many,
    pairs_of_bytes,
    pairs_of_words,
    parts,
    taken,
)
from engine.kernels.compiler.processor import MULTIPLIES_INTEGERS, MULTIPLIES_QUADRUPLES
from engine.kernels.stored.rounded_vectors import ROUNDED


class RoundedVector:
    """A vector that is rounded in groups: its bytes, then a float32 scale for each group, and then an offset for each."""

    group, value_bytes = ROUNDED, 1
    """Number of values of a group, and bytes of a value."""

    def __init__(self, builder: Any, address: Any, inputs: Any, row: Any) -> None:
        """address: of the first vector. row: its number."""
        self.builder, self.inputs = builder, inputs
        self.values = builder.add(address, builder.mul(row, self.size(builder, inputs)))
        self._scales = at(builder, self.values, inputs, self.value_bytes)
        self._offsets = at(builder, self._scales, parts(builder, inputs, self.group), 4)

    @classmethod
    def size(cls, builder: Any, inputs: Any) -> Any:
        """Return the bytes of a vector."""
        return at(builder, parts(builder, inputs, cls.group, 8), inputs, cls.value_bytes)

    def scales(self, index: Any, count: int) -> Any:
        """Return the scales of so many groups, from the value numbered `index` on."""
        return self._read(self._scales, index, count)

    def offsets(self, index: Any, count: int) -> Any:
        """Return the offsets of so many groups, from the value numbered `index` on."""
        return self._read(self._offsets, index, count)

    def _read(self, address: Any, index: Any, count: int) -> Any:
        place = at(self.builder, address, parts(self.builder, index, self.group), 4)
        return load(self.builder, place, many(FLOAT, count))


def add_dots(builder: Any, total: Any, weights: Any, address: Any, *, are_small: bool) -> Any:
    """Return total + the products of a register of unsigned bytes and the signed bytes at an address: in each lane of 32
    bits, the sum of four.

    are_small: whether two products always fit in 16 bits.
    """
    lanes = total.type
    if MULTIPLIES_QUADRUPLES:
        return add_quadruples(builder, total, builder.bitcast(weights, lanes), load(builder, address, lanes), lanes)
    values = load(builder, address, ir.VectorType(BYTE, weights.type.count))
    return builder.add(total, _dots_of_four(builder, weights, values, are_small=are_small))


def _dots_of_four(builder: Any, weights: Any, values: Any, *, are_small: bool) -> Any:
    """Return sums of four products without AVX512-VNNI: by AVX2, or by what every processor can compile.

    Two products of 8-bit weights need 17 bits, so that these are widened to 16 bits first.
    """
    size = weights.type.count
    if not MULTIPLIES_INTEGERS:
        wide = ir.VectorType(INT, size)
        return _added(builder, builder.mul(builder.zext(weights, wide), builder.sext(values, wide)), 4)
    if are_small and size >= 32:
        ones = ir.Constant(ir.VectorType(SHORT, 16), [1] * 16)
        pairs = [pairs_of_bytes(builder, *both) for both in cut(builder, 32, weights, values)]
        return joined(builder, [pairs_of_words(builder, each, ones) for each in pairs])
    words = ir.VectorType(SHORT, size)
    both = cut(builder, 16, builder.zext(weights, words), builder.sext(values, words))
    return _added(builder, joined(builder, [pairs_of_words(builder, *each) for each in both]), 2)


def _added(builder: Any, numbers: Any, count: int) -> Any:
    """Return the sums of each `count` neighboring integers."""
    first, *others = (taken(builder, numbers, [*range(first, numbers.type.count, count)]) for first in range(count))
    for other in others:
        first = builder.add(first, other)
    return first
