"""The steps of rounding to K types that read every number (engine/checkpoint/gguf/rounding_steps.py), compiled.

A register holds one number of each of 16 sub-blocks, so that nothing is ever added across a register. Each call of a block
kernel copies the numbers of its sub-blocks, which are far apart, and reads the copy once for each candidate.

Shape suffixes: N numbers of a sub-block, L sub-blocks, C candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.compiler.compiling import BLOCK, JOB, add_kernel, kernel
from engine.kernels.compiler.instructions import (
    FLOAT,
    FLOATS,
    IN_ORDER,
    INDEX,
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
        ("step", np.int64),  # address of the kernel of 16 sub-blocks
        *((name, np.int64) for name in ("x", "w")),  # [N, L] float32: numbers, and how much their squared errors count
        ("numbers", np.int64),  # N
        ("lanes", np.int64),  # L, a multiple of 16
        ("inputs", np.int64),  # [2, L] or [4, L] float32
        ("factors", np.int64),  # [C] float32
        ("count", np.int64),  # C
        ("near", np.int64),
        ("near_least", np.int64),
        ("results", np.int64),  # [1 to 5, L] float32
        ("lowest", np.float32),  # of the integers of numbers
        ("highest", np.float32),
        ("lowest_scale", np.float32),  # of the integers of scales
        ("highest_scale", np.float32),
    ],
    align=True,
)
"""Arguments of one step."""
search_at = record_at(SEARCH)
MOST_NUMBERS = 32
"""The most numbers of a sub-block."""
_ZERO, _ONE, _INFINITY, _LEAST_DETERMINANT = (
    ir.Constant(FLOATS, [value] * LANES) for value in (0.0, 1.0, float("inf"), float(np.float32(1e-6)))
)


class _Lanes:
    """16 sub-blocks in the lanes of registers, and arithmetic on them."""

    def __init__(self, builder: Any, job: Any, own: list[Any], numbers: Any) -> None:
        """job: address of a SEARCH. own: addresses of the numbers and of their weights, [N, 16]. numbers: N."""
        self.builder, self.job, (self._x, self._w), self._numbers = builder, job, own, numbers
        self.lowest, self.highest = self.field("lowest"), self.field("highest")

    def field(self, name: str) -> Any:
        """Return a field of the job: a float in all lanes, or an integer."""
        value = _field(self.builder, self.job, name)
        return repeated(self.builder, value, LANES) if value.type == FLOAT else value

    def candidates(self, best: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
        """Return the best of all candidates. body: takes a factor and the best values so far, and returns the next ones."""
        builder, factors = self.builder, self.field("factors")

        def step(number: Any, best: list[Any]) -> list[Any]:
            return body(repeated(builder, load(builder, at(builder, factors, number, 4), FLOAT), LANES), best)

        return loop(builder, INDEX(0), self.field("count"), 1, best, step)

    def rounded(self, values: Any, lowest: Any, highest: Any) -> Any:
        """Return the integers nearest to values, with ties to even, within limits."""
        kind = ir.FunctionType(FLOATS, [FLOATS])
        nearest = cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.roundeven.v{LANES}f32")
        return self.limited(self.builder.call(nearest, [values]), lowest, highest)

    def limited(self, values: Any, lowest: Any, highest: Any) -> Any:
        """Return values within limits."""
        return self.least(self.most(values, lowest), highest)

    def most(self, a: Any, b: Any) -> Any:
        """Return the larger values."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def least(self, a: Any, b: Any) -> Any:
        """Return the smaller values."""
        return self.builder.select(self.builder.fcmp_ordered("<", a, b), a, b)

    def divided(self, values: Any, divisor: Any) -> Any:
        """Return values / divisor, where a divisor of zero counts as one."""
        is_zero = self.builder.fcmp_ordered("==", divisor, _ZERO)
        return self.builder.fdiv(values, self.builder.select(is_zero, _ONE, divisor), flags=IN_ORDER)

    def product(self, a: Any, b: Any) -> Any:
        """Return a · b."""
        return self.builder.fmul(a, b, flags=IN_ORDER)

    def difference(self, a: Any, b: Any) -> Any:
        """Return a − b."""
        return self.builder.fsub(a, b, flags=IN_ORDER)

    def plus(self, a: Any, b: Any, c: Any) -> Any:
        """Return a + b · c."""
        return add_product(self.builder, a, b, c)

    def summed(self, count: int, body: Callable[[Any, Any, list[Any]], list[Any]]) -> list[Any]:
        """Return `count` sums over the numbers. body: takes x, w and the sums so far, and returns the next ones."""
        builder = self.builder

        def step(number: Any, sums: list[Any]) -> list[Any]:
            x, w = (load(builder, at(builder, own, number, 4 * LANES), FLOATS) for own in (self._x, self._w))
            return body(x, w, sums)

        return loop(builder, INDEX(0), self._numbers, 1, [_ZERO] * count, step)

    def better(self, found: list[Any], best: list[Any]) -> list[Any]:
        """Return, for each sub-block, the values of the candidate with the smaller error, which is the first one."""
        is_better = self.builder.fcmp_ordered("<", found[0], best[0])
        return [self.builder.select(is_better, *pair) for pair in zip(found, best, strict=True)]


Step = Callable[[_Lanes, list[Any]], list[Any]]
"""Takes 16 sub-blocks and their inputs, and returns their results."""


def _affine_fit(lanes: _Lanes, inputs: list[Any]) -> list[Any]:
    builder, (low, span) = lanes.builder, inputs

    def of_weights(x: Any, w: Any, sums: list[Any]) -> list[Any]:
        return [builder.fadd(sums[0], w, flags=IN_ORDER), lanes.plus(sums[1], w, x)]

    w1, x1 = lanes.summed(2, of_weights)

    def candidate(factor: Any, best: list[Any]) -> list[Any]:
        inverse = lanes.divided(factor, span)

        def of_integers(x: Any, w: Any, sums: list[Any]) -> list[Any]:
            q = lanes.rounded(lanes.product(lanes.difference(x, low), inverse), lanes.lowest, lanes.highest)
            wq = lanes.product(w, q)
            return [builder.fadd(sums[0], wq, flags=IN_ORDER), lanes.plus(sums[1], wq, q), lanes.plus(sums[2], wq, x)]

        q1, q2, xq = lanes.summed(3, of_integers)
        determinant = lanes.difference(lanes.product(w1, q2), lanes.product(q1, q1))
        limit = lanes.product(lanes.product(_LEAST_DETERMINANT, w1), q2)
        determinant = builder.select(builder.fcmp_ordered(">", determinant, limit), determinant, _INFINITY)
        offset = lanes.divided(lanes.difference(lanes.product(q2, x1), lanes.product(q1, xq)), determinant)
        offset = lanes.least(offset, _ZERO)
        scale = lanes.most(lanes.divided(lanes.difference(xq, lanes.product(offset, q1)), q2), _ZERO)
        twice = builder.fadd(scale, scale, flags=IN_ORDER)
        first = lanes.product(scale, lanes.difference(lanes.product(scale, q2), builder.fadd(xq, xq, flags=IN_ORDER)))
        rest = lanes.difference(lanes.plus(lanes.product(twice, q1), offset, w1), builder.fadd(x1, x1, flags=IN_ORDER))
        return lanes.better([lanes.plus(first, offset, rest), scale, lanes.difference(_ZERO, offset)], best)

    first = [_INFINITY, lanes.divided(span, lanes.highest), lanes.difference(_ZERO, low)]
    return lanes.candidates(first, candidate)[1:]


def _symmetric_fit(lanes: _Lanes, inputs: list[Any]) -> list[Any]:
    extreme = inputs[0]

    def candidate(factor: Any, best: list[Any]) -> list[Any]:
        inverse = lanes.divided(factor, extreme)

        def of_integers(x: Any, w: Any, sums: list[Any]) -> list[Any]:
            q = lanes.rounded(lanes.product(x, inverse), lanes.lowest, lanes.highest)
            wq = lanes.product(w, q)
            return [lanes.plus(sums[0], wq, x), lanes.plus(sums[1], wq, q)]

        xq, q2 = lanes.summed(2, of_integers)
        scale = lanes.divided(xq, q2)
        return lanes.better([lanes.difference(_ZERO, lanes.product(scale, xq)), scale], best)

    first = [_ZERO, lanes.divided(extreme, lanes.lowest)]
    return lanes.candidates(first, candidate)[1:]


def _neighbors(lanes: _Lanes, inputs: list[Any]) -> list[Any]:
    builder, (s_L, l_L, d_L, m_L) = lanes.builder, inputs
    near, near_least, lowest, highest = map(lanes.field, ("near", "near_least", "lowest_scale", "highest_scale"))

    def within(size: Any, best: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
        return loop(builder, builder.neg(size), builder.add(size, INDEX(1)), 1, best, body)

    def moved(values: Any, step: Any, least: Any) -> Any:
        away = repeated(builder, builder.sitofp(step, FLOAT), LANES)
        return lanes.limited(builder.fadd(values, away, flags=IN_ORDER), least, highest)

    def of_scale(step: Any, best: list[Any]) -> list[Any]:
        s = moved(s_L, step, lowest)
        ds = lanes.product(d_L, s)
        inverse = lanes.divided(_ONE, ds)

        def of_least(other: Any, best: list[Any]) -> list[Any]:
            least = moved(l_L, other, _ZERO)
            ml = lanes.product(m_L, least)

            def of_error(x: Any, w: Any, sums: list[Any]) -> list[Any]:
                shifted = builder.fadd(x, ml, flags=IN_ORDER)
                q = lanes.rounded(lanes.product(shifted, inverse), lanes.lowest, lanes.highest)
                e = lanes.difference(lanes.product(ds, q), shifted)
                return [lanes.plus(sums[0], lanes.product(w, e), e)]

            return lanes.better([*lanes.summed(1, of_error), s, least], best)

        return within(near_least, best, of_least)

    return within(near, [_INFINITY, _ZERO, _ZERO], of_scale)


def _sums(lanes: _Lanes, inputs: list[Any]) -> list[Any]:
    s_L, l_L, d_L, m_L = inputs
    ml, b = lanes.product(m_L, l_L), lanes.difference(_ZERO, l_L)
    inverse = lanes.divided(_ONE, lanes.product(d_L, s_L))

    def of_number(x: Any, w: Any, sums: list[Any]) -> list[Any]:
        shifted = lanes.builder.fadd(x, ml, flags=IN_ORDER)
        a = lanes.product(s_L, lanes.rounded(lanes.product(shifted, inverse), lanes.lowest, lanes.highest))
        wa, wb = lanes.product(w, a), lanes.product(w, b)
        factors = ((wa, a), (wa, b), (wb, b), (wa, x), (wb, x))
        return [lanes.plus(total, *pair) for total, pair in zip(sums, factors, strict=True)]

    return lanes.summed(5, of_number)


def _field(builder: Any, job: Any, name: str) -> Any:
    """Return a field of the SEARCH at an address."""
    fields: Any = SEARCH.fields
    kind, offset = fields[name][:2]
    return load(builder, builder.add(job, INDEX(offset)), INDEX if kind == np.int64 else FLOAT)


def _copied(builder: Any, source: Any, stride: Any, count: Any) -> Any:
    """Copy `count` registers, `stride` bytes from one to the next, to the stack, and return their address there."""
    copy = builder.ptrtoint(cgutils.alloca_once(builder, FLOATS, size=MOST_NUMBERS), INDEX)

    def one(number: Any, _: list[Any]) -> list[Any]:
        values = load(builder, builder.add(source, builder.mul(number, stride)), FLOATS)
        builder.store(values, builder.inttoptr(at(builder, copy, number, 4 * LANES), FLOATS.as_pointer()), align=4)
        return []

    loop(builder, INDEX(0), count, 1, [], one)
    return copy


def _of_16(step: Step, inputs: int) -> Any:
    """Return a function of (address of a SEARCH, number of a group of 16 sub-blocks) that takes a step for the group."""

    def taken(context: Any, address: Any, group: Any) -> Any:
        return types.void(types.int64, types.int64), generate

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        job, group = arguments
        row, first = (builder.mul(value, INDEX(size)) for value, size in ((_field(builder, job, "lanes"), 4), (group, 64)))

        def own(name: str) -> Any:
            return builder.add(_field(builder, job, name), first)

        numbers = _field(builder, job, "numbers")
        lanes = _Lanes(builder, job, [_copied(builder, own(name), row, numbers) for name in ("x", "w")], numbers)
        given = [
            load(builder, builder.add(own("inputs"), builder.mul(row, INDEX(place))), FLOATS) for place in range(inputs)
        ]
        for place, values in enumerate(step(lanes, given)):
            result = builder.add(own("results"), builder.mul(row, INDEX(place)))
            builder.store(values, builder.inttoptr(result, FLOATS.as_pointer()), align=4)
        return context.get_dummy_value()

    return intrinsic(taken)


WORK: Any = None
"""The code of a kernel, which `add_kernel` puts in this place."""


def _take(address: Any, group: Any) -> None:
    WORK(address, group)


STEPS: dict[str, tuple[Step, int]] = {
    "affine_fit": (_affine_fit, 2),
    "symmetric_fit": (_symmetric_fit, 1),
    "neighbors": (_neighbors, 4),
    "sums": (_sums, 4),
}
"""Each step, and the number of its inputs."""
for _name, _work in STEPS.items():
    add_kernel(f"{_name}_of_16", BLOCK, _take, _of_16(*_work))


@kernel(JOB, calls=("parallel_for",))
def search(address: Any) -> None:
    """Take a step for all sub-blocks."""
    job = search_at(address)
    call(kernels_at(job.kernels).parallel_for, (job.step, address, job.lanes // LANES))
