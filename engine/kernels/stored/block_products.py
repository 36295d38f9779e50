"""Matrices in blocks of GGUF's types times a few vectors, and conversion of such matrices to bfloat16.

A vector is multiplied in one of two forms. Where the processor multiplies integers (AVX2, AVX512-VNNI, dot products of ARM),
each 32 values of a vector are rounded to 8 bits and share a scale, as in llama.cpp. Elsewhere vectors are float32, and
weights are dequantized in registers. In the first form, 32 weights scale · (stored − offset) + least become one product of
integers, and one of the vector's sum. The order of summation depends on the number of inputs alone.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.kernels.compiler.compiling import add_kernel
from engine.kernels.compiler.instructions import (
    BYTE,
    FLOAT,
    FLOATS,
    IN_ORDER,
    INDEX,
    INT,
    LANES,
    SHORTS,
    add_product,
    added_up,
    at,
    cut,
    fetch_weights,
    in_fours,
    in_lanes,
    load,
    loop,
    narrowed,
    parts,
    repeated,
    same,
    taken,
)
from engine.kernels.dot_products import MULTIPLY, PREPARE
from engine.kernels.stored.block_types import BLOCK_KINDS, RUN, BlockKind, Group
from engine.kernels.stored.byte_dots import add_dots
from engine.kernels.stored.low_bit import MULTIPLE_OF_OUTPUTS, WIDEN
from engine.kernels.stored.rounded_vectors import ROUNDED, round_vector, rounder

_AHEAD = 4096
"""Bytes that weights are prefetched ahead; see `fetch_weights`."""


def _tile(
    builder: Any, kind: BlockKind, terms: Any, matrix: tuple[Any, Any], x: tuple[Any, int], inputs: Any, y: tuple[Any, Any]
) -> None:
    """Multiply 4 / R matrix rows, one after another, with R vectors.

    matrix: address and bytes of a row. x: address of the prepared vectors, and R. y: address and stride of the results; the
    product of matrix row w and vector r goes to place `w + r · stride`.
    """
    rows = x[1]
    vectors = [terms(builder, kind, x[0], inputs, r) for r in range(rows)]
    sums: list[Any] = []
    for matrix_row in range(MULTIPLE_OF_OUTPUTS // rows):
        weights = builder.add(matrix[0], builder.mul(matrix[1], INDEX(matrix_row)))
        sums += _row_products(builder, kind, weights, vectors, inputs)
    for place, total in enumerate(added_up(builder, sums)):
        index = builder.add(builder.mul(y[1], INDEX(place % rows)), INDEX(place // rows))
        builder.store(total, builder.inttoptr(at(builder, y[0], index, 4), FLOAT.as_pointer()))


def _row_products(builder: Any, kind: BlockKind, weights: Any, vectors: list[Any], inputs: Any) -> list[Any]:
    """Return for each vector a register of 16 partial sums, which add up to its product with one matrix row."""
    step, sizes = kind.blocks * kind.numbers, [vector.sums for vector in vectors]
    whole = builder.and_(inputs, INDEX(-step))  # a step is a power of two

    def taking(blocks: int) -> Any:
        def body(index: Any, sums: list[Any]) -> list[Any]:
            start = builder.add(weights, parts(builder, index, kind.numbers, kind.bytes))
            if blocks == kind.blocks:
                own = len(vectors), vectors[0].bytes(builder, inputs)
                fetch_weights(builder, start, blocks * kind.bytes, _AHEAD, own)
            group, made, first = kind.unpacked(builder, start, blocks), [], 0
            for vector, size in zip(vectors, sizes, strict=True):
                made += vector.added(index, group, sums[first : first + size])
                first += size
            return made

        return body

    sums = [zero for vector in vectors for zero in vector.zeros(kind.blocks * kind.numbers // RUN)]
    sums = loop(builder, INDEX(0), whole, step, sums, taking(kind.blocks))
    first, made = 0, []
    for vector, size in zip(vectors, sizes, strict=True):
        made += vector.folded(sums[first : first + size])
        first += size
    if kind.blocks > 1:
        made = loop(builder, whole, inputs, kind.numbers, made, taking(1))
    first, totals = 0, []
    for vector, size in zip(vectors, sizes, strict=True):
        totals.append(vector.total(made[first : first + size]))
        first += size
    return totals


class _RoundedTerms:
    """One of the vectors that `prepare_blocks` writes, as a tile reads it.

    Its sums are two registers of products, and one of products of the vector's sums, which has a lane for each run.
    """

    sums = 3

    @staticmethod
    def bytes(builder: Any, inputs: Any) -> Any:
        """Return the bytes of a prepared vector."""
        return builder.add(inputs, builder.lshr(inputs, INDEX(2)))

    def __init__(self, builder: Any, kind: BlockKind, address: Any, inputs: Any, place: int) -> None:
        self._builder, self._kind = builder, kind
        self._values = builder.add(address, builder.mul(self.bytes(builder, inputs), INDEX(place)))
        self._scales = builder.add(self._values, inputs)
        self._sums = builder.add(self._scales, builder.lshr(inputs, INDEX(3)))

    def zeros(self, runs: int) -> list[Any]:
        return [*[ir.Constant(FLOATS, [0.0] * LANES)] * 2, ir.Constant(ir.VectorType(FLOAT, runs), [0.0] * runs)]

    def added(self, index: Any, group: Group, sums: list[Any]) -> list[Any]:
        """Return the sums with the products of the runs from `index` on."""
        builder, runs = self._builder, sum(each.type.count for each in group.stored) // RUN
        place = parts(builder, index, RUN, 4)
        scales_x, sums_x = (
            load(builder, builder.add(row, place), ir.VectorType(FLOAT, runs)) for row in (self._scales, self._sums)
        )
        made, leasts = list(sums), group.leasts
        each = 2 if self._kind.halves else 1
        own_scales_x = taken(builder, scales_x, [run // each for run in range(each * runs)])
        scales = builder.fmul(group.scales, own_scales_x, flags=IN_ORDER)
        if self._kind.offset and not self._kind.halves:
            by_offset = builder.fmul(group.scales, same(group.scales.type, -float(self._kind.offset)), flags=IN_ORDER)
            leasts = by_offset if leasts is None else builder.fadd(leasts, by_offset, flags=IN_ORDER)
        if leasts is not None and not self._kind.halves:
            made[2] = add_product(builder, made[2], leasts, sums_x)
        elif leasts is not None:
            leasts = builder.fmul(leasts, own_scales_x, flags=IN_ORDER)
        first, wide = 0, RUN // each
        for number, stored in enumerate(group.stored):
            count, own = stored.type.count, number % 2
            x = builder.add(self._values, builder.add(index, INDEX(first)))
            lanes = [(first + weight) // wide for weight in range(0, count, 4)]
            pairs = [(self._dots(stored, x), scales)]
            if leasts is not None and self._kind.halves:
                pairs.append((self._sums_of_four(x, count, 1), leasts))
            for dots, factors in pairs:
                products = [in_lanes(builder, part) for part in (_floats(builder, dots), taken(builder, factors, lanes))]
                made[own] = add_product(builder, made[own], *products)
            first += count
        return made

    def _dots(self, stored: Any, x: Any) -> Any:
        """Return sums of four products of integers each. x: the address of the values."""
        builder, count = self._builder, stored.type.count
        nothing = same(ir.VectorType(INT, count // 4), 0)
        dots = add_dots(builder, nothing, stored, x, are_small=self._kind.are_small)
        if not self._kind.halves or not self._kind.offset:
            return dots
        return builder.sub(dots, self._sums_of_four(x, count, self._kind.offset))

    def _sums_of_four(self, x: Any, count: int, times: int) -> Any:
        """Return the sums of each four of so many values, which are integers, times a number."""
        nothing = same(ir.VectorType(INT, count // 4), 0)
        factors = same(ir.VectorType(BYTE, count), times)
        return add_dots(self._builder, nothing, factors, x, are_small=True)

    def folded(self, sums: list[Any]) -> list[Any]:
        """Return the sums with one lane of products of the vector's sums, as single blocks are added."""
        runs = sums[2].type.count
        if runs == 1 or self._kind.blocks == 1:
            return sums
        builder = self._builder
        while runs > 1:
            runs //= 2
            low, high = (taken(builder, sums[2], [*range(start, start + runs)]) for start in (0, runs))
            sums = [*sums[:2], builder.fadd(low, high, flags=IN_ORDER)]
        return sums

    def total(self, sums: list[Any]) -> Any:
        products = self._builder.fadd(*sums[:2], flags=IN_ORDER)
        return self._builder.fadd(products, in_lanes(self._builder, sums[2]), flags=IN_ORDER)


class _ExactTerms:
    """A vector of float32, as a tile reads it."""

    sums = 2

    @staticmethod
    def bytes(builder: Any, inputs: Any) -> Any:
        """Return the bytes of a prepared vector."""
        return builder.mul(inputs, INDEX(4))

    def __init__(self, builder: Any, kind: BlockKind, address: Any, inputs: Any, place: int) -> None:
        self._builder, self._kind = builder, kind
        self._values = at(builder, address, builder.mul(inputs, INDEX(place)), 4)

    def zeros(self, runs: int) -> list[Any]:
        return [ir.Constant(FLOATS, [0.0] * LANES)] * 2

    def added(self, index: Any, group: Group, sums: list[Any]) -> list[Any]:
        builder, made = self._builder, list(sums)
        for place, weights in enumerate(_numbers(builder, self._kind, group)):
            x = load(builder, at(builder, self._values, builder.add(index, INDEX(LANES * place)), 4), FLOATS)
            made[place % 2] = add_product(builder, made[place % 2], weights, x)
        return made

    def folded(self, sums: list[Any]) -> list[Any]:
        return sums

    def total(self, sums: list[Any]) -> Any:
        return self._builder.fadd(*sums, flags=IN_ORDER)


def _floats(builder: Any, numbers: Any) -> Any:
    return builder.sitofp(numbers, ir.VectorType(FLOAT, numbers.type.count))


def _numbers(builder: Any, kind: BlockKind, group: Group) -> list[Any]:
    """Return the float32 weights of a group, 16 in a register: exactly those that the type means."""
    integers, made, wide = ir.VectorType(INT, LANES), [], RUN // 2 if kind.halves else RUN
    registers = [part for each in group.stored for (part,) in cut(builder, LANES, each)]
    for place, stored in enumerate(registers):
        own = INT(LANES * place // wide)
        whole = builder.sub(builder.zext(stored, integers), same(integers, kind.offset))
        scale = builder.extract_element(group.scales, own)
        weights = builder.fmul(builder.sitofp(whole, FLOATS), repeated(builder, scale, LANES), flags=IN_ORDER)
        if group.leasts is not None:
            least = repeated(builder, builder.extract_element(group.leasts, own), LANES)
            weights = builder.fadd(weights, least, flags=IN_ORDER)
        made.append(weights)
    return made


def _wide_rows(kind: BlockKind) -> Any:
    """Return a function like the kernels of `WIDEN`, without scales, that dequantizes matrix rows."""

    def wide(context: Any, weights: Any, first: Any, count: Any, inputs: Any, target: Any) -> Any:
        return types.void(*[types.int64] * 5), generate

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weights, first, count, inputs, target = arguments
        row_blocks = parts(builder, inputs, kind.numbers)
        start = at(builder, weights, builder.mul(first, row_blocks), kind.bytes)

        def widened_block(block: Any, _: list[Any]) -> list[Any]:
            group = kind.unpacked(builder, at(builder, start, block, kind.bytes), 1)
            for place, weights in enumerate(_numbers(builder, kind, group)):
                own = at(builder, target, builder.add(builder.mul(block, INDEX(kind.numbers)), INDEX(LANES * place)), 2)
                builder.store(narrowed(builder, weights), builder.inttoptr(own, SHORTS.as_pointer()), align=2)
            return []

        loop(builder, INDEX(0), builder.mul(count, row_blocks), 1, [], widened_block)
        return context.get_dummy_value()

    return intrinsic(wide)


def _product(kind: BlockKind, terms: Any) -> Any:
    """Return a function like the kernels of `MULTIPLY`, without scales. Four vectors are multiplied at once, then two."""

    def product(context: Any, weights: Any, count: Any, inputs: Any, x: Any, rows: Any, results: Any, stride: Any) -> Any:
        return types.void(*[types.int64] * 7), generate

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weights, count, inputs, x, rows, results, stride = arguments
        matrix_row, vector = parts(builder, inputs, kind.numbers, kind.bytes), terms.bytes(builder, inputs)

        def taking(vectors: int) -> Any:
            def every_place(row: Any, _: list[Any]) -> list[Any]:
                own = builder.add(x, builder.mul(row, vector))

                def tile(place: Any, _: list[Any]) -> list[Any]:
                    w = builder.add(weights, builder.mul(place, matrix_row))
                    index = builder.add(builder.mul(row, stride), place)
                    _tile(
                        builder,
                        kind,
                        terms,
                        (w, matrix_row),
                        (own, vectors),
                        inputs,
                        (at(builder, results, index, 4), stride),
                    )
                    return []

                return loop(builder, INDEX(0), count, MULTIPLE_OF_OUTPUTS // vectors, [], tile)

            return every_place

        in_fours(builder, rows, taking)
        return context.get_dummy_value()

    return intrinsic(product)


WORK: Any = None
"""The code of a kernel, which `add_kernel` puts in this place."""


def _multiply(
    weights: Any, scales: Any, group: Any, count: Any, inputs: Any, x: Any, rows: Any, results: Any, stride: Any
) -> None:
    WORK(weights, count, inputs, x, rows, results, stride)


def _widen(weights: Any, scales: Any, group: Any, first: Any, count: Any, inputs: Any, target: Any) -> None:
    WORK(weights, first, count, inputs, target)


add_kernel("prepare_blocks", PREPARE, round_vector, rounder(8, ROUNDED, 1.0))
for _kind in BLOCK_KINDS.values():
    add_kernel(f"multiply_{_kind.key}", MULTIPLY, _multiply, _product(_kind, _RoundedTerms))
    add_kernel(f"multiply_exact_{_kind.key}", MULTIPLY, _multiply, _product(_kind, _ExactTerms))
    add_kernel(f"widen_{_kind.key}", WIDEN, _widen, _wide_rows(_kind))
