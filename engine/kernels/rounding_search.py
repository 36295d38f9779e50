"""The search of rounding to K types, compiled; engine/checkpoint/gguf/rounding.py explains it, and has the same by torch.

A register holds one number of each of 16 sub-blocks, which are one block of 16 or two blocks of 8. Numbers are therefore
never added across a register. Sums and largest values of a block are, and then all lanes of the block have them. The numbers
of the sub-blocks are copied, and the copy is read once for each candidate.

Shape suffixes: N numbers of a sub-block, L sub-blocks, B blocks, C candidates, W blocks of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.compiler.compiling import BLOCK, JOB, add_kernel, kernel
from engine.kernels.compiler.instructions import (
    BYTE,
    FLOAT,
    FLOATS,
    IN_ORDER,
    INDEX,
    INT,
    INTS,
    LANES,
    add_product,
    at,
    load,
    loop,
    repeated,
)
from engine.kernels.compiler.memory import call, record_at
from engine.kernels.compiler.parallel import kernels_at

SEARCH = np.dtype(
    [
        ("kernels", np.int64),
        ("search", np.int64),  # address of the kernel of 16 sub-blocks
        ("x", np.int64),  # [L, N] float32
        ("w", np.int64),  # [W, numbers of a block] float32: how much the squared error of each number of a row counts
        ("first", np.int64),  # number of the first block
        ("row", np.int64),  # W
        ("numbers", np.int64),  # N
        ("lanes", np.int64),  # L
        ("factors", np.int64),  # [C] float32
        ("count", np.int64),  # C
        ("scales", np.int64),  # result [5, L rounded up to 16] float32: d, s, m and l; whether numbers are too large
        ("integers", np.int64),  # result [L / 16 rounded up, N, 16] int8: q
        ("lowest", np.float32),  # of the integers of numbers
        ("highest", np.float32),
        ("lowest_scale", np.float32),  # of the integers of scales
        ("highest_scale", np.float32),
    ],
    align=True,
)
"""Arguments of a search."""
search_at = record_at(SEARCH)
MOST_NUMBERS = 32
"""The most numbers of a sub-block."""
SCALES = 5
"""Rows of the scales."""
_HALVES = ir.VectorType(ir.HalfType(), LANES)


def _all(value: float) -> Any:
    return ir.Constant(FLOATS, [float(np.float32(value))] * LANES)


_ZERO, _ONE, _INFINITY, _LEAST_DETERMINANT, _LARGEST = map(_all, (0.0, 1.0, float("inf"), 1e-6, 65504.0))


class _Lanes:
    """16 sub-blocks in the lanes of registers, and arithmetic on them."""

    def __init__(self, builder: Any, job: Any, group: Any, parts: int) -> None:
        """job: address of a SEARCH. group: number of these 16. parts: sub-blocks of a block."""
        self.builder, self.job, self._group, self.parts = builder, job, group, parts
        self.numbers = self.field("numbers")
        self.lowest, self.highest, self.lowest_scale, self.highest_scale = map(
            self.field, ("lowest", "highest", "lowest_scale", "highest_scale")
        )
        self._x, self._w = self._copied("x"), self._copied("w")

    def field(self, name: str) -> Any:
        """Return a field of the job: a float in all lanes, or an integer."""
        builder, fields = self.builder, SEARCH.fields
        kind, offset = fields[name][:2]  # type: ignore[index]
        value = load(builder, builder.add(self.job, INDEX(offset)), INDEX if kind == np.int64 else FLOAT)
        return repeated(builder, value, LANES) if value.type == FLOAT else value

    def _copied(self, name: str) -> Any:
        """Copy the numbers of the sub-blocks, or their weights, to the stack as [N, 16], and return the address there."""
        builder = self.builder
        size = builder.mul(self.numbers, INDEX(4))
        copy = builder.ptrtoint(cgutils.alloca_once(builder, FLOATS, size=MOST_NUMBERS), INDEX)
        starts = [builder.add(self.field(name), builder.mul(place, size)) for place in self._places(name)]

        def one(number: Any, _: list[Any]) -> list[Any]:
            values = ir.Constant(FLOATS, ir.Undefined)
            for lane, start in enumerate(starts):
                value = load(builder, at(builder, start, number, 4), FLOAT)
                values = builder.insert_element(values, value, INT(lane))
            builder.store(values, self.place_of(copy, number, 4, FLOATS), align=4)
            return []

        loop(builder, INDEX(0), self.numbers, 1, [], one)
        return copy

    def _places(self, name: str) -> list[Any]:
        """Return which sub-block of the array each lane reads. Lanes beyond the last one read the last one again."""
        builder, made = self.builder, []
        last = builder.sub(self.field("lanes"), INDEX(1))
        for lane in range(LANES):
            place = builder.add(builder.mul(self._group, INDEX(LANES)), INDEX(lane))
            place = builder.select(builder.icmp_signed("<", place, last), place, last)
            if name == "w":  # blocks of a matrix have the weights of their place in a row
                block, part = builder.udiv(place, INDEX(self.parts)), builder.urem(place, INDEX(self.parts))
                block = builder.urem(builder.add(block, self.field("first")), self.field("row"))
                place = builder.add(builder.mul(block, INDEX(self.parts)), part)
            made.append(place)
        return made

    def place_of(self, address: Any, number: Any, size: int, kind: Any) -> Any:
        """Return a pointer to register `number` of such registers, whose values have so many bytes."""
        return self.builder.inttoptr(at(self.builder, address, number, size * LANES), kind.as_pointer())

    # Arithmetic

    def rounded(self, values: Any, lowest: Any, highest: Any) -> Any:
        """Return the integers nearest to values, with ties to even, within limits."""
        kind = ir.FunctionType(FLOATS, [FLOATS])
        nearest = cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.roundeven.v{LANES}f32")
        return self.limited(self.builder.call(nearest, [values]), lowest, highest)

    def half(self, values: Any) -> Any:
        """Return values rounded to float16, whose largest number stands for larger ones."""
        inside = self.limited(values, self.difference(_ZERO, _LARGEST), _LARGEST)
        return self.builder.fpext(self.builder.fptrunc(inside, _HALVES), FLOATS)

    def limited(self, values: Any, lowest: Any, highest: Any) -> Any:
        """Return values within limits."""
        return self.least(self.most(values, lowest), highest)

    def chosen(self, comparison: str, a: Any, b: Any, *pair: Any) -> Any:
        """Return, where a compares so with b, the first of two values, and elsewhere the second; by default a and b."""
        return self.builder.select(self.builder.fcmp_ordered(comparison, a, b), *(pair or (a, b)))

    def most(self, a: Any, b: Any) -> Any:
        """Return the larger values."""
        return self.chosen(">", a, b)

    def least(self, a: Any, b: Any) -> Any:
        """Return the smaller values."""
        return self.chosen("<", a, b)

    def size(self, values: Any) -> Any:
        """Return absolute values."""
        return self.most(values, self.difference(_ZERO, values))

    def farther(self, a: Any, b: Any) -> Any:
        """Return the values that are farther from zero, or the larger of two that are equally far."""
        size_a, size_b = self.size(a), self.size(b)
        return self.chosen(">", size_a, size_b, a, self.chosen("<", size_a, size_b, b, self.most(a, b)))

    def divided(self, values: Any, divisor: Any) -> Any:
        """Return values / divisor, where a divisor of zero counts as one."""
        return self.builder.fdiv(values, self.chosen("==", divisor, _ZERO, _ONE, divisor), flags=IN_ORDER)

    def product(self, a: Any, b: Any) -> Any:
        """Return a · b."""
        return self.builder.fmul(a, b, flags=IN_ORDER)

    def sum(self, a: Any, b: Any) -> Any:
        """Return a + b."""
        return self.builder.fadd(a, b, flags=IN_ORDER)

    def difference(self, a: Any, b: Any) -> Any:
        """Return a − b."""
        return self.builder.fsub(a, b, flags=IN_ORDER)

    def plus(self, a: Any, b: Any, c: Any) -> Any:
        """Return a + b · c."""
        return add_product(self.builder, a, b, c)

    def minus_products(self, a: Any, b: Any, c: Any, d: Any) -> Any:
        """Return a · b − c · d."""
        return self.difference(self.product(a, b), self.product(c, d))

    def better(self, found: list[Any], best: list[Any]) -> list[Any]:
        """Return, for each lane, the values of the candidate with the smaller error, which is the first one."""
        is_better = self.builder.fcmp_ordered("<", found[0], best[0])
        return [self.builder.select(is_better, *pair) for pair in zip(found, best, strict=True)]

    # Over numbers, candidates and lanes

    def over_numbers(self, first: list[Any], body: Callable[[Any, Any, list[Any]], list[Any]]) -> list[Any]:
        """Return values after all numbers. body: takes x, w and the values so far, and returns the next ones."""
        builder = self.builder

        def step(number: Any, values: list[Any]) -> list[Any]:
            x, w = (load(builder, at(builder, own, number, 4 * LANES), FLOATS) for own in (self._x, self._w))
            return body(x, w, values)

        return loop(builder, INDEX(0), self.numbers, 1, first, step)

    def over_candidates(self, best: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
        """Return the best of all candidates. body: takes a factor and the best values so far, and returns the next ones."""
        builder, factors = self.builder, self.field("factors")

        def step(number: Any, best: list[Any]) -> list[Any]:
            return body(repeated(builder, load(builder, at(builder, factors, number, 4), FLOAT), LANES), best)

        return loop(builder, INDEX(0), self.field("count"), 1, best, step)

    def over_lanes(self, values: Any, combined: Callable[[Any, Any], Any]) -> Any:
        """Return the combined values of all sub-blocks of a block, in each of its lanes."""
        distance = 1
        while distance < self.parts:
            places = ir.Constant(ir.VectorType(INT, LANES), [lane ^ distance for lane in range(LANES)])
            values = combined(values, self.builder.shuffle_vector(values, values, places))
            distance *= 2
        return values


def _affine_real(lanes: _Lanes) -> tuple[list[Any], list[Any]]:
    """Return the scales and minimums that span the numbers, and those that fit them best."""
    ends = lanes.over_numbers(
        [_ZERO, _all(-float("inf"))], lambda x, w, own: [lanes.least(own[0], x), lanes.most(own[1], x)]
    )
    low, span = ends[0], lanes.difference(ends[1], ends[0])
    w1, x1 = lanes.over_numbers([_ZERO] * 2, lambda x, w, own: [lanes.sum(own[0], w), lanes.plus(own[1], w, x)])

    def candidate(factor: Any, best: list[Any]) -> list[Any]:
        inverse = lanes.divided(factor, span)

        def of_integers(x: Any, w: Any, sums: list[Any]) -> list[Any]:
            q = lanes.rounded(lanes.product(lanes.difference(x, low), inverse), lanes.lowest, lanes.highest)
            wq = lanes.product(w, q)
            return [lanes.sum(sums[0], wq), lanes.plus(sums[1], wq, q), lanes.plus(sums[2], wq, x)]

        q1, q2, xq = lanes.over_numbers([_ZERO] * 3, of_integers)
        determinant = lanes.minus_products(w1, q2, q1, q1)
        limit = lanes.product(lanes.product(_LEAST_DETERMINANT, w1), q2)
        determinant = lanes.chosen(">", determinant, limit, determinant, _INFINITY)
        offset = lanes.least(lanes.divided(lanes.minus_products(q2, x1, q1, xq), determinant), _ZERO)
        scale = lanes.most(lanes.divided(lanes.difference(xq, lanes.product(offset, q1)), q2), _ZERO)
        first = lanes.product(scale, lanes.difference(lanes.product(scale, q2), lanes.sum(xq, xq)))
        rest = lanes.difference(lanes.plus(lanes.product(lanes.sum(scale, scale), q1), offset, w1), lanes.sum(x1, x1))
        return lanes.better([lanes.plus(first, offset, rest), scale, lanes.difference(_ZERO, offset)], best)

    spanning = [lanes.divided(span, lanes.highest), lanes.difference(_ZERO, low)]
    return spanning, lanes.over_candidates([_INFINITY, *spanning], candidate)[1:]


def _symmetric_real(lanes: _Lanes) -> tuple[list[Any], list[Any]]:
    """Return the scales that span the numbers, and those that fit them best; minimums are zero."""
    (extreme,) = lanes.over_numbers([_ZERO], lambda x, w, own: [lanes.farther(own[0], x)])

    def candidate(factor: Any, best: list[Any]) -> list[Any]:
        inverse = lanes.divided(factor, extreme)

        def of_integers(x: Any, w: Any, sums: list[Any]) -> list[Any]:
            q = lanes.rounded(lanes.product(x, inverse), lanes.lowest, lanes.highest)
            wq = lanes.product(w, q)
            return [lanes.plus(sums[0], wq, x), lanes.plus(sums[1], wq, q)]

        xq, q2 = lanes.over_numbers([_ZERO] * 2, of_integers)
        scale = lanes.divided(xq, q2)
        return lanes.better([lanes.difference(_ZERO, lanes.product(scale, xq)), scale], best)

    spanning = lanes.divided(extreme, lanes.lowest)
    return [spanning, _ZERO], [lanes.over_candidates([_ZERO, spanning], candidate)[1], _ZERO]


@dataclass(frozen=True)
class _Kind:
    """Types with minimums, or types without."""

    has_minimums: bool
    real: Callable[[_Lanes], tuple[list[Any], list[Any]]]

    def units(self, lanes: _Lanes, real: list[Any]) -> list[Any]:
        """Return what the integers of scales and minimums are multiplied by, so that the largest ones fit."""
        if not self.has_minimums:
            return [lanes.divided(lanes.over_lanes(real[0], lanes.farther), lanes.lowest_scale), _ZERO]
        return [lanes.divided(lanes.over_lanes(own, lanes.most), lanes.highest_scale) for own in real]

    def integers(self, lanes: _Lanes, real: list[Any], units: list[Any], near: int = 1) -> list[Any]:
        """Return the error of a block with these integers, and d, s, m and l; those up to `near` away are tried."""
        d, m = map(lanes.half, units)
        s = lanes.rounded(lanes.divided(real[0], d), lanes.lowest_scale, lanes.highest_scale)
        least = lanes.rounded(lanes.divided(real[1], m), _ZERO, lanes.highest_scale)
        error, s, least = _neighbors(lanes, (d, s, m, least), near, near * self.has_minimums)
        return [lanes.over_lanes(error, lanes.sum), d, s, m, least]

    def best_units(self, lanes: _Lanes, found: tuple[Any, Any, Any, Any]) -> list[Any]:
        """Return the best scales of blocks, by least squares for x ≈ d·(s·q) − m·l; those found where there are none."""
        aa, ab, bb, xa, xb = (lanes.over_lanes(own, lanes.sum) for own in _sums(lanes, found))
        determinant = lanes.minus_products(aa, bb, ab, ab)
        limit = lanes.product(lanes.product(_LEAST_DETERMINANT, aa), bb)
        other = lanes.chosen(">", aa, _ZERO, lanes.divided(xa, aa), found[0])
        own_d = lanes.divided(lanes.minus_products(xa, bb, xb, ab), determinant)
        own_m = lanes.divided(lanes.minus_products(xb, aa, xa, ab), determinant)
        d, m = (lanes.chosen(">", determinant, limit, own, usual) for own, usual in ((own_d, other), (own_m, _ZERO)))
        return [lanes.most(d, _ZERO), lanes.most(m, _ZERO)] if self.has_minimums else [d, m]


def _neighbors(lanes: _Lanes, found: tuple[Any, Any, Any, Any], near: int, near_least: int) -> list[Any]:
    """Return the least error of a sub-block with integers s and l up to so far away, and these integers."""
    builder, (d, s_0, m, l_0) = lanes.builder, found

    def within(size: int, best: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
        return loop(builder, INDEX(-size), INDEX(size + 1), 1, best, body)

    def moved(values: Any, step: Any, lowest: Any) -> Any:
        away = repeated(builder, builder.sitofp(step, FLOAT), LANES)
        return lanes.limited(lanes.sum(values, away), lowest, lanes.highest_scale)

    def of_scale(step: Any, best: list[Any]) -> list[Any]:
        s = moved(s_0, step, lanes.lowest_scale)
        ds = lanes.product(d, s)
        inverse = lanes.divided(_ONE, ds)

        def of_least(other: Any, best: list[Any]) -> list[Any]:
            least = moved(l_0, other, _ZERO)
            ml = lanes.product(m, least)

            def of_error(x: Any, w: Any, sums: list[Any]) -> list[Any]:
                shifted = lanes.sum(x, ml)
                q = lanes.rounded(lanes.product(shifted, inverse), lanes.lowest, lanes.highest)
                e = lanes.difference(lanes.product(ds, q), shifted)
                return [lanes.plus(sums[0], lanes.product(w, e), e)]

            return lanes.better([*lanes.over_numbers([_ZERO], of_error), s, least], best)

        return within(near_least, best, of_least)

    return within(near, [_INFINITY, _ZERO, _ZERO], of_scale)


def _sums(lanes: _Lanes, found: tuple[Any, Any, Any, Any]) -> list[Any]:
    """Return Σ w·a², Σ w·a·b, Σ w·b², Σ w·x·a and Σ w·x·b of each sub-block for x ≈ d·a + m·b, a = s·q and b = −l."""
    d, s, m, least = found
    ml, b = lanes.product(m, least), lanes.difference(_ZERO, least)
    inverse = lanes.divided(_ONE, lanes.product(d, s))

    def of_number(x: Any, w: Any, sums: list[Any]) -> list[Any]:
        a = lanes.product(s, lanes.rounded(lanes.product(lanes.sum(x, ml), inverse), lanes.lowest, lanes.highest))
        wa, wb = lanes.product(w, a), lanes.product(w, b)
        factors = ((wa, a), (wa, b), (wb, b), (wa, x), (wb, x))
        return [lanes.plus(total, *pair) for total, pair in zip(sums, factors, strict=True)]

    return lanes.over_numbers([_ZERO] * 5, of_number)


def _search_16(kind: _Kind, parts: int) -> Any:
    """Return a function of (address of a SEARCH, number of a group of 16 sub-blocks) that searches for this group."""

    def taken(context: Any, address: Any, group: Any) -> Any:
        return types.void(types.int64, types.int64), generate

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        job, group = arguments
        lanes = _Lanes(builder, job, group, parts)
        spanning, fitted = kind.real(lanes)
        spanning_units = kind.units(lanes, spanning)
        too_large = lanes.most(*(lanes.chosen(">", lanes.size(unit), _LARGEST, _ONE, _ZERO) for unit in spanning_units))
        best = kind.integers(lanes, fitted, kind.units(lanes, fitted))
        units = kind.best_units(lanes, (best[1], best[2], best[3], best[4]))
        real = [lanes.product(units[0], best[2]), lanes.product(units[1], best[4])]
        best = lanes.better(kind.integers(lanes, real, units), best)
        _, d, s, m, least = lanes.better(kind.integers(lanes, spanning, spanning_units, near=0), best)
        _store(lanes, group, (d, s, m, least, too_large))
        return context.get_dummy_value()

    return intrinsic(taken)


def _store(lanes: _Lanes, group: Any, scales: tuple[Any, ...]) -> None:
    """Write the scales, and the integers of the numbers."""
    builder, (d, s, m, least, _) = lanes.builder, scales
    groups = builder.udiv(builder.add(lanes.field("lanes"), INDEX(LANES - 1)), INDEX(LANES))
    for row, values in enumerate(scales):
        place = builder.add(builder.mul(groups, INDEX(row)), group)
        builder.store(values, lanes.place_of(lanes.field("scales"), place, 4, FLOATS), align=4)
    ml, inverse = lanes.product(m, least), lanes.divided(_ONE, lanes.product(d, s))
    own = at(builder, lanes.field("integers"), builder.mul(group, lanes.numbers), LANES)

    def one(x: Any, w: Any, number: list[Any]) -> list[Any]:
        q = lanes.rounded(lanes.product(lanes.sum(x, ml), inverse), lanes.lowest, lanes.highest)
        narrow = builder.trunc(builder.fptosi(q, INTS), ir.VectorType(BYTE, LANES))
        builder.store(narrow, lanes.place_of(own, number[0], 1, ir.VectorType(BYTE, LANES)), align=1)
        return [builder.add(number[0], INDEX(1))]

    lanes.over_numbers([INDEX(0)], one)


WORK: Any = None
"""The code of a kernel, which `add_kernel` puts in this place."""


def _search(address: Any, group: Any) -> None:
    WORK(address, group)


_AFFINE, _SYMMETRIC = _Kind(True, _affine_real), _Kind(False, _symmetric_real)
for _name, _kind, _parts in (("affine_8", _AFFINE, 8), ("affine_16", _AFFINE, 16), ("symmetric_16", _SYMMETRIC, 16)):
    add_kernel(f"search_{_name}", BLOCK, _search, _search_16(_kind, _parts))


@kernel(JOB, calls=("parallel_for",))
def search(address: Any) -> None:
    """Search for all blocks, 16 sub-blocks at a time."""
    job = search_at(address)
    call(kernels_at(job.kernels).parallel_for, (job.search, address, (job.lanes + LANES - 1) // LANES))
