"""Matrices of packed floats times a few vectors, and conversion of such matrices to bfloat16.

Weights are unpacked in registers, exactly, and multiplied there: as pairs of bfloat16 with vectors that are rounded to
bfloat16, where the processor has such instructions, and otherwise in float32. Sums of weights with one scale are multiplied
with the scale in float32. The order of summation depends on the number of inputs alone.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.kernels.compiler.arithmetic import narrow
from engine.kernels.compiler.compiling import add_kernel, kernel
from engine.kernels.compiler.instructions import (
    FLOAT,
    FLOATS,
    IN_ORDER,
    INDEX,
    INT,
    INTS,
    LANES,
    SHORT,
    add_pairs,
    add_product,
    added_up,
    at,
    fetch_weights,
    in_fours,
    load,
    loop,
    narrowed,
    parts,
    repeated,
)
from engine.kernels.compiler.memory import floats, halves
from engine.kernels.dot_products import MULTIPLY, PREPARE
from engine.kernels.stored.float_types import (
    FLOAT_KINDS,
    REST,
    TAKES_PAIRS,
    UNIT,
    FloatKind,
    field,
    lanes_of,
)
from engine.kernels.stored.low_bit import MULTIPLE_OF_OUTPUTS, WIDEN

_AHEAD = {8: 8192, 4: 2048}
"""Bytes that weights are prefetched ahead, by the bits of a weight; see `fetch_weights`."""
_SUMS = 2
"""Number of registers that accumulate one product, so that additions do not wait for each other."""


class Matrix:
    """A matrix of packed floats, as a product reads it."""

    def __init__(self, builder: Any, kind: FloatKind, address: Any, inputs: Any) -> None:
        """address: of a FLOATS_OF_MATRIX."""
        self._builder, self.kind = builder, kind
        self.values, self.row = (field(builder, address, name) for name in ("values", "row"))
        self._scales, self._scale_row, self._scaled_rows = (
            field(builder, address, name) for name in ("scales", "scale_row", "scaled_rows")
        )
        self._shift, self.divisor = (field(builder, address, name) for name in ("shift", "divisor"))
        self._packed = parts(builder, inputs, kind.numbers)

    def first(self, place: Any) -> Any:
        """Return the number of a row, given the address that it would have if rows had no gaps."""
        return self._builder.udiv(self._builder.sub(place, self.values), self._packed)

    def addresses(self, row: Any) -> tuple[Any, Any]:
        """Return the addresses of a row's numbers and of its scales."""
        builder = self._builder
        scales = builder.mul(builder.udiv(row, self._scaled_rows), self._scale_row)
        return builder.add(self.values, builder.mul(row, self.row)), builder.add(self._scales, scales)

    def scales(self, address: Any, index: Any, weights: int) -> Any:
        """Return the scales of so many weights from `index` on, given the address of the row's scales."""
        builder, kind = self._builder, self.kind
        if not kind.group:
            return kind.scales_of(builder, at(builder, address, builder.lshr(index, self._shift), 4), 1)
        return kind.scales_of(builder, builder.add(address, parts(builder, index, kind.group)), weights // kind.group)

    def units(self) -> tuple[int, ...]:
        """Return the sizes of the steps of a product: whole steps, then units, then what may be left."""
        sizes = (self.kind.step, UNIT)
        return sizes if self.kind.bits == 8 else (*sizes, REST)


class _Vector:
    """One prepared vector, as a product reads it."""

    pairs = False
    """Whether the values are bfloat16."""

    def __init__(self, builder: Any, address: Any, inputs: Any, row: Any) -> None:
        """address: of the first vector. row: its number."""
        self._builder, self._size = builder, 2 if self.pairs else 4
        self._values = at(builder, address, builder.mul(inputs, row), self._size)

    def added(self, total: Any, weights: Any, index: Any) -> Any:
        """Return a register of sums with the products of one register of weights and the values from `index` on."""
        builder = self._builder
        place = at(builder, self._values, index, self._size)
        if self.pairs:
            return add_pairs(builder, total, weights, load(builder, place, INTS))
        return add_product(builder, total, weights, load(builder, place, FLOATS))


class _PairsOfVector(_Vector):
    pairs = True


def _row_products(builder: Any, matrix: Matrix, row: tuple[Any, Any], vectors: list[_Vector], inputs: Any) -> list[Any]:
    """Return for each vector a register of 16 partial sums, which add up to its product with one matrix row.

    row: the addresses of the row's numbers and of its scales.
    """
    kind, (weights, own_scales), pairs = matrix.kind, row, vectors[0].pairs
    zero, each = ir.Constant(FLOATS, [0.0] * LANES), (2 if pairs else 1) * LANES

    def taking(size: int) -> Any:
        unit = min(size, UNIT)

        def body(index: Any, sums: list[Any]) -> list[Any]:
            start = builder.add(weights, parts(builder, index, kind.numbers))
            if size == kind.step:
                vector_bytes = builder.mul(inputs, INDEX(2 if pairs else 4))
                fetch_weights(builder, start, size // kind.numbers, _AHEAD[kind.bits], (len(vectors), vector_bytes))
            scales, made = matrix.scales(own_scales, index, size), list(sums)
            open_sums: dict[tuple[int, tuple[int, ...]], Any] = {}
            for offset in range(0, size, unit):
                address = builder.add(start, INDEX(offset // kind.numbers))
                before = offset // kind.group if kind.group else 0
                for number, register in enumerate(kind.registers(builder, address, unit, pairs=pairs)):
                    places = tuple(before + place for place in kind.groups(unit, number, pairs=pairs))
                    first = builder.add(index, INDEX(offset + each * number))
                    for r, vector in enumerate(vectors):
                        total = open_sums.get((r, places), zero)
                        open_sums[r, places] = vector.added(total, register, first)
            for number, ((r, places), total) in enumerate(open_sums.items()):
                own = _SUMS * r + number // len(vectors) % _SUMS
                made[own] = add_product(builder, made[own], total, lanes_of(builder, scales, [*places]))
            return made

        return body

    sums, begin = [zero] * (_SUMS * len(vectors)), INDEX(0)
    for size in matrix.units():
        end = builder.and_(inputs, INDEX(-size))
        sums, begin = loop(builder, begin, end, size, sums, taking(size)), end
    pairs_of_sums = zip(sums[::_SUMS], sums[1::_SUMS], strict=True)
    return [builder.fadd(first, second, flags=IN_ORDER) for first, second in pairs_of_sums]


def product_of(kind: FloatKind, prepared: Any, row_products: Any) -> Any:
    """Return a function like the kernels of `MULTIPLY`. Four vectors are multiplied at once, then two.

    Four matrix rows are taken one after another with one vector, two with two, and one with four. The address of the scales
    is that of a FLOATS_OF_MATRIX. prepared: the class of a prepared vector. row_products: as `_row_products`.
    """

    def product(
        context: Any, place: Any, matrix: Any, count: Any, inputs: Any, x: Any, rows: Any, results: Any, stride: Any
    ) -> Any:
        return types.void(*[types.int64] * 8), generate

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place, address, count, inputs, x, rows, results, stride = arguments
        matrix = Matrix(builder, kind, address, inputs)
        begin = matrix.first(place)

        def taking(taken: int) -> Any:
            def every_row(row: Any, _: list[Any]) -> list[Any]:
                vectors = [prepared(builder, x, inputs, builder.add(row, INDEX(r))) for r in range(taken)]

                def tile(first: Any, _: list[Any]) -> list[Any]:
                    sums: list[Any] = []
                    for matrix_row in range(MULTIPLE_OF_OUTPUTS // taken):
                        number = builder.add(begin, builder.add(first, INDEX(matrix_row)))
                        sums += row_products(builder, matrix, matrix.addresses(number), vectors, inputs)
                    for number, total in enumerate(added_up(builder, sums)):
                        r, matrix_row = number % taken, number // taken
                        own_row = builder.mul(builder.add(row, INDEX(r)), stride)
                        index = builder.add(own_row, builder.add(first, INDEX(matrix_row)))
                        value = builder.fdiv(total, matrix.divisor, flags=IN_ORDER)
                        builder.store(value, builder.inttoptr(at(builder, results, index, 4), FLOAT.as_pointer()))
                    return []

                return loop(builder, INDEX(0), count, MULTIPLE_OF_OUTPUTS // taken, [], tile)

            return every_row

        in_fours(builder, rows, taking)
        return context.get_dummy_value()

    return intrinsic(product)


def _wide_rows(kind: FloatKind) -> Any:
    """Return a function like the kernels of `WIDEN`, that dequantizes matrix rows. Each weight is rounded once."""

    def wide(context: Any, matrix: Any, first: Any, count: Any, inputs: Any, target: Any) -> Any:
        return types.void(*[types.int64] * 5), generate

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, first, count, inputs, target = arguments
        matrix = Matrix(builder, kind, address, inputs)
        divisor = repeated(builder, matrix.divisor, LANES)

        def taking(size: int, row: tuple[Any, Any], own_target: Any) -> Any:
            # Registers hold weights in the order of bytes, and the result the order of the row.
            order = ir.Constant(ir.VectorType(INT, size), [kind.place(weight, size, pairs=False) for weight in range(size)])

            def body(index: Any, _: list[Any]) -> list[Any]:
                scales = matrix.scales(row[1], index, size)
                made = []
                start = builder.add(row[0], parts(builder, index, kind.numbers))
                for number, register in enumerate(kind.registers(builder, start, size, pairs=False)):
                    places = kind.groups(size, number, pairs=False)
                    own = builder.fdiv(lanes_of(builder, scales, [*places]), divisor, flags=IN_ORDER)
                    made.append(narrowed(builder, builder.fmul(register, own, flags=IN_ORDER)))
                while len(made) > 1:
                    made = [
                        builder.shuffle_vector(
                            *pair, ir.Constant(ir.VectorType(INT, 2 * pair[0].type.count), [*range(2 * pair[0].type.count)])
                        )
                        for pair in zip(made[::2], made[1::2], strict=True)
                    ]
                ordered = builder.shuffle_vector(made[0], made[0], order)
                own_place = at(builder, own_target, index, 2)
                kind_of_result = ir.VectorType(SHORT, size).as_pointer()
                builder.store(ordered, builder.inttoptr(own_place, kind_of_result), align=2)
                return []

            return body

        def every_row(number: Any, _: list[Any]) -> list[Any]:
            row = matrix.addresses(builder.add(first, number))
            own_target, begin = at(builder, target, builder.mul(number, inputs), 2), INDEX(0)
            for size in matrix.units()[1:]:
                end = builder.and_(inputs, INDEX(-size))
                loop(builder, begin, end, size, [], taking(size, row, own_target))
                begin = end
            return []

        loop(builder, INDEX(0), count, 1, [], every_row)
        return context.get_dummy_value()

    return intrinsic(wide)


WORK: Any = None
"""The code of a kernel, which `add_kernel` puts in this place."""


def multiply(
    weights: Any, scales: Any, group: Any, count: Any, inputs: Any, x: Any, rows: Any, results: Any, stride: Any
) -> None:
    """Multiply as `MULTIPLY` says. The address of the scales is that of a FLOATS_OF_MATRIX."""
    WORK(weights, scales, count, inputs, x, rows, results, stride)


def _widen(weights: Any, scales: Any, group: Any, first: Any, count: Any, inputs: Any, target: Any) -> None:
    WORK(scales, first, count, inputs, target)


for _kind in FLOAT_KINDS.values():
    if TAKES_PAIRS:
        add_kernel(f"multiply_{_kind.key}", MULTIPLY, multiply, product_of(_kind, _PairsOfVector, _row_products))
    add_kernel(f"multiply_exact_{_kind.key}", MULTIPLY, multiply, product_of(_kind, _Vector, _row_products))
    add_kernel(f"widen_{_kind.key}", WIDEN, _widen, _wide_rows(_kind))


@kernel(PREPARE)
def prepare_bytes(values: Any, inputs: Any, target: Any) -> None:
    """Round float32 values to bfloat16, in the order in which bytes of E4M3 are unpacked."""
    values_I, half_I = numba.carray(floats(values), (inputs,)), numba.carray(halves(target), (inputs,))
    for index in range(inputs):
        within = index % 64
        half_I[index - within + within % 16 // 8 * 32 + within // 16 * 8 + within % 8] = narrow(values_I[index])


@kernel(PREPARE)
def prepare_halves(values: Any, inputs: Any, target: Any) -> None:
    """Round float32 values to bfloat16, in the order in which bytes of two numbers are unpacked."""
    values_I, half_I = numba.carray(floats(values), (inputs,)), numba.carray(halves(target), (inputs,))
    whole = inputs - inputs % 64
    for index in range(inputs):
        unit = 64 if index < whole else 32
        within = index % unit
        half_I[index - within + within // 2 + within % 2 * (unit // 2)] = narrow(values_I[index])


@kernel(PREPARE)
def prepare_wide_halves(values: Any, inputs: Any, target: Any) -> None:
    """Copy float32 values, in the order in which bytes of two numbers are unpacked."""
    values_I, plain_I = numba.carray(floats(values), (inputs,)), numba.carray(floats(target), (inputs,))
    whole = inputs - inputs % 64
    for index in range(inputs):
        unit = 64 if index < whole else 32
        within = index % unit
        plain_I[index - within + within // 2 + within % 2 * (unit // 2)] = values_I[index]
