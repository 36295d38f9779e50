"""Vectors rounded to 8 bits, as they are multiplied with low-bit matrices and with blocks of GGUF's types.

Each 32 values share a scale. Where several weights share a byte, a product unpacks the first weights of 64 bytes into one
register, then the second ones, and so on. The values of a vector lie in the order in which weights are unpacked.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.kernels.compiler.compiling import add_kernel, inline
from engine.kernels.compiler.instructions import (
    BYTE,
    FLOAT,
    FLOATS,
    IN_ORDER,
    INDEX,
    INT,
    INTS,
    LANES,
    at,
    joined,
    load,
    loop,
    repeated,
    same,
    taken,
)
from engine.kernels.dot_products import PREPARE

ROUNDED = 32
"""Number of values of a vector that share a scale."""
CHUNK = 512
"""Number of weights in one step of a product. Their scales fill a vector register, or a part of one."""
UNIT = {8: 64, 4: 128, 3: 256, 2: 256}
"""Number of weights that are unpacked together, by their bits."""


@inline
def place_in_unit(weight: Any, bits: Any, unit: Any) -> Any:
    """Return the place of a weight of a unit, or of 32 weights at the end of a row, in the registers that it is unpacked to.

    With 8, 4 and 2 bits, the first weights of all bytes precede the second ones. With 3 bits, the first eight of each 32
    weights precede the second eight of each, and so on.
    """
    if bits == 8:
        return weight
    if bits == 3:
        return weight % ROUNDED // 8 * (unit // 4) + weight // ROUNDED * 8 + weight % 8
    in_a_byte = 8 // bits
    return weight // in_a_byte + weight % in_a_byte * (unit // in_a_byte)


def rounder(bits: int, unit: int, offset: float) -> Any:
    """Return a function of (address of I float32 values, I, target) that rounds each 32 values to 8 bits.

    The I bytes are followed by two rows of float32, with one number for each 32 values: the scales, and scale · Σ rounded ·
    offset. bits, unit: of the weights, for the order of the values: in whole units, and then in runs of 32.
    """
    count = 1 if bits == 8 else (4 if bits == 3 else 8 // bits)  # of runs of a unit, one after the other
    each = ROUNDED // count
    order = [place_in_unit.py_func(value, bits, ROUNDED) for value in range(ROUNDED)]
    sources = sorted(range(ROUNDED), key=order.__getitem__)

    def rounds(context: Any, values: Any, inputs: Any, target: Any) -> Any:
        return types.void(*[types.int64] * 3), generate

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, inputs, target = arguments
        groups, scales = builder.udiv(inputs, INDEX(ROUNDED)), builder.add(target, inputs)
        offsets = at(builder, scales, groups, 4)

        def rounding(size: int) -> Any:
            """Return the body of a loop over groups, which lie in units of so many values."""

            def body(group: Any, _: list[Any]) -> list[Any]:
                first = builder.mul(group, INDEX(ROUNDED))
                place = builder.urem(first, INDEX(size))
                start = builder.add(builder.sub(first, place), builder.udiv(place, INDEX(count)))
                halves = [load(builder, at(builder, values, builder.add(first, INDEX(h)), 4), FLOATS) for h in (0, LANES)]
                scale, inverse = _scale_of(builder, halves)
                rounded = [_rounded(builder, half, inverse) for half in halves]
                data = builder.trunc(joined(builder, rounded), ir.VectorType(BYTE, ROUNDED))
                for run in range(count):
                    part = taken(builder, data, sources[run * each : (run + 1) * each])
                    own = builder.add(builder.add(target, start), INDEX(run * size // count))
                    builder.store(part, builder.inttoptr(own, part.type.as_pointer()), align=1)
                total = builder.sitofp(_reduced(builder, "add", builder.add(*rounded)), FLOAT)
                shift = builder.fmul(builder.fmul(scale, total, flags=IN_ORDER), FLOAT(offset), flags=IN_ORDER)
                for row, value in ((scales, scale), (offsets, shift)):
                    builder.store(value, builder.inttoptr(at(builder, row, group, 4), FLOAT.as_pointer()), align=1)
                return []

            return body

        whole = builder.mul(builder.udiv(inputs, INDEX(unit)), INDEX(unit // ROUNDED))
        loop(builder, INDEX(0), whole, 1, [], rounding(unit))
        loop(builder, whole, groups, 1, [], rounding(ROUNDED))
        return context.get_dummy_value()

    return intrinsic(rounds)


def _reduced(builder: Any, operation: str, vector: Any) -> Any:
    """Return one integer: the lanes of a vector, joined by an operation."""
    kind = ir.FunctionType(INT, [vector.type])
    name = f"llvm.vector.reduce.{operation}.v{vector.type.count}i32"
    return builder.call(builder.module.declare_intrinsic(name, fnty=kind), [vector])


def _scale_of(builder: Any, halves: list[Any]) -> tuple[Any, Any]:
    """Return the scale of 32 values, NaN where one is not finite, and its inverse."""
    magnitudes = [builder.and_(builder.bitcast(half, INTS), same(INTS, 0x7FFFFFFF)) for half in halves]
    larger = builder.select(builder.icmp_unsigned(">", *magnitudes), *magnitudes)
    largest = builder.bitcast(_reduced(builder, "umax", larger), FLOAT)  # magnitudes are ordered as their bits are
    zero = builder.fmul(largest, FLOAT(0.0), flags=IN_ORDER)
    scale = builder.fadd(builder.fdiv(largest, FLOAT(127.0), flags=IN_ORDER), zero, flags=IN_ORDER)
    inverse = builder.fdiv(FLOAT(127.0), largest, flags=IN_ORDER)
    return scale, builder.select(builder.fcmp_ordered(">", largest, FLOAT(0.0)), inverse, FLOAT(0.0))


def _rounded(builder: Any, values: Any, inverse: Any) -> Any:
    """Return 16 values times the inverse of their scale as integers."""
    nearest = builder.module.declare_intrinsic("llvm.rint.v16f32", fnty=ir.FunctionType(FLOATS, [FLOATS]))
    scaled = builder.fmul(values, repeated(builder, inverse, LANES), flags=IN_ORDER)
    return builder.fptosi(builder.call(nearest, [scaled]), INTS)


WORK: Any = None
"""The code of a kernel, which `add_kernel` puts in this place."""


def round_vector(values: Any, inputs: Any, target: Any) -> None:
    """Round a vector for weights. A kernel is made of it with each `rounder`."""
    WORK(values, inputs, target)


for _bits, _offset in ((8, 128.0), (4, 8.0), (3, 4.0), (2, 2.0)):
    add_kernel(f"prepare_{_bits}", PREPARE, round_vector, rounder(_bits, UNIT[_bits], _offset))
