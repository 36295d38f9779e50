"""The products that decoding and prompts consist of, compiled by Numba: matrices times a few vectors, or many.

Matrices are of bfloat16, or of 8 or 4 bits with a bfloat16 scale for each group of 32 or 128 weights. Vectors beside the
former are of bfloat16 where the processor has an instruction for that (AVX512-BF16), of float32 elsewhere. Beside the latter
each 32 values are rounded to 8 bits and share a scale, so that processors that have one for it (VNNI) multiply four pairs of
integers in a lane at once.

Decoding is bound by the memory that its weights come from. These kernels read each weight once for all vectors, a block of
rows after the other, one or two streams per thread, and add up in float32. One call does what torch
needs a dozen for: several matrices on the same vectors, or all chosen experts of a layer, each on the tokens that chose it.
They take addresses: a weight's bits are read where they lie, and nothing is wrapped or checked on the way.
`engine/kernels/linear.py` checks and calls them.

Prompts are bound by multiplying. Vectors are packed into panels, where the same two inputs of 16 vectors fill a register: it
is multiplied with a pair of weights that is repeated 16 times, and nothing is added up across lanes. Four matrix rows and
up to six such registers keep their sums in registers, and every instruction but 10 of 34 multiplies. Weights of few bits are
widened first, a block of rows at a time.

Products are written as LLVM instructions, because a compiler that vectorises a loop adds up in another order for each
number of vectors. Here there is one order, so that what a sequence gets does not depend on what is computed beside it. All
is in one file, because Numba looks at no other for whether what it kept on disk is still current.

Optional (`pip install moe-compress[fast]`); without Numba the same products run in torch.

Shape suffixes: T tokens, O output features, I input features, S slots (chosen experts), N experts, D hidden, F expert width,
M matrices or pairs of token and slot, B sequences, G key-value heads, H query heads, R query heads of one group,
P positions or panels, E head dimension, W matrix rows of a block, A addresses of an expert's tensors, Z places of panels,
C pairs of inputs.
"""

from __future__ import annotations

import ctypes
from itertools import accumulate
from typing import Any

import numba
import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

MOST_ROWS, FEWEST_ROWS = 128, 32
"""Matrix rows that one thread multiplies with all vectors before it goes on: the longer it stays with one matrix, the faster
memory gives it. Of few bits up to twice as many, which are still fewer bytes."""
BLOCKS_OF_A_THREAD = 8
"""At least so many where rows suffice, so that threads end together."""
_MATHS = {"reassoc", "contract", "nsz"}
"""Sums may be reordered, so that they use vector registers; NaN and infinity stay what they are."""
_LANES = 16
_SUMS, _HALF_SUMS = 4, 2
"""Vector registers that one product is added up in, and where pairs of bfloat16 are multiplied."""
_AHEAD = {16: 8192, 8: 4096, 4: 8192}
"""Bytes of a matrix of so many bits that are asked for before they are used. The processor's own guessing stops at the end
of each 4 kB, and instructions in flight do not reach far where each byte is multiplied with several vectors."""
_OF_PRODUCTS = "void(uint64, int64, uint64[:, ::1], UniTuple(int64, 2), int64[::1], int64, int64, uint16[:, ::1])"
_OF_SWIGLU = (
    "void(uint64, uint64[:, :, ::1], UniTuple(int64, 2), int64[:, ::1], float32[:, ::1], float32[:, ::1], int64, "
    "UniTuple(float32, 2), int64, uint16[:, ::1])"
)
_PANEL_VECTORS = 6
"""Vector registers of tokens that four matrix rows are multiplied with at once: their sums fill the registers."""
_PANEL_INPUTS = 2048
"""Of so many inputs a panel stays in the second cache while matrix rows go by."""
_PANEL_ROWS = 128
"""Matrix rows that one thread takes at most before it goes on to the next expert."""
_NO_SINKS, _NO_SCALES = np.empty(0, np.float32), np.empty((0, 0), np.float32)
_NO_ROW_SCALES = np.empty(0, np.float32)
_NOT_SEEN = tuple(np.empty((0, 0, 0), kind) for kind in (np.int64, np.float32, np.uint16, np.uint16))
_FLOAT, _BYTE, _SHORT, _INT, _INDEX = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_FLOATS = ir.VectorType(_FLOAT, _LANES)

ROUNDED = 32
"""Values of a vector that share a scale where they are rounded to 8 bits."""
GROUP_SIZES = (32, 128)
"""Weights of few bits that share a scale."""
MULTIPLE_OF_OUTPUTS = 4
"""Of a matrix of few bits, or one that is multiplied with many rows."""
_CHUNK = 512
"""Weights of few bits that one step of a product takes: their scales fill a vector register, or a quarter of one."""
binding.initialize_native_asmparser()
_features = (numba.config.CPU_FEATURES or binding.get_host_cpu_features().flatten()).split(",")
MULTIPLIES_INTEGERS = "+avx512vnni" in _features and "+avx512vl" in _features
"""Whether this processor has the instruction that matrices of few bits are multiplied with."""
MULTIPLIES_BFLOAT16 = "+avx512bf16" in _features
"""Whether it multiplies bfloat16 as it is. Vectors beside such matrices are then bfloat16 too, otherwise float32."""


def _inline(function: Any) -> Any:
    return numba.njit(fastmath=_MATHS, inline="always", error_model="numpy")(function)


def _helper(function: Any) -> Any:
    return numba.njit(fastmath=_MATHS, nogil=True, error_model="numpy")(function)


@intrinsic  # type: ignore[untyped-decorator]
def _as_float(context: Any, bits: Any) -> Any:
    """The float32 with these 32 bits: a bfloat16 is the upper half of one."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return numba.float32(numba.uint32), generate


@intrinsic  # type: ignore[untyped-decorator]
def _as_bits(context: Any, value: Any) -> Any:
    """The 32 bits of a float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return numba.uint32(numba.float32), generate


def _pointer_to(value: Any) -> Any:
    """A function that gives the values of a type that begin at an address."""
    kind = types.CPointer(value)

    def pointer(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(kind))

        return kind(types.uint64), generate

    return intrinsic(pointer)


_pointer, _floats = _pointer_to(types.uint16), _pointer_to(types.float32)
_bytes, _pairs = _pointer_to(types.int8), _pointer_to(types.uint32)


@_inline
def _widen(bits: Any) -> Any:
    return _as_float(np.uint32(bits) << np.uint32(16))


@_inline
def _narrow(value: Any) -> Any:
    """float32 to the nearest bfloat16's bits, ties to even."""
    bits = _as_bits(value)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@_inline
def _narrow_pair(low: Any, high: Any) -> Any:
    return np.uint32(_narrow(low)) | np.uint32(_narrow(high)) << np.uint32(16)


@_inline
def _exp(x: Any) -> Any:
    """e^x in float32 to 2 units in the last place, in operations that vectorise: 2^n · e^r with |r| ≤ ln(2) / 2."""
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    n = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
    r = (x - n * np.float32(0.693359375)) + n * np.float32(2.12194440e-4)
    series = np.float32(1.0 / 720.0)
    for coefficient in (1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0):
        series = series * r + np.float32(coefficient)
    return series * _as_float(np.uint32(np.int32(n) + np.int32(127)) << np.uint32(23))


@_inline
def _wide_vector(address: Any, length: Any) -> Any:
    bits = numba.carray(_pointer(address), (length,))
    wide = np.empty(length, np.float32)
    for index in range(length):
        wide[index] = _widen(bits[index])
    return wide


def _compiled(signature: str | None, parallel: bool = True) -> Any:
    """Compiled when this file is imported; without a signature not before it is called."""
    return numba.njit(signature, parallel=parallel, fastmath=_MATHS, nogil=True, cache=True, error_model="numpy")


def _tile(rows: int) -> Any:
    """A function of (address of I bfloat16, address of R vectors of I float32, I, address of the results, stride).

    The product with vector r goes to place `r · stride` of the float32 results. One matrix row at a time, because memory
    gives one stream faster than several; with several sums, because additions to one would wait for each other.
    """

    def tile(context: Any, weights_I: Any, x_RI: Any, inputs: Any, results: Any, stride: Any) -> Any:
        return types.void(types.uint64, types.uint64, types.int64, types.uint64, types.int64), generate

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weight_address, x_address, inputs, result_address, stride = arguments
        x_rows = [_at(builder, x_address, builder.mul(inputs, _INDEX(r)), 4) for r in range(rows)]

        def multiplied(size: int, parts: int) -> Any:
            def step(index: Any, sums: list[Any]) -> list[Any]:
                made = []
                for part in range(parts):
                    place = builder.add(index, _INDEX(part * size))
                    w = _widened(builder, _at(builder, weight_address, place, 2), size)
                    if rows > 1 and part % 2 == 0:
                        _fetch(builder, builder.add(_at(builder, weight_address, place, 2), _INDEX(_AHEAD[16])))
                    x = [_load(builder, _at(builder, row, place, 4), _many(_FLOAT, size)) for row in x_rows]
                    made += [builder.fmul(w, each, flags=("contract",)) for each in x]
                return [builder.fadd(s, p, flags=("contract",)) for s, p in zip(sums, made, strict=True)]

            return step

        most, whole = builder.and_(inputs, _INDEX(-_LANES * _SUMS)), builder.and_(inputs, _INDEX(-_LANES))
        zeros = [ir.Constant(_FLOATS, [0.0] * _LANES)] * (rows * _SUMS)
        sums = _loop(builder, _INDEX(0), most, _LANES * _SUMS, zeros, multiplied(_LANES, _SUMS))
        while len(sums) > rows:
            half = len(sums) // 2
            sums = [builder.fadd(a, b) for a, b in zip(sums[:half], sums[half:], strict=True)]
        sums = _loop(builder, most, whole, _LANES, sums, multiplied(_LANES, 1))
        totals = _loop(builder, whole, inputs, 1, _added_up(builder, sums), multiplied(1, 1))
        for r in range(rows):
            place = _at(builder, result_address, builder.mul(stride, _INDEX(r)), 4)
            builder.store(totals[r], builder.inttoptr(place, _FLOAT.as_pointer()))
        return context.get_dummy_value()

    return intrinsic(tile)


def _half_tile(rows: int, matrix_rows: int) -> Any:
    """A function like `_tile`'s, of vectors of bfloat16 and `matrix_rows` at once: for processors that multiply such pairs.

    The product of matrix row w and vector r goes to place `w + r · stride`.
    """
    pairs, size = ir.VectorType(_INT, _LANES), 2 * _LANES

    def tile(context: Any, weights_WI: Any, x_RI: Any, inputs: Any, results: Any, stride: Any) -> Any:
        return types.void(types.uint64, types.uint64, types.int64, types.uint64, types.int64), generate

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weight_address, x_address, inputs, result_address, stride = arguments
        x_rows = [_at(builder, x_address, builder.mul(inputs, _INDEX(r)), 2) for r in range(rows)]
        w_rows = [_at(builder, weight_address, builder.mul(inputs, _INDEX(w)), 2) for w in range(matrix_rows)]
        dot = ir.FunctionType(_FLOATS, [_FLOATS, pairs, pairs])
        products = rows * matrix_rows

        def dots(parts: int) -> Any:
            def step(index: Any, sums: list[Any]) -> list[Any]:
                made: list[Any] = []
                for part in range(parts):
                    place = builder.add(index, _INDEX(part * size))
                    w = [_load(builder, _at(builder, row, place, 2), pairs) for row in w_rows]
                    if rows > 1:
                        for row in w_rows:
                            _fetch(builder, builder.add(_at(builder, row, place, 2), _INDEX(_AHEAD[16])))
                    for row in x_rows:
                        x = _load(builder, _at(builder, row, place, 2), pairs)
                        for each in w:
                            given = [sums[len(made)], each, x]
                            made.append(builder.asm(dot, "vdpbf16ps $3, $2, $0", "=v,0,v,v", given, False))
                return made

            return step

        def alone(index: Any, totals: list[Any]) -> list[Any]:
            w = [_widened(builder, _at(builder, row, index, 2), 1) for row in w_rows]
            x = [_widened(builder, _at(builder, row, index, 2), 1) for row in x_rows]
            factors = [(x_r, w_r) for x_r in x for w_r in w]
            return [_add_product(builder, total, *pair) for total, pair in zip(totals, factors, strict=True)]

        most, whole = builder.and_(inputs, _INDEX(-size * _HALF_SUMS)), builder.and_(inputs, _INDEX(-size))
        zeros = [ir.Constant(_FLOATS, [0.0] * _LANES)] * (products * _HALF_SUMS)
        sums = _loop(builder, _INDEX(0), most, size * _HALF_SUMS, zeros, dots(_HALF_SUMS))
        while len(sums) > products:
            half = len(sums) // 2
            sums = [builder.fadd(a, b) for a, b in zip(sums[:half], sums[half:], strict=True)]
        sums = _loop(builder, most, whole, size, sums, dots(1))
        totals = [total for first in range(0, products, 4) for total in _added_up(builder, sums[first : first + 4])]
        for number, total in enumerate(_loop(builder, whole, inputs, 1, totals, alone)):
            r, w = divmod(number, matrix_rows)
            place = _at(builder, result_address, builder.add(builder.mul(stride, _INDEX(r)), _INDEX(w)), 4)
            builder.store(total, builder.inttoptr(place, _FLOAT.as_pointer()))
        return context.get_dummy_value()

    return intrinsic(tile)


def _panel_tile(vectors: int) -> Any:
    """A function of (address of 4 matrix rows of I bfloat16, I, address of a panel, pairs to multiply, address of results):
    adds the products of 4 rows with 16 · `vectors` tokens to the float32 results, row after row.

    A panel holds the same two inputs of all its tokens side by side, and so pair after pair. Each sum is one lane, added up
    in the order of the inputs whatever else is in the panel.
    """
    pairs, rows = ir.VectorType(_INT, _LANES), 4
    undefined, first_lane = ir.Constant(pairs, ir.Undefined), ir.Constant(pairs, [0] * _LANES)

    def tile(context: Any, weights: Any, inputs: Any, panel: Any, count: Any, results: Any) -> Any:
        return types.void(types.uint64, types.int64, types.uint64, types.int64, types.uint64), generate

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weight_address, inputs, panel, count, result_address = arguments
        w_rows = [_at(builder, weight_address, builder.mul(inputs, _INDEX(w)), 2) for w in range(rows)]
        next_rows = builder.mul(inputs, _INDEX(2 * rows))
        dot = ir.FunctionType(_FLOATS, [_FLOATS, pairs, pairs])

        def dots(parts: int) -> Any:
            def step(index: Any, sums: list[Any]) -> list[Any]:
                for row in w_rows:
                    _fetch(builder, builder.add(_at(builder, row, index, 4), next_rows))
                for part in range(parts):
                    place = builder.add(index, _INDEX(part))
                    begin = _at(builder, panel, place, 4 * _LANES * vectors)
                    x = [_load(builder, builder.add(begin, _INDEX(4 * _LANES * v)), pairs) for v in range(vectors)]
                    made: list[Any] = []
                    for row in w_rows:
                        pair = builder.insert_element(undefined, _load(builder, _at(builder, row, place, 4), _INT), _INT(0))
                        w = builder.shuffle_vector(pair, undefined, first_lane)
                        for each in x:
                            given = [sums[len(made)], w, each]
                            made.append(builder.asm(dot, "vdpbf16ps $3, $2, $0", "=v,0,v,v", given, False))
                    sums = made
                return sums

            return step

        places = [_at(builder, result_address, _INDEX(_LANES * each), 4) for each in range(rows * vectors)]
        whole = builder.and_(count, _INDEX(-4))
        sums = _loop(builder, _INDEX(0), whole, 4, [_load(builder, place, _FLOATS) for place in places], dots(4))
        sums = _loop(builder, whole, count, 1, sums, dots(1))
        for place, total in zip(places, sums, strict=True):
            builder.store(total, builder.inttoptr(place, _FLOATS.as_pointer()), align=4)
        return context.get_dummy_value()

    return intrinsic(tile)


@intrinsic  # type: ignore[untyped-decorator]
def _turn(context: Any, square: Any, stride: Any, turned: Any, turned_stride: Any) -> Any:
    """Write the transpose of 16 · 16 float32, rows of which begin `stride` values apart, `turned_stride` for the result."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, stride, target, target_stride = arguments
        rows = [_load(builder, _at(builder, address, builder.mul(stride, _INDEX(r)), 4), _FLOATS) for r in range(_LANES)]
        half = _LANES // 2
        while half:
            # Blocks of `half` lanes beside the diagonal change places with those below it.
            low = [lane if not lane & half else _LANES + lane - half for lane in range(_LANES)]
            high = [lane + half if not lane & half else _LANES + lane for lane in range(_LANES)]
            for r in (row for row in range(_LANES) if not row & half):
                pair = rows[r], rows[r + half]
                rows[r], rows[r + half] = (
                    builder.shuffle_vector(*pair, ir.Constant(ir.VectorType(_INT, _LANES), lanes)) for lanes in (low, high)
                )
            half //= 2
        for r, row in enumerate(rows):
            place = _at(builder, target, builder.mul(target_stride, _INDEX(r)), 4)
            builder.store(row, builder.inttoptr(place, _FLOATS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.uint64, types.int64, types.uint64, types.int64), generate


def _fetch(builder: Any, address: Any) -> None:
    """Have what lies there brought to the second cache; nothing happens where there is no memory."""
    pointer = ir.IntType(8).as_pointer()
    prefetch = builder.module.declare_intrinsic(
        "llvm.prefetch", [pointer], ir.FunctionType(ir.VoidType(), [pointer, _INT, _INT, _INT])
    )
    read, second_cache, of_data = _INT(0), _INT(2), _INT(1)
    builder.call(prefetch, [builder.inttoptr(address, pointer), read, second_cache, of_data])


def _many(kind: Any, size: int) -> Any:
    return kind if size == 1 else ir.VectorType(kind, size)


def _at(builder: Any, address: Any, index: Any, size: int) -> Any:
    return builder.add(address, builder.mul(index, _INDEX(size)))


def _load(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=2)


def _widened(builder: Any, address: Any, size: int) -> Any:
    """bfloat16 to float32: they are the upper halves."""
    half = ir.Constant(_many(_INT, size), 16 if size == 1 else [16] * size)
    bits = builder.zext(_load(builder, address, _many(_SHORT, size)), _many(_INT, size))
    return builder.bitcast(builder.shl(bits, half), _many(_FLOAT, size))


def _loop(builder: Any, start: Any, end: Any, step: int, values: list[Any], body: Any) -> list[Any]:
    """values = body(index, values) for each index from `start`, a multiple of `step`, to `end`."""
    before = builder.block
    head, inside, after = (builder.append_basic_block(name) for name in ("head", "inside", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    index, carried = builder.phi(_INDEX), [builder.phi(value.type) for value in values]
    builder.cbranch(builder.icmp_signed("<", index, end), inside, after)
    builder.position_at_end(inside)
    made = body(index, carried)
    following = builder.add(index, _INDEX(step))
    for phi, first, later in zip([index, *carried], [start, *values], [following, *made], strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(later, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return carried


def _added_up(builder: Any, vectors: list[Any]) -> list[Any]:
    """The sum of each of up to 4 vectors, always half onto half; the first steps are taken together."""

    def mixed(a: Any, b: Any, places: list[int]) -> Any:
        return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_INT, len(places)), places))

    def merged(a: Any, b: Any, group: int) -> Any:
        """Groups of so many lanes become half as long; those of a are followed by those of b."""
        starts = range(0, 2 * _LANES, group)
        lower = [start + lane for start in starts for lane in range(group // 2)]
        upper = [start + lane for start in starts for lane in range(group // 2, group)]
        return builder.fadd(mixed(a, b, lower), mixed(a, b, upper))

    four = [vectors[place % len(vectors)] for place in range(4)]
    first, second = merged(four[0], four[1], _LANES), merged(four[2], four[3], _LANES)
    fours = merged(first, second, _LANES // 2)  # four lanes of each
    twos = merged(fours, fours, 4)
    ones = merged(twos, twos, 2)
    return [builder.extract_element(ones, _INT(place)) for place in range(len(vectors))]


def _few_bits_tile(rows: int, bits: int) -> Any:
    """A function of (address of weights, address of their scales, weights that share one, address of R vectors as `_prepare`
    makes them, I, address of the results, stride).

    4 / R matrix rows of I weights, one after the other, times R vectors: the product of matrix row w and vector r goes to
    place `w + r · stride`. A weight is scale · (stored − 2^(bits−1)): what is stored is multiplied as it is, without a sign,
    and the vector's sums are taken off in the end.
    """
    unit = 64 * 8 // bits  # weights in the 64 bytes of a register

    def tile(context: Any, weights: Any, scales: Any, group: Any, x_RI: Any, inputs: Any, results: Any, stride: Any) -> Any:
        address, number = types.uint64, types.int64
        return types.void(address, address, number, address, number, address, number), generate

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weights, scales, group, x_address, inputs, result_address, stride = arguments
        whole = builder.and_(inputs, _INDEX(-_CHUNK))
        vectors = [_Rounded(builder, x_address, inputs, r) for r in range(rows)]
        weight_bytes = _parts(builder, inputs, 8, bits)
        # Divisions by a number that is not known here would take as long as a dozen products.
        shift = builder.select(builder.icmp_signed("==", group, _INDEX(ROUNDED)), _INDEX(5), _INDEX(7))
        scale_bytes = builder.mul(builder.lshr(inputs, shift), _INDEX(2))
        sums = []
        for matrix_row in range(MULTIPLE_OF_OUTPUTS // rows):
            row_weights = builder.add(weights, builder.mul(weight_bytes, _INDEX(matrix_row)))
            row_scales = builder.add(scales, builder.mul(scale_bytes, _INDEX(matrix_row)))

            def chunk(index: Any, sums: list[Any], weights: Any = row_weights, scales: Any = row_scales) -> list[Any]:
                """512 weights; of each vector three sums: two of products, one of what is to be taken off."""
                scales_of_16 = _scales_of_chunk(builder, _at(builder, scales, builder.lshr(index, shift), 2), group)
                own = [builder.fmul(scales_of_16, vector.scales(index, _LANES)) for vector in vectors]
                sums = list(sums)
                for r, vector in enumerate(vectors):
                    sums[3 * r + 2] = _add_product(builder, sums[3 * r + 2], scales_of_16, vector.offsets(index, _LANES))
                start = builder.add(weights, _parts(builder, index, 8, bits))
                for step in range(_CHUNK // unit):
                    stored = _stored(builder, _at(builder, start, _INDEX(64 * step), 1), bits, 64)
                    _fetch(builder, _at(builder, start, _INDEX(64 * step + _AHEAD[bits]), 1))
                    first = step * unit // ROUNDED
                    for r, vector in enumerate(vectors):
                        dots = vector.dots(builder.add(index, _INDEX(step * unit)), stored, 64)
                        each = _spread(builder, own[r], first, _LANES * ROUNDED // unit, _LANES)
                        sums[3 * r + step % 2] = _add_product(builder, sums[3 * r + step % 2], dots, each)
                return sums

            def rest(index: Any, sums: list[Any], weights: Any = row_weights, scales: Any = row_scales) -> list[Any]:
                """32 weights; of each vector a short sum of products, and one number to be taken off."""
                scale = _widened(builder, _at(builder, scales, builder.lshr(index, shift), 2), 1)
                stored = _stored(builder, builder.add(weights, _parts(builder, index, 8, bits)), bits, 4 * bits)
                made = []
                for r, vector in enumerate(vectors):
                    own = _repeated(builder, builder.fmul(scale, vector.scales(index, 1)), bits)
                    made.append(_add_product(builder, sums[2 * r], vector.dots(index, stored, 4 * bits), own))
                    made.append(_add_product(builder, sums[2 * r + 1], scale, vector.offsets(index, 1)))
                return made

            zero, nothing = ir.Constant(_FLOATS, [0.0] * _LANES), ir.Constant(_FLOAT, 0.0)
            few_zeros = ir.Constant(ir.VectorType(_FLOAT, bits), [0.0] * bits)
            long = _loop(builder, _INDEX(0), whole, _CHUNK, [zero] * (3 * rows), chunk)
            short = _loop(builder, whole, inputs, ROUNDED, [few_zeros, nothing] * rows, rest)
            for r in range(rows):
                sum_of_16 = builder.fsub(builder.fadd(long[3 * r], long[3 * r + 1]), long[3 * r + 2])
                lanes = [*range(bits), *[bits] * (_LANES - bits)]
                filled = builder.shuffle_vector(short[2 * r], few_zeros, ir.Constant(ir.VectorType(_INT, _LANES), lanes))
                taken_off = builder.insert_element(zero, short[2 * r + 1], _INT(0))
                sums.append(builder.fadd(sum_of_16, builder.fsub(filled, taken_off)))
        for place, total in enumerate(_added_up(builder, sums)):
            index = builder.add(builder.mul(stride, _INDEX(place % rows)), _INDEX(place // rows))
            builder.store(total, builder.inttoptr(_at(builder, result_address, index, 4), _FLOAT.as_pointer()))
        return context.get_dummy_value()

    return intrinsic(tile)


def _scales_of_chunk(builder: Any, address: Any, group: Any) -> Any:
    """The scale of each 32 of 512 weights."""
    with builder.if_else(builder.icmp_signed("==", group, _INDEX(ROUNDED))) as (one_each, shared):
        with one_each:
            own, after_own = _widened(builder, address, _LANES), builder.block
        with shared:
            of_four = _spread(builder, _widened(builder, address, 4), 0, 4, _LANES)
            after_shared = builder.block
    scales = builder.phi(_FLOATS)
    scales.add_incoming(own, after_own)
    scales.add_incoming(of_four, after_shared)
    return scales


class _Rounded:
    """One of the vectors that `_prepare` makes, as a tile reads it."""

    def __init__(self, builder: Any, address: Any, inputs: Any, place: int) -> None:
        self._builder = builder
        own = builder.add(inputs, builder.lshr(inputs, _INDEX(2)))
        self._values = builder.add(address, builder.mul(own, _INDEX(place)))
        self._scales = builder.add(self._values, inputs)
        self._offsets = builder.add(self._scales, builder.lshr(inputs, _INDEX(3)))

    def scales(self, index: Any, size: int) -> Any:
        return self._read(self._scales, index, size)

    def offsets(self, index: Any, size: int) -> Any:
        return self._read(self._offsets, index, size)

    def _read(self, address: Any, index: Any, size: int) -> Any:
        return _load(
            self._builder, _at(self._builder, address, _parts(self._builder, index, ROUNDED), 4), _many(_FLOAT, size)
        )

    def dots(self, index: Any, stored: list[Any], size: int) -> Any:
        """Sums of four products each, as floats; `stored`: registers of `size` bytes, which follow each other here."""
        builder, lanes = self._builder, ir.VectorType(_INT, size // 4)
        total = ir.Constant(lanes, [0] * (size // 4))
        for place, weights in enumerate(stored):
            address = _at(builder, self._values, builder.add(index, _INDEX(place * size)), 1)
            if not MULTIPLIES_INTEGERS:
                total = builder.add(total, self._dots_of_four(weights, address, size))
                continue
            total = builder.asm(
                ir.FunctionType(lanes, [lanes] * 3),
                "vpdpbusd $3, $2, $0",
                "=v,0,v,v",
                [total, builder.bitcast(weights, lanes), _load(builder, address, lanes)],
                False,
            )
        return builder.sitofp(total, ir.VectorType(_FLOAT, size // 4))

    def _dots_of_four(self, weights: Any, address: Any, size: int) -> Any:
        """The same without the instruction, so that all processors can compile this file."""
        builder, wide = self._builder, ir.VectorType(_INT, size)
        values = builder.sext(_load(builder, address, ir.VectorType(_BYTE, size)), wide)
        products = builder.mul(builder.zext(weights, wide), values)
        places = (ir.Constant(ir.VectorType(_INT, size // 4), [*range(first, size, 4)]) for first in range(4))
        first, *others = (builder.shuffle_vector(products, products, each) for each in places)
        for other in others:
            first = builder.add(first, other)
        return first


def _wide_group(bits: int) -> Any:
    """A function of (address of 32 weights, their scale, address of 32 bfloat16 values): what the weights stand for."""

    def wide(context: Any, weights: Any, scale: Any, results: Any) -> Any:
        return types.void(types.uint64, types.float32, types.uint64), generate

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, scale, target = arguments
        # 16 at a time: wider vectors of integers are taken apart.
        size = ROUNDED // 2
        halves = [address] if bits == 4 else [address, builder.add(address, _INDEX(size))]
        stored = [part for half in halves for part in _stored(builder, half, bits, size)]
        numbers = ir.VectorType(_INT, size)

        def each(value: int) -> Any:
            return ir.Constant(numbers, [value] * size)

        parts = []
        for values in stored:
            signed = builder.sub(builder.zext(values, numbers), each(1 << (bits - 1)))
            floats = builder.sitofp(signed, ir.VectorType(_FLOAT, size))
            product = builder.bitcast(builder.fmul(floats, _repeated(builder, scale, size)), numbers)
            # To the nearest bfloat16, ties to even, as in `_narrow`.
            odd = builder.and_(builder.lshr(product, each(16)), each(1))
            upper = builder.lshr(builder.add(builder.add(product, each(0x7FFF)), odd), each(16))
            parts.append(builder.trunc(upper, ir.VectorType(_SHORT, size)))
        in_turns = [place // 2 + place % 2 * size for place in range(ROUNDED)]
        order = ir.Constant(ir.VectorType(_INT, ROUNDED), in_turns if bits == 4 else [*range(ROUNDED)])
        short = builder.shuffle_vector(*parts, order)
        builder.store(short, builder.inttoptr(target, short.type.as_pointer()), align=2)
        return context.get_dummy_value()

    return intrinsic(wide)


def _stored(builder: Any, address: Any, bits: int, size: int) -> list[Any]:
    """`size` bytes of weights as registers of bytes: of 4 bits the first of each two, and then the second."""
    kind = ir.VectorType(_BYTE, size)
    loaded = _load(builder, address, kind)
    if bits == 8:
        return [loaded]
    low, pairs = ir.Constant(kind, [15] * size), ir.VectorType(_SHORT, size // 2)
    upper = builder.lshr(builder.bitcast(loaded, pairs), ir.Constant(pairs, [4] * (size // 2)))
    return [builder.and_(loaded, low), builder.and_(builder.bitcast(upper, kind), low)]


def _parts(builder: Any, index: Any, divisor: int, factor: int = 1) -> Any:
    """index · factor / divisor, without a remainder."""
    return builder.udiv(builder.mul(index, _INDEX(factor)), _INDEX(divisor))


def _spread(builder: Any, values: Any, first: int, times: int, size: int) -> Any:
    """A vector of the values from `first` on, each so many times."""
    places = ir.Constant(ir.VectorType(_INT, size), [first + lane // times for lane in range(size)])
    return builder.shuffle_vector(values, values, places)


def _add_product(builder: Any, total: Any, a: Any, b: Any) -> Any:
    return builder.fadd(total, builder.fmul(a, b, flags=("contract",)), flags=("contract",))


def _weigh(rows: int, size: int) -> Any:
    """A function of (address of P bfloat16 vectors, values from one to the next, P, address of R rows of P float32 weights,
    values from one row to the next, address of the results, stride).

    Σ_p weight_rp · vector_p, of `size` values, is added to the float32 results of row r, at `r · stride`.
    """
    kind = _many(_FLOAT, size)

    def weigh(
        context: Any, x_PE: Any, step: Any, count: Any, weights_RP: Any, weight_stride: Any, results: Any, stride: Any
    ) -> Any:
        integers, addresses = (types.int64, types.int64), types.uint64
        return types.void(addresses, *integers, addresses, types.int64, addresses, types.int64), generate

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x_address, step, count, weight_address, weight_stride, result_address, stride = arguments
        weight_rows = [_at(builder, weight_address, builder.mul(weight_stride, _INDEX(r)), 4) for r in range(rows)]
        places = [_at(builder, result_address, builder.mul(stride, _INDEX(r)), 4) for r in range(rows)]

        def add(index: Any, sums: list[Any]) -> list[Any]:
            x = _widened(builder, _at(builder, x_address, builder.mul(index, step), 2), size)
            weights = [_repeated(builder, _load(builder, _at(builder, row, index, 4), _FLOAT), size) for row in weight_rows]
            products = [builder.fmul(weight, x, flags=("contract",)) for weight in weights]
            return [builder.fadd(s, p, flags=("contract",)) for s, p in zip(sums, products, strict=True)]

        sums = _loop(builder, _INDEX(0), count, 1, [_load(builder, place, kind) for place in places], add)
        for place, total in zip(places, sums, strict=True):
            builder.store(total, builder.inttoptr(place, kind.as_pointer()), align=4)
        return context.get_dummy_value()

    return intrinsic(weigh)


def _repeated(builder: Any, value: Any, size: int) -> Any:
    if size == 1:
        return value
    one = builder.insert_element(ir.Constant(_many(_FLOAT, size), ir.Undefined), value, _INT(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_INT, size), [0] * size))


_ONE_VECTOR, _TWO_VECTORS, _FOUR_VECTORS = _tile(1), _tile(2), _tile(4)
if MULTIPLIES_BFLOAT16:
    _ONE_HALF, _PAIR_OF_1, _PAIR_OF_2 = _half_tile(1, 1), _half_tile(1, 2), _half_tile(2, 2)
    _PAIR_OF_3, _PAIR_OF_4 = _half_tile(3, 2), _half_tile(4, 2)
_VECTOR_BYTES = 2 if MULTIPLIES_BFLOAT16 else 4
"""Of a value beside bfloat16 weights."""
_ONE_OF_8, _TWO_OF_8, _FOUR_OF_8 = (_few_bits_tile(rows, 8) for rows in (1, 2, 4))
_ONE_OF_4, _TWO_OF_4, _FOUR_OF_4 = (_few_bits_tile(rows, 4) for rows in (1, 2, 4))
_WIDE_OF_8, _WIDE_OF_4 = _wide_group(8), _wide_group(4)


@_inline
def _vector_bytes(inputs: Any, bits: Any) -> Any:
    """Of a vector beside weights of so many bits."""
    return np.uint64(_VECTOR_BYTES * inputs if bits == 16 else inputs + inputs // 4)


@_inline
def _row_bytes(inputs: Any, bits: Any) -> Any:
    """Of a matrix row's weights."""
    return np.uint64(inputs * bits // 8)


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _multiply_wide(weights: Any, count: Any, inputs: Any, x_address: Any, rows: Any, results: Any, stride: Any) -> None:
    """`_multiply` of bfloat16 with float32 vectors."""
    for place in range(count):
        w = weights + np.uint64(2) * np.uint64(place * inputs)
        row = 0
        while row < rows:
            x = x_address + np.uint64(4) * np.uint64(row * inputs)
            y = results + np.uint64(4) * np.uint64(row * stride + place)
            vectors = 4 if rows - row >= 4 else (2 if rows - row >= 2 else 1)
            if vectors == 4:
                _FOUR_VECTORS(w, x, inputs, y, stride)
            elif vectors == 2:
                _TWO_VECTORS(w, x, inputs, y, stride)
            else:
                _ONE_VECTOR(w, x, inputs, y, stride)
            row += vectors


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _multiply_half(weights: Any, count: Any, inputs: Any, x_address: Any, rows: Any, results: Any, stride: Any) -> None:
    """`_multiply` of bfloat16 with bfloat16 vectors: two matrix rows at once share what is read of several vectors."""
    place = 0
    while place < count:
        w = weights + np.uint64(2) * np.uint64(place * inputs)
        alone = rows == 1 or place + 1 == count
        row = 0
        while row < rows:
            x = x_address + np.uint64(2) * np.uint64(row * inputs)
            y = results + np.uint64(4) * np.uint64(row * stride + place)
            vectors = 1 if alone else min(4, rows - row)
            if alone:
                _ONE_HALF(w, x, inputs, y, stride)
            elif vectors == 4:
                _PAIR_OF_4(w, x, inputs, y, stride)
            elif vectors == 3:
                _PAIR_OF_3(w, x, inputs, y, stride)
            elif vectors == 2:
                _PAIR_OF_2(w, x, inputs, y, stride)
            else:
                _PAIR_OF_1(w, x, inputs, y, stride)
            row += vectors
        place += 1 if alone else 2


_multiply_16 = _multiply_half if MULTIPLIES_BFLOAT16 else _multiply_wide


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _multiply(
    weights: Any, scales: Any, form: Any, count: Any, inputs: Any, x_address: Any, rows: Any, results: Any, stride: Any
) -> None:
    """`count` matrix rows of `inputs` weights times `rows` vectors, which `_prepare` made.

    `form`: bits of a weight, and weights that share a scale. The product of matrix row w and vector r goes to place
    `w + r · stride` of the float32 results.
    """
    bits, group = form
    if bits == 16:
        _multiply_16(weights, count, inputs, x_address, rows, results, stride)
        return
    row = 0
    while row < rows:
        vectors = 4 if rows - row >= 4 else (2 if rows - row >= 2 else 1)
        x = x_address + np.uint64(row) * _vector_bytes(inputs, bits)
        for place in range(0, count, MULTIPLE_OF_OUTPUTS // vectors):
            w = weights + np.uint64(place) * _row_bytes(inputs, bits)
            s = scales + np.uint64(place * (inputs // group) * 2)
            y = results + np.uint64(4) * np.uint64(row * stride + place)
            if bits == 8:
                if vectors == 4:
                    _FOUR_OF_8(w, s, group, x, inputs, y, stride)
                elif vectors == 2:
                    _TWO_OF_8(w, s, group, x, inputs, y, stride)
                else:
                    _ONE_OF_8(w, s, group, x, inputs, y, stride)
            elif vectors == 4:
                _FOUR_OF_4(w, s, group, x, inputs, y, stride)
            elif vectors == 2:
                _TWO_OF_4(w, s, group, x, inputs, y, stride)
            else:
                _ONE_OF_4(w, s, group, x, inputs, y, stride)
        row += vectors


_PANEL_OF_1, _PANEL_OF_2, _PANEL_OF_3 = _panel_tile(1), _panel_tile(2), _panel_tile(3)
_PANEL_OF_4, _PANEL_OF_5, _PANEL_OF_6 = _panel_tile(4), _panel_tile(5), _panel_tile(6)


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _multiply_panel(weights: Any, count: Any, inputs: Any, panel: Any, vectors: Any, results: Any) -> None:
    """Add `count` matrix rows, a multiple of 4, times a panel to float32 results, row after row."""
    for start in range(0, inputs, _PANEL_INPUTS):
        pairs = min(_PANEL_INPUTS, inputs - start) // 2
        x = panel + np.uint64(2 * _LANES * start * vectors)
        for row in range(0, count, 4):
            w = weights + np.uint64(2 * (row * inputs + start))
            y = results + np.uint64(4 * _LANES * row * vectors)
            if vectors == 6:
                _PANEL_OF_6(w, inputs, x, pairs, y)
            elif vectors == 5:
                _PANEL_OF_5(w, inputs, x, pairs, y)
            elif vectors == 4:
                _PANEL_OF_4(w, inputs, x, pairs, y)
            elif vectors == 3:
                _PANEL_OF_3(w, inputs, x, pairs, y)
            elif vectors == 2:
                _PANEL_OF_2(w, inputs, x, pairs, y)
            else:
                _PANEL_OF_1(w, inputs, x, pairs, y)


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _prepare(values_I: Any, bits: Any, target: Any) -> None:
    """A float32 vector as `_multiply` wants it beside weights of so many bits.

    Beside 16 as it is, or rounded to bfloat16. Beside fewer, each 32 values are rounded to 8 bits, and after the I bytes
    come two rows of float32, one number for each 32: scales, and scale · Σ rounded · 2^(bits−1). Beside 4 bits, which lie
    two in a byte, the first of each two values come before the second ones: in runs of 128 values as far as whole chunks go,
    then of 32.
    """
    inputs = values_I.shape[0]
    if bits == 16 and MULTIPLIES_BFLOAT16:
        half_I = numba.carray(_pointer(target), (inputs,))
        for index in range(inputs):
            half_I[index] = _narrow(values_I[index])
        return
    if bits == 16:
        plain_I = numba.carray(_floats(target), (inputs,))
        for index in range(inputs):
            plain_I[index] = values_I[index]
        return
    groups = inputs // ROUNDED
    rounded_I = numba.carray(_bytes(target), (inputs,))
    scales_G = numba.carray(_floats(target + np.uint64(inputs)), (groups,))
    offsets_G = numba.carray(_floats(target + np.uint64(inputs + 4 * groups)), (groups,))
    whole = inputs - inputs % _CHUNK
    for group in range(groups):
        first = group * ROUNDED
        largest = zero = np.float32(0.0)
        for index in range(first, first + ROUNDED):
            largest = max(largest, abs(values_I[index]))
            zero += values_I[index] * np.float32(0.0)  # NaN where a value is not finite
        scale = largest / np.float32(127.0) + zero
        inverse = np.float32(127.0) / largest if largest > np.float32(0.0) else np.float32(0.0)
        total = np.int32(0)
        run = 128 if first < whole else ROUNDED
        for index in range(first, first + ROUNDED):
            value = np.int32(np.rint(values_I[index] * inverse))
            total += value
            place = index
            if bits == 4:
                within = index % run
                place = index - within + within // 2 + (run // 2 if within % 2 else 0)
            rounded_I[place] = np.int8(value)
        scales_G[group] = scale
        offsets_G[group] = scale * np.float32(total) * np.float32(1 << (bits - 1))


_FOUR_OF_MANY, _ONE_OF_MANY, _FOUR_OF_SOME, _ONE_OF_SOME = _weigh(4, 64), _weigh(1, 64), _weigh(4, 16), _weigh(1, 16)
_ONE_OF_ONE = _weigh(1, 1)


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _add_weighed(x: Any, size: Any, count: Any, weights: Any, positions: Any, rows: Any, results: Any) -> None:
    """Add `count` bfloat16 vectors of `size` at `x`, each times its weight, to `rows` float32 results side by side."""
    row = 0
    while row < rows:
        four = row + 4 <= rows
        w = weights + np.uint64(4) * np.uint64(row * positions)
        first = 0
        while first < size:
            v = x + np.uint64(2) * np.uint64(first)
            y = results + np.uint64(4) * np.uint64(row * size + first)
            if first + 64 <= size:
                if four:
                    _FOUR_OF_MANY(v, size, count, w, positions, y, size)
                else:
                    _ONE_OF_MANY(v, size, count, w, positions, y, size)
                first += 64
            elif first + 16 <= size:
                if four:
                    _FOUR_OF_SOME(v, size, count, w, positions, y, size)
                else:
                    _ONE_OF_SOME(v, size, count, w, positions, y, size)
                first += 16
            else:
                for more in range(4 if four else 1):
                    own = np.uint64(4) * np.uint64(more)
                    _ONE_OF_ONE(v, size, count, w + own * np.uint64(positions), positions, y + own * np.uint64(size), size)
                first += 1
        row += 4 if four else 1


@_inline
def _address(array: Any) -> Any:
    return np.uint64(array.ctypes.data)


@_inline
def _aligned(size: Any) -> Any:
    """So many bytes, from the start of a cache line."""
    made = np.empty(size + np.uint64(64), np.uint8)
    return made[-_address(made) & np.uint64(63) :]


@_inline
def _prepared(x_address: Any, rows: Any, inputs: Any, bits: Any) -> Any:
    """Rows of bfloat16 as `_multiply` wants them."""
    own = _vector_bytes(inputs, bits)
    made = _aligned(np.uint64(rows) * own)
    for row in range(rows):
        wide_I = _wide_vector(x_address + np.uint64(2) * np.uint64(row * inputs), inputs)
        _prepare(wide_I, bits, _address(made) + np.uint64(row) * own)
    return made


@_inline
def _block_rows(rows: Any, threads: Any, bits: Any) -> Any:
    """Of a block, where all matrices together have so many."""
    size = MOST_ROWS if bits == 16 else 2 * MOST_ROWS
    while size > FEWEST_ROWS and rows < size * BLOCKS_OF_A_THREAD * threads:
        size //= 2
    return size


@_compiled(_OF_PRODUCTS)  # type: ignore[untyped-decorator]
def _products(
    x_address: Any, rows: Any, weights_M2: Any, form: Any, ends_M: Any, inputs: Any, threads: Any, y_TO: Any
) -> None:
    """y = [x·W_0ᵀ, x·W_1ᵀ, …]; ends_M: where each matrix's rows end in a row of y."""
    bits, group = form
    x = _prepared(x_address, rows, inputs, bits)
    size = _block_rows(ends_M[-1], threads, bits)
    begin, blocks = 0, 0
    for end in ends_M:
        blocks += (end - begin + size - 1) // size
        begin = end
    matrix_of, first_of = np.empty(blocks, np.int64), np.empty(blocks, np.int64)
    begin = block = 0
    for matrix, end in enumerate(ends_M):
        for first in range(begin, end, size):
            matrix_of[block], first_of[block] = matrix, first
            block += 1
        begin = end
    for block in numba.prange(blocks):  # each thread takes one run of consecutive blocks
        matrix, first = matrix_of[block], first_of[block]
        begin = ends_M[matrix - 1] if matrix else 0
        count = min(size, ends_M[matrix] - first)
        wide_TW = np.empty((rows, size), np.float32)
        weights = weights_M2[matrix, 0] + np.uint64(first - begin) * _row_bytes(inputs, bits)
        scales = weights_M2[matrix, 1] + np.uint64((first - begin) * (inputs // group) * 2)
        _multiply(weights, scales, form, count, inputs, _address(x), rows, _address(wide_TW), size)
        for row in range(rows):
            for place in range(count):
                y_TO[row, first + place] = _narrow(wide_TW[row, place])


@_inline
def _add_bias(address: Any, first: Any, count: Any, y_TW: Any) -> None:
    """Add `count` of the bfloat16 values at an address, from the one numbered `first`, to each row."""
    bias_W = _wide_vector(address + np.uint64(2) * np.uint64(first), count)
    for row in range(y_TW.shape[0]):
        for index in range(count):
            y_TW[row, index] += bias_W[index]


@_inline
def _unit(gate: Any, up: Any, alpha: Any, limit: Any) -> Any:
    """silu(gate) · up; with a limit above 0 that of ClampedSwiglu."""
    if limit > np.float32(0.0):
        gate, up = min(gate, limit), max(-limit, min(up, limit)) + np.float32(1.0)
    return gate / (np.float32(1.0) + _exp(-alpha * gate)) * up


@_compiled(_OF_SWIGLU)  # type: ignore[untyped-decorator]
def _swiglu(
    x_address: Any,
    experts_NA2: Any,
    form: Any,
    chosen_TS: Any,
    weights_TS: Any,
    scales_TS: Any,
    width: Any,
    clamp: Any,
    threads: Any,
    y_TD: Any,
) -> None:
    """y = Σ_s w_s · down_s(silu(gate_s·x_s) ⊙ up_s·x_s), slots sorted by expert; a negative one is empty.

    x_s is x, times the slot's scale where there are scales.

    Six pairs of addresses of an expert end in those of biases; with a limit above 0 the units are of ClampedSwiglu.
    """
    (bits, group), (alpha, limit), biased = form, clamp, experts_NA2.shape[1] > 3
    (tokens, slots), hidden = chosen_TS.shape, y_TD.shape[1]
    ends_N = np.zeros(experts_NA2.shape[0] + 1, np.int64)
    for token in range(tokens):
        for slot in range(slots):
            ends_N[chosen_TS[token, slot] + 1] += chosen_TS[token, slot] >= 0
    used = 0
    for expert in range(experts_NA2.shape[0]):
        used += ends_N[expert + 1] > 0
        ends_N[expert + 1] += ends_N[expert]
    used_N, begins_N = np.empty(used, np.int64), ends_N[:-1].copy()
    place = 0
    for expert in range(experts_NA2.shape[0]):
        if ends_N[expert + 1] > ends_N[expert]:
            used_N[place] = expert
            place += 1
    members = ends_N[-1]
    x_bytes, middle_bytes = _vector_bytes(hidden, bits), _vector_bytes(width, bits)
    x_M = _aligned(np.uint64(members) * x_bytes)
    place_TS = np.empty((tokens, slots), np.int64)
    for token in range(tokens):
        own_D = _wide_vector(x_address + np.uint64(2) * np.uint64(token * hidden), hidden)
        for slot in range(slots):
            expert = chosen_TS[token, slot]
            place_TS[token, slot] = -1
            if expert >= 0:
                place_TS[token, slot] = begins_N[expert]
                x_D = own_D * scales_TS[token, slot] if scales_TS.shape[0] else own_D
                _prepare(x_D, bits, _address(x_M) + np.uint64(begins_N[expert]) * x_bytes)
                begins_N[expert] += 1
    middle_MF = np.empty((members, width), np.float32)
    size = _block_rows(used * width, threads, bits)
    blocks = (width + size - 1) // size
    for place in numba.prange(used * blocks):
        expert, first = used_N[place // blocks], place % blocks * size
        begin, rows, count = ends_N[expert], ends_N[expert + 1] - ends_N[expert], min(size, width - first)
        x = _address(x_M) + np.uint64(begin) * x_bytes
        skipped, scales = np.uint64(first) * _row_bytes(hidden, bits), np.uint64(first * (hidden // group) * 2)
        gate, up = np.empty((rows, size), np.float32), np.empty((rows, size), np.float32)
        own = experts_NA2[expert]
        _multiply(own[0, 0] + skipped, own[0, 1] + scales, form, count, hidden, x, rows, _address(gate), size)
        _multiply(own[1, 0] + skipped, own[1, 1] + scales, form, count, hidden, x, rows, _address(up), size)
        if biased:
            _add_bias(own[3, 0], first, count, gate)
            _add_bias(own[4, 0], first, count, up)
        for row in range(rows):
            for index in range(count):
                middle_MF[begin + row, first + index] = _unit(gate[row, index], up[row, index], alpha, limit)
    middle_M = _aligned(np.uint64(members) * middle_bytes)
    for member in numba.prange(members):
        _prepare(middle_MF[member], bits, _address(middle_M) + np.uint64(member) * middle_bytes)
    wide = _block_rows(hidden, threads, bits)
    for place in numba.prange((hidden + wide - 1) // wide):
        first = place * wide
        count = min(wide, hidden - first)
        down_MW = np.empty((members, wide), np.float32)
        for chosen in used_N:
            begin, rows = ends_N[chosen], ends_N[chosen + 1] - ends_N[chosen]
            middle = _address(middle_M) + np.uint64(begin) * middle_bytes
            results = _address(down_MW) + np.uint64(4) * np.uint64(begin * wide)
            weights = experts_NA2[chosen, 2, 0] + np.uint64(first) * _row_bytes(width, bits)
            scales = experts_NA2[chosen, 2, 1] + np.uint64(first * (width // group) * 2)
            _multiply(weights, scales, form, count, width, middle, rows, results, wide)
            if biased:
                _add_bias(experts_NA2[chosen, 5, 0], first, count, down_MW[begin : begin + rows])
        for token in range(tokens):
            for index in range(count):
                total = np.float32(0.0)
                for slot in range(slots):
                    if place_TS[token, slot] >= 0:
                        total += weights_TS[token, slot] * down_MW[place_TS[token, slot], index]
                y_TD[token, first + index] = _narrow(total)


@_inline
def _add_bias_to_rows(address: Any, first: Any, made_WZ: Any) -> None:
    """Add the bfloat16 values at an address, from the one numbered `first`, one to each row."""
    bias_W = _wide_vector(address + np.uint64(2) * np.uint64(first), made_WZ.shape[0])
    for row in range(made_WZ.shape[0]):
        for place in range(made_WZ.shape[1]):
            made_WZ[row, place] += bias_W[row]


@_helper
def _unit_pairs(gate_WZ: Any, up_WZ: Any, alpha: Any, limit: Any, target: Any) -> None:
    """The units of W rows, written as W / 2 pairs of a panel."""
    count, places = gate_WZ.shape
    panel_CZ = numba.carray(_pairs(target), (count // 2, places))
    for pair in range(count // 2):
        for place in range(places):
            low = _unit(gate_WZ[2 * pair, place], up_WZ[2 * pair, place], alpha, limit)
            high = _unit(gate_WZ[2 * pair + 1, place], up_WZ[2 * pair + 1, place], alpha, limit)
            panel_CZ[pair, place] = _narrow_pair(low, high)


@_inline
def _turned(made_WZ: Any) -> Any:
    """The transpose; both sizes are multiples of 16."""
    rows, places = made_WZ.shape
    made_ZW = np.empty((places, rows), np.float32)
    for row in range(0, rows, _LANES):
        for place in range(0, places, _LANES):
            _turn(
                _address(made_WZ) + np.uint64(4 * (row * places + place)),
                places,
                _address(made_ZW) + np.uint64(4 * (place * rows + row)),
                rows,
            )
    return made_ZW


@_helper
def _panels(members_N: Any) -> Any:
    """How the members of N experts lie in panels, of which each expert has its own.

    Returns the first panel of each expert [N + 1], and of each panel its first place, counted through all, and its vectors.
    """
    panels_N = np.zeros(members_N.shape[0] + 1, np.int64)
    for each, members in enumerate(members_N):
        vectors = (members + _LANES - 1) // _LANES
        panels_N[each + 1] = panels_N[each] + (vectors + _PANEL_VECTORS - 1) // _PANEL_VECTORS
    begins_P, vectors_P = np.empty(panels_N[-1] + 1, np.int64), np.empty(panels_N[-1], np.int64)
    begins_P[0] = 0
    for each, members in enumerate(members_N):
        vectors = (members + _LANES - 1) // _LANES
        for panel in range(panels_N[each], panels_N[each + 1]):
            left = panels_N[each + 1] - panel
            vectors_P[panel] = (vectors + left - 1) // left
            vectors -= vectors_P[panel]
            begins_P[panel + 1] = begins_P[panel] + _LANES * vectors_P[panel]
    return panels_N, begins_P, vectors_P


@_helper
def _pack(x_address: Any, inputs: Any, tokens_Z: Any, scales_Z: Any, panel: Any) -> None:
    """Write rows of bfloat16, times their scales where there are any, into a panel of Z places; a negative one is empty."""
    pairs = inputs // 2
    panel_CZ = numba.carray(_pairs(panel), (pairs, tokens_Z.shape[0]))
    for start in range(0, pairs, _LANES):  # a cache line of each row
        end = min(start + _LANES, pairs)
        for place, token in enumerate(tokens_Z):
            if token < 0:
                for pair in range(start, end):
                    panel_CZ[pair, place] = np.uint32(0)
                continue
            row_C = numba.carray(_pairs(x_address + np.uint64(2) * np.uint64(token * inputs)), (pairs,))
            if scales_Z.shape[0]:
                for pair in range(start, end):
                    panel_CZ[pair, place] = _scaled(row_C[pair], scales_Z[place])
            else:
                for pair in range(start, end):
                    panel_CZ[pair, place] = row_C[pair]


@_inline
def _scaled(pair: Any, scale: Any) -> Any:
    low, high = _as_float(pair << np.uint32(16)) * scale, _as_float(pair & np.uint32(0xFFFF0000)) * scale
    return _narrow_pair(low, high)


@_helper
def _dequantise_row(weights: Any, scales: Any, form: Any, row: Any, inputs: Any, target: Any) -> None:
    """A row's I values scale · (stored − 2^(bits−1)) in bfloat16, rounded once; groups of a multiple of 32 weights."""
    bits, group = form
    stored = weights + np.uint64(row) * _row_bytes(inputs, bits)
    scales_C = numba.carray(_pointer(scales + np.uint64(row * (inputs // group) * 2)), (inputs // group,))
    for place in range(inputs // ROUNDED):
        scale = _widen(scales_C[place * ROUNDED // group])
        if bits == 8:
            _WIDE_OF_8(stored + np.uint64(ROUNDED * place), scale, target + np.uint64(2 * ROUNDED * place))
        else:
            _WIDE_OF_4(stored + np.uint64(ROUNDED // 2 * place), scale, target + np.uint64(2 * ROUNDED * place))


@_helper
def _plain_rows(weights: Any, scales: Any, form: Any, first: Any, count: Any, inputs: Any) -> Any:
    """The bits of `count` matrix rows in bfloat16, one after the other: where they lie, or of few bits a copy."""
    bits, _ = form
    if bits == 16:
        return numba.carray(_pointer(weights + np.uint64(first) * _row_bytes(inputs, bits)), (count * inputs,))
    rows = np.empty(count * inputs, np.uint16)
    for row in range(count):
        _dequantise_row(weights, scales, form, first + row, inputs, _address(rows) + np.uint64(2 * row * inputs))
    return rows


@_inline
def _panel_rows(rows: Any, threads: Any) -> Any:
    """Matrix rows that one thread takes at once, where there are so many in all."""
    size = _PANEL_ROWS
    while size > _LANES and rows < size * threads:
        size //= 2
    return size


@_compiled(_OF_PRODUCTS if MULTIPLIES_BFLOAT16 else None)  # type: ignore[untyped-decorator]
def _many_products(
    x_address: Any, rows: Any, weights_M2: Any, form: Any, ends_M: Any, inputs: Any, threads: Any, y_TO: Any
) -> None:
    """`_products` of many rows."""
    _, begins_P, vectors_P = _panels(np.array([rows]))
    x = _aligned(np.uint64(2 * inputs * begins_P[-1]))
    tokens_Z = np.full(begins_P[-1], -1)
    tokens_Z[:rows] = np.arange(rows)
    for panel in numba.prange(vectors_P.shape[0]):
        first, last = begins_P[panel], begins_P[panel + 1]
        _pack(x_address, inputs, tokens_Z[first:last], _NO_ROW_SCALES, _address(x) + np.uint64(2 * inputs * first))
    size = _panel_rows(ends_M[-1], threads)
    for block in numba.prange((ends_M[-1] + size - 1) // size):
        first, begin = block * size, 0
        for matrix, end in enumerate(ends_M):
            last = min(end, (block + 1) * size)
            if first < last:
                own, count = weights_M2[matrix], last - first
                weights = _plain_rows(own[0], own[1], form, first - begin, count, inputs)
                for panel in range(vectors_P.shape[0]):
                    place, tokens = begins_P[panel], _LANES * vectors_P[panel]
                    made_WZ = np.zeros((size, tokens), np.float32)
                    x_panel = _address(x) + np.uint64(2 * inputs * place)
                    _multiply_panel(_address(weights), count, inputs, x_panel, vectors_P[panel], _address(made_WZ))
                    made_ZW = _turned(made_WZ)
                    for row in range(min(tokens, rows - place)):
                        for index in range(count):
                            y_TO[place + row, first + index] = _narrow(made_ZW[row, index])
                first = last
            begin = end


@_compiled(_OF_SWIGLU if MULTIPLIES_BFLOAT16 else None)  # type: ignore[untyped-decorator]
def _many_swiglu(
    x_address: Any,
    experts_NA2: Any,
    form: Any,
    chosen_TS: Any,
    weights_TS: Any,
    scales_TS: Any,
    width: Any,
    clamp: Any,
    threads: Any,
    y_TD: Any,
) -> None:
    """`_swiglu` of many tokens: the tokens of an expert lie in panels, and so does what its last product is given."""
    (alpha, limit), biased = clamp, experts_NA2.shape[1] > 3
    (tokens, slots), hidden = chosen_TS.shape, y_TD.shape[1]
    members_N = np.zeros(experts_NA2.shape[0], np.int64)
    for token in range(tokens):
        for slot in range(slots):
            if chosen_TS[token, slot] >= 0:
                members_N[chosen_TS[token, slot]] += 1
    panels_N, begins_P, vectors_P = _panels(members_N)
    used_N, places, next_N = np.nonzero(members_N)[0], begins_P[-1], begins_P[panels_N[:-1]]
    tokens_Z, weights_Z = np.full(places, -1), np.empty(places, np.float32)
    scales_Z = np.empty(places if scales_TS.shape[0] else 0, np.float32)
    for token in range(tokens):
        for slot in range(slots):
            expert = chosen_TS[token, slot]
            if expert >= 0:
                place = next_N[expert]
                tokens_Z[place], weights_Z[place] = token, weights_TS[token, slot]
                if scales_TS.shape[0]:
                    scales_Z[place] = scales_TS[token, slot]
                next_N[expert] += 1
    x, middle = _aligned(np.uint64(2 * hidden * places)), _aligned(np.uint64(2 * width * places))
    for panel in numba.prange(vectors_P.shape[0]):
        first, last = begins_P[panel], begins_P[panel + 1]
        _pack(x_address, hidden, tokens_Z[first:last], scales_Z[first:last], _address(x) + np.uint64(2 * hidden * first))
    size = _panel_rows(width, threads)
    # Blocks of rows outside and experts inside: experts have unequal numbers of tokens, and threads then the same work.
    for place in numba.prange(used_N.shape[0] * ((width + size - 1) // size)):
        expert, first = used_N[place % used_N.shape[0]], place // used_N.shape[0] * size
        count, own = min(size, width - first), experts_NA2[used_N[place % used_N.shape[0]]]
        gate_weights = _plain_rows(own[0, 0], own[0, 1], form, first, count, hidden)
        up_weights = _plain_rows(own[1, 0], own[1, 1], form, first, count, hidden)
        for panel in range(panels_N[expert], panels_N[expert + 1]):
            begin, vectors = begins_P[panel], vectors_P[panel]
            gate_WZ = np.zeros((count, _LANES * vectors), np.float32)
            up_WZ = np.zeros((count, _LANES * vectors), np.float32)
            x_panel = _address(x) + np.uint64(2 * hidden * begin)
            _multiply_panel(_address(gate_weights), count, hidden, x_panel, vectors, _address(gate_WZ))
            _multiply_panel(_address(up_weights), count, hidden, x_panel, vectors, _address(up_WZ))
            if biased:
                _add_bias_to_rows(own[3, 0], first, gate_WZ)
                _add_bias_to_rows(own[4, 0], first, up_WZ)
            address = _address(middle) + np.uint64(2 * width * begin + 2 * first * _LANES * vectors)
            _unit_pairs(gate_WZ, up_WZ, alpha, limit, address)
    size = min(32, _panel_rows(hidden, threads))
    for place in numba.prange((hidden + size - 1) // size):
        first = place * size
        count = min(size, hidden - first)
        y_TW = np.zeros((tokens, count), np.float32)
        for chosen in used_N:
            own = experts_NA2[chosen]
            weights = _plain_rows(own[2, 0], own[2, 1], form, first, count, width)
            for panel in range(panels_N[chosen], panels_N[chosen + 1]):
                begin, vectors = begins_P[panel], vectors_P[panel]
                down_WZ = np.zeros((size, _LANES * vectors), np.float32)
                middle_panel = _address(middle) + np.uint64(2 * width * begin)
                _multiply_panel(_address(weights), count, width, middle_panel, vectors, _address(down_WZ))
                if biased:
                    _add_bias_to_rows(own[5, 0], first, down_WZ[:count])
                down_ZW = _turned(down_WZ)
                for member in range(_LANES * vectors):
                    token = tokens_Z[begin + member]
                    if token >= 0:
                        for index in range(count):
                            y_TW[token, index] += weights_Z[begin + member] * down_ZW[member, index]
        for token in range(tokens):
            for index in range(count):
                y_TD[token, first + index] = _narrow(y_TW[token, index])


@_compiled("void(uint64, uint64, UniTuple(int64, 2), uint16[:, ::1])")  # type: ignore[untyped-decorator]
def _dequantise(weights: Any, scales: Any, form: Any, y_OI: Any) -> None:
    """The whole matrix."""
    outputs, inputs = y_OI.shape
    for row in numba.prange(outputs):
        _dequantise_row(weights, scales, form, row, inputs, _address(y_OI) + np.uint64(2 * row * inputs))


@_compiled("void(uint64, uint64, float32, uint16[:, ::1])", parallel=False)  # type: ignore[untyped-decorator]
def _rms_norm(x_address: Any, weight_address: Any, epsilon: Any, y_TD: Any) -> None:
    """y = weight · bfloat16(x / rms(x)): rounded where torch's own steps round."""
    rows, size = y_TD.shape
    weight_D = _wide_vector(weight_address, size)
    for row in range(rows):
        x_D = _wide_vector(x_address + np.uint64(2) * np.uint64(row * size), size)
        squares = np.float32(0.0)
        for index in range(size):
            squares += x_D[index] * x_D[index]
        scale = np.float32(1.0) / np.sqrt(squares / np.float32(size) + epsilon)
        for index in range(size):
            y_TD[row, index] = _narrow(weight_D[index] * _widen(_narrow(x_D[index] * scale)))


@_inline
def _rotate(address: Any, cosine_E: Any, sine_E: Any, turned_E: Any) -> None:
    """One head's vector turned to its position, halves paired."""
    size = cosine_E.shape[0]
    half = size // 2
    head_E = numba.carray(_pointer(address), (size,))
    for index in range(half):
        left, right = _widen(head_E[index]), _widen(head_E[index + half])
        turned_E[index] = left * cosine_E[index] - right * sine_E[index]
        turned_E[index + half] = right * cosine_E[index + half] + left * sine_E[index + half]


@_compiled(  # type: ignore[untyped-decorator]
    "void(uint64[::1], int64[::1], uint64[::1], int64, int64, int64[:, ::1], int64[::1], int64, int64, float32, "
    "float32[::1], uint16[:, :, ::1])"
)
def _attend(
    inputs_5: Any,
    strides_3: Any,
    cache_2: Any,
    groups: Any,
    group_stride: Any,
    blocks_BM: Any,
    past_B: Any,
    block_size: Any,
    window: Any,
    scale: Any,
    sinks_H: Any,
    mixed_BHE: Any,
) -> None:
    """Rotate query and key, append key and value, attend within the window."""
    sequences, heads, size = mixed_BHE.shape
    per_group = heads // groups
    for work in numba.prange(sequences * groups):
        sequence, group = work // groups, work % groups
        past = past_B[sequence]
        first = 0
        if window > 0:
            first = max(0, past + 1 - window)
        elif window < 0:
            first = past // -window * -window
        turn = np.uint64(2) * np.uint64(sequence * size)
        cosine_E, sine_E = _wide_vector(inputs_5[3] + turn, size), _wide_vector(inputs_5[4] + turn, size)
        # The new key and value go to the cache.
        new = group * group_stride + (blocks_BM[sequence, past // block_size] * block_size + past % block_size) * size
        key_E = numba.carray(_pointer(cache_2[0] + np.uint64(2) * np.uint64(new)), (size,))
        value_E = numba.carray(_pointer(cache_2[1] + np.uint64(2) * np.uint64(new)), (size,))
        turned_E = np.empty(size, np.float32)
        own = np.uint64(2) * np.uint64(sequence * strides_3[1] + group * size)
        _rotate(inputs_5[1] + own, cosine_E, sine_E, turned_E)
        own = np.uint64(2) * np.uint64(sequence * strides_3[2] + group * size)
        given_E = numba.carray(_pointer(inputs_5[2] + own), (size,))
        for index in range(size):
            key_E[index] = _narrow(turned_E[index])
            value_E[index] = given_E[index]
        query_RE = np.empty((per_group, size), np.float32)
        for head in range(per_group):
            own = np.uint64(2) * np.uint64(sequence * strides_3[0] + (group * per_group + head) * size)
            _rotate(inputs_5[0] + own, cosine_E, sine_E, query_RE[head])
        # Block after block: the queries of a group read each key and each value once.
        positions = past + 1 - first
        scores_RP = np.empty((per_group, positions), np.float32)
        place = first
        while place <= past:
            count = min(block_size - place % block_size, past + 1 - place)
            slot = blocks_BM[sequence, place // block_size] * block_size + place % block_size
            keys = cache_2[0] + np.uint64(2) * np.uint64(group * group_stride + slot * size)
            results = _address(scores_RP) + np.uint64(4) * np.uint64(place - first)
            _multiply_wide(keys, count, size, _address(query_RE), per_group, results, positions)
            place += count
        total_R = np.zeros(per_group, np.float32)
        for head in range(per_group):
            sink = sinks_H[group * per_group + head] if sinks_H.shape[0] else np.float32(-np.inf)
            largest = sink
            for place in range(positions):
                scores_RP[head, place] *= scale
                largest = max(largest, scores_RP[head, place])
            if sinks_H.shape[0]:
                total_R[head] = _exp(sink - largest)
            for place in range(positions):
                scores_RP[head, place] = _exp(scores_RP[head, place] - largest)
                total_R[head] += scores_RP[head, place]
        sum_RE = np.zeros((per_group, size), np.float32)
        place = first
        while place <= past:
            count = min(block_size - place % block_size, past + 1 - place)
            slot = blocks_BM[sequence, place // block_size] * block_size + place % block_size
            values = cache_2[1] + np.uint64(2) * np.uint64(group * group_stride + slot * size)
            weights = _address(scores_RP) + np.uint64(4) * np.uint64(place - first)
            _add_weighed(values, size, count, weights, positions, per_group, _address(sum_RE))
            place += count
        for head in range(per_group):
            for index in range(size):
                mixed_BHE[sequence, group * per_group + head, index] = _narrow(sum_RE[head, index] / total_R[head])


# What `_decode` reads of a layer: addresses, whole numbers and factors, in these columns.
NORM, QUERY, KEY, VALUE, OUTPUT, BIASES, HEAD_NORMS, SINKS, FFN_NORM, ROUTER, SHARED_GATE, GAMMAS = (
    0, 1, 3, 5, 7, 9, 13, 15, 16, 17, 19, 20,
)  # fmt: skip
"""Addresses. Matrices have a second one, of their scales; biases: of query, key, value and output; routers have one."""
ADDRESSES = 22
WINDOW, FORM, FIRST, EXPERTS, WIDTH, EXPERT_FORM, SLOTS, SHARED, SHARED_WIDTH, SHARED_FORM, KEEP, NORMALISES = (
    0, 1, 3, 4, 5, 6, 8, 9, 10, 11, 13, 14,
)  # fmt: skip
"""Whole numbers. Forms are two; FIRST and SHARED: rows of the tables of experts, the latter −1 for none; a layer with
EXPERTS 0 is dense, its one FFN in the table of shared ones. NORMALISES: bit 0 the top-k's weights, bit 1 those that skipping
left."""
NUMBERS = 15
HEAD_NORM, WHOLE_NORM = 1, 2
"""Kinds of norms of queries and keys: of each head, or of all heads together."""


@_inline
def _pair(first: Any, second: Any) -> Any:
    made = np.empty((1, 2), np.uint64)
    made[0, 0], made[0, 1] = first, second
    return made


@_helper
def _add(x_TD: Any, y_TD: Any, factor: Any) -> None:
    """x += factor · y, rounded where torch's own steps round."""
    for token in range(x_TD.shape[0]):
        for index in range(x_TD.shape[1]):
            added = _widen(y_TD[token, index])
            if factor != np.float32(1.0):
                added = _widen(_narrow(added * factor))
            x_TD[token, index] = _narrow(_widen(x_TD[token, index]) + added)


@_helper
def _add_to_part(y_TO: Any, first: Any, count: Any, bias: Any) -> None:
    """Add the bfloat16 values at an address to `count` columns."""
    bias_W = _wide_vector(bias, count)
    for token in range(y_TO.shape[0]):
        for index in range(count):
            y_TO[token, first + index] = _narrow(_widen(y_TO[token, first + index]) + bias_W[index])


@_helper
def _norm_parts(y_TO: Any, first: Any, parts: Any, size: Any, weight: Any, epsilon: Any) -> None:
    """The RMS norm of `parts` runs of `size` columns, in their place."""
    own = np.empty((1, size), np.uint16)
    for token in range(y_TO.shape[0]):
        for part in range(parts):
            begin = first + part * size
            _rms_norm(_address(y_TO[token]) + np.uint64(2 * begin), weight, epsilon, own)
            for index in range(size):
                y_TO[token, begin + index] = own[0, index]


@_helper
def _choose(logits_N: Any, slots: Any, normalises: Any, scale: Any, chosen_S: Any, weights_S: Any) -> None:
    """The slots' experts by softmax of bfloat16 logits, largest first, and their weights."""
    experts = logits_N.shape[0]
    shares_N = np.empty(experts, np.float32)
    largest = np.float32(-np.inf)
    for expert in range(experts):
        shares_N[expert] = _widen(logits_N[expert])
        largest = max(largest, shares_N[expert])
    total = np.float32(0.0)
    for expert in range(experts):
        shares_N[expert] = _exp(shares_N[expert] - largest)
        total += shares_N[expert]
    of_chosen = np.float32(0.0)
    for slot in range(slots):
        best = 0
        for expert in range(1, experts):
            if shares_N[expert] > shares_N[best]:
                best = expert
        chosen_S[slot], weights_S[slot] = best, shares_N[best] / total
        of_chosen += weights_S[slot]
        shares_N[best] = np.float32(-1.0)
    for slot in range(slots):
        if normalises:
            weights_S[slot] /= of_chosen
        weights_S[slot] *= scale


@_helper
def _skip(
    gammas_2: Any, experts: Any, slots: Any, threshold: Any, keep: Any, normalises: Any, chosen_S: Any, weights_S: Any
) -> None:
    """Adaptive skipping (DiEP §4.3), as `routing.Skipping` has it."""
    gamma1 = numba.carray(_floats(gammas_2[0]), (slots - 1,))
    gamma2 = numba.carray(_floats(gammas_2[1]), (experts, experts))
    before = left = np.float32(0.0)
    for slot in range(slots):
        before += weights_S[slot]
    first, is_skipped = chosen_S[0], False
    for slot in range(slots):
        if slot >= max(1, keep):
            gamma = gamma1[slot - 1] * gamma2[first, chosen_S[slot]]
            if weights_S[slot] < threshold * gamma * weights_S[0]:
                chosen_S[slot], weights_S[slot], is_skipped = -1, np.float32(0.0), True
        left += weights_S[slot]
    if normalises and is_skipped:
        for slot in range(slots):
            weights_S[slot] *= before / left


@_compiled(  # type: ignore[untyped-decorator]
    "void(uint16[:, ::1], uint64[:, ::1], int64[:, ::1], float32[:, ::1], uint64[:, :, ::1], uint64[:, :, ::1], "
    "uint64[:, ::1], uint64[::1], int64[:, ::1], int64[::1], UniTuple(int64, 7), UniTuple(float32, 3), float32[::1], "
    "int64[:, :, ::1], float32[:, :, ::1], uint16[:, :, ::1], uint16[:, :, ::1])",
    parallel=False,
)
def _decode(
    x_TD: Any,
    addresses_LA: Any,
    numbers_LA: Any,
    factors_L3: Any,
    experts_NA2: Any,
    shared_N32: Any,
    caches_L2: Any,
    angles_2: Any,
    blocks_BM: Any,
    past_B: Any,
    sizes: Any,
    scalars: Any,
    thresholds_T: Any,
    chosen_LTS: Any,
    weights_LTS: Any,
    normed_LTD: Any,
    logits_LTN: Any,
) -> None:
    """All layers, each as `model.DecoderLayer` computes it, written over x."""
    (tokens, hidden), sequences = x_TD.shape, past_B.shape[0]
    heads, groups, size, block_size, group_stride, qk_norm, threads = sizes
    epsilon, scale, residual = scalars
    steps, queries, width = tokens // sequences, heads * size, (heads + 2 * groups) * size
    normed_TD, added_TD = np.empty((tokens, hidden), np.uint16), np.empty((tokens, hidden), np.uint16)
    projected_TO, mixed_THE = np.empty((tokens, width), np.uint16), np.empty((tokens, heads, size), np.uint16)
    ends_3, ends_1 = np.array([queries, queries + groups * size, width]), np.array([hidden])
    strides_3, inputs_5, qkv_32 = np.full(3, width), np.empty(5, np.uint64), np.empty((3, 2), np.uint64)
    no_scales, ones_T1 = np.empty((0, 0), np.float32), np.ones((tokens, 1), np.float32)
    for layer in range(addresses_LA.shape[0]):
        at, number, factor = addresses_LA[layer], numbers_LA[layer], factors_L3[layer]
        _rms_norm(_address(x_TD), at[NORM], epsilon, normed_TD)
        for part in range(3):
            qkv_32[part, 0], qkv_32[part, 1] = at[QUERY + 2 * part], at[QUERY + 2 * part + 1]
        form = number[FORM], number[FORM + 1]
        _products(_address(normed_TD), tokens, qkv_32, form, ends_3, hidden, threads, projected_TO)
        for part in range(3):
            begin = ends_3[part - 1] if part else 0
            if at[BIASES + part] != 0:
                _add_to_part(projected_TO, begin, ends_3[part] - begin, at[BIASES + part])
            if part < 2 and qk_norm == HEAD_NORM:
                _norm_parts(projected_TO, begin, (ends_3[part] - begin) // size, size, at[HEAD_NORMS + part], epsilon)
            elif part < 2 and qk_norm == WHOLE_NORM:
                _norm_parts(projected_TO, begin, 1, ends_3[part] - begin, at[HEAD_NORMS + part], epsilon)
        sinks_H = numba.carray(_floats(at[SINKS]), (heads if at[SINKS] else 0,))
        for step in range(steps):  # several are of one sequence
            row = _address(projected_TO) + np.uint64(2 * step * width)
            inputs_5[0], inputs_5[1], inputs_5[2] = row, row + np.uint64(2 * ends_3[0]), row + np.uint64(2 * ends_3[1])
            inputs_5[3], inputs_5[4] = angles_2[0] + np.uint64(2 * step * size), angles_2[1] + np.uint64(2 * step * size)
            mixed = mixed_THE if steps == 1 else mixed_THE[step : step + 1]
            _attend(
                inputs_5,
                strides_3,
                caches_L2[layer],
                groups,
                group_stride,
                blocks_BM,
                past_B + step,
                block_size,
                number[WINDOW],
                scale,
                sinks_H,
                mixed,
            )
        _products(_address(mixed_THE), tokens, _pair(at[OUTPUT], at[OUTPUT + 1]), form, ends_1, queries, threads, added_TD)
        if at[BIASES + 3] != 0:
            _add_to_part(added_TD, 0, hidden, at[BIASES + 3])
        _add(x_TD, added_TD, residual)
        _rms_norm(_address(x_TD), at[FFN_NORM], epsilon, normed_TD)
        experts, slots, clamp = number[EXPERTS], number[SLOTS], (factor[1], factor[2])
        if experts > 0:
            logits_TN = np.empty((tokens, experts), np.uint16)
            router = _pair(at[ROUTER], np.uint64(0))
            _products(_address(normed_TD), tokens, router, (16, 1), np.array([experts]), hidden, threads, logits_TN)
            if at[ROUTER + 1] != 0:
                _add_to_part(logits_TN, 0, experts, at[ROUTER + 1])
            chosen_TS, weights_TS = np.empty((tokens, slots), np.int64), np.empty((tokens, slots), np.float32)
            for token in range(tokens):
                _choose(logits_TN[token], slots, number[NORMALISES] & 1, factor[0], chosen_TS[token], weights_TS[token])
                if at[GAMMAS] != 0 and slots > number[KEEP] and thresholds_T[token] > np.float32(0.0):
                    gammas_2 = at[GAMMAS : GAMMAS + 2]
                    _skip(
                        gammas_2,
                        experts,
                        slots,
                        thresholds_T[token],
                        number[KEEP],
                        number[NORMALISES] & 2,
                        chosen_TS[token],
                        weights_TS[token],
                    )
            if chosen_LTS.shape[0]:
                chosen_LTS[layer, :, :slots], weights_LTS[layer, :, :slots] = chosen_TS, weights_TS
                logits_LTN[layer, :, :experts], normed_LTD[layer] = logits_TN, normed_TD
            own_NA2 = experts_NA2[number[FIRST] : number[FIRST] + experts]
            form = number[EXPERT_FORM], number[EXPERT_FORM + 1]
            at_x = _address(normed_TD)
            _swiglu(at_x, own_NA2, form, chosen_TS, weights_TS, no_scales, number[WIDTH], clamp, threads, added_TD)
        if number[SHARED] >= 0:
            shared_TD = added_TD if experts == 0 else np.empty((tokens, hidden), np.uint16)
            own_132 = shared_N32[number[SHARED] : number[SHARED] + 1]
            form, chosen_T1 = (number[SHARED_FORM], number[SHARED_FORM + 1]), np.zeros((tokens, 1), np.int64)
            at_x, no_clamp = _address(normed_TD), (np.float32(1.0), np.float32(0.0))
            _swiglu(at_x, own_132, form, chosen_T1, ones_T1, no_scales, number[SHARED_WIDTH], no_clamp, threads, shared_TD)
            if at[SHARED_GATE] != 0:
                gate_T1, gate = np.empty((tokens, 1), np.uint16), _pair(at[SHARED_GATE], np.uint64(0))
                _products(_address(normed_TD), tokens, gate, (16, 1), np.array([1]), hidden, threads, gate_T1)
                for token in range(tokens):
                    share = _widen(_narrow(np.float32(1.0) / (np.float32(1.0) + _exp(-_widen(gate_T1[token, 0])))))
                    for index in range(hidden):
                        shared_TD[token, index] = _narrow(share * _widen(shared_TD[token, index]))
            if experts > 0:
                _add(added_TD, shared_TD, np.float32(1.0))
        _add(x_TD, added_TD, residual)


PLAIN = (16, 1)
"""The form of bfloat16 weights: their bits, and how many share a scale, of which there is none."""


def multiplies_many(outputs: int, inputs: int) -> bool:
    """Whether there is a kernel for many rows of such a matrix, on this processor."""
    return MULTIPLIES_BFLOAT16 and outputs % MULTIPLE_OF_OUTPUTS == 0 and inputs % MULTIPLE_OF_OUTPUTS == 0


def products(
    x_address: int,
    rows: int,
    weights: list[tuple[int, int]],
    outputs: list[int],
    inputs: int,
    form: tuple[int, int] = PLAIN,
    *,
    many: bool = False,
) -> Any:
    """[x·W_0ᵀ, x·W_1ᵀ, …] side by side, [T, O].

    x: the address of contiguous bfloat16. weights: addresses of each one's values and scales, which plain ones have none of
    (0). many: take the kernel for many rows. Returns the bits of bfloat16.
    """
    ends_M = np.array(list(accumulate(outputs)))
    y_TO = np.empty((rows, ends_M[-1]), np.uint16)
    kernel = _many_products if many else _products
    kernel(x_address, rows, np.array(weights, np.uint64), form, ends_M, inputs, numba.get_num_threads(), y_TO)
    return y_TO


def swiglu(
    x_address: int,
    experts_NA2: Any,
    chosen_TS: Any,
    weights_TS: Any,
    sizes: tuple[int, int],
    form: tuple[int, int] = PLAIN,
    clamp: tuple[float, float] | None = None,
    scales_TS: Any = None,
    *,
    many: bool = False,
) -> Any:
    """Σ_s w_s · FFN_s(scale_s · x), [T, D]; an expert is read once for all tokens that chose it.

    x [T, D]: an address; each expert's gate [F, D], up [F, D], down [D, F], and plain biases of all three if any:
    addresses of values and scales, as in `products`. chosen_TS: int64, negative for an empty slot; weights_TS, scales_TS:
    float32, None for scales of one. sizes: D and F. form: of the matrices. clamp: α and limit of a ClampedSwiglu. many: take
    the kernel for many tokens of each expert.
    """
    hidden, width = sizes
    alpha, limit = clamp or (1.0, 0.0)
    y_TD = np.empty((chosen_TS.shape[0], hidden), np.uint16)
    scales_TS = _NO_SCALES if scales_TS is None else scales_TS
    threads = numba.get_num_threads()
    kernel = _many_swiglu if many else _swiglu
    kernel(x_address, experts_NA2, form, chosen_TS, weights_TS, scales_TS, width, (alpha, limit), threads, y_TD)
    return y_TD


def dequantised(weight: tuple[int, int], shape: tuple[int, int], form: tuple[int, int]) -> Any:
    """The bits of the bfloat16 matrix [O, I] that a weight of few bits stands for; `weight`: addresses, as in `products`."""
    y_OI = np.empty(shape, np.uint16)
    _dequantise(*weight, form, y_OI)
    return y_OI


def rms_norm(x_address: int, weight_address: int, epsilon: float, rows: int, size: int) -> Any:
    """x / rms(x) · weight of each row, [T, D]; addresses as in `products`."""
    y_TD = np.empty((rows, size), np.uint16)
    _rms_norm(x_address, weight_address, epsilon, y_TD)
    return y_TD


def attend(
    inputs: list[int],
    strides: list[int],
    cache: list[int],
    shape: tuple[int, int, int, int],
    group_stride: int,
    places: tuple[Any, Any, int],
    window: int | None,
    scale: float,
    sinks_H: Any = None,
) -> Any:
    """One new position of each sequence: rotates queries and keys, appends keys and values to the cache, attends.

    inputs: addresses, as in `products`, of query [B, H, E], key and value [B, G, E], cosine and sine [B, E]; strides: values
    from one sequence's query, key and value to the next one's. cache: addresses of keys and values [G, slots, E], with
    `group_stride` values from one group to the next. shape: B, H, G and E. places: blocks int64 [B, M] of each sequence,
    filled positions int64 [B], positions of a block. window: sliding; below zero, the size of chunks; None for none.
    scale: of the scores. sinks_H: float32, where heads have them. Returns [B, H, E] bits.
    """
    sequences, heads, groups, size = shape
    blocks_BM, past_B, block_size = places
    mixed_BHE = np.empty((sequences, heads, size), np.uint16)
    addresses = np.array(inputs, np.uint64), np.array(strides), np.array(cache, np.uint64)
    sinks_H = _NO_SINKS if sinks_H is None else sinks_H
    _attend(*addresses, groups, group_stride, blocks_BM, past_B, block_size, window or 0, scale, sinks_H, mixed_BHE)
    return mixed_BHE


def decode(
    x_address: int,
    tables: tuple[Any, Any, Any, Any, Any],
    caches_L2: Any,
    angles: tuple[int, int],
    places: tuple[Any, Any, int],
    sizes: tuple[int, int, int, int, int],
    scalars: tuple[float, float, float],
    shape: tuple[int, int],
    thresholds_T: Any,
    seen: tuple[Any, Any, Any, Any] | None = None,
) -> None:
    """All layers of a decoder for the next position of each sequence, or the next few of one; written over x [T, D].

    x: the address of contiguous bfloat16. tables: uint64 [layers, ADDRESSES], int64 [layers, NUMBERS], float32 [layers, 3]
    (scale of the experts' weights, α and limit of a ClampedSwiglu, whose limit is 0 where there is none), and the addresses
    of routed and of shared or dense experts, as in `swiglu`. caches_L2, places: as in `attend`. angles: addresses of cosine
    and sine [T, E]. sizes: H, G, E, `group_stride`, and the kind of query and key norms. scalars: ε of the norms, scale of
    the scores, what is added to the residual is multiplied by. shape: T and D. thresholds_T: float32, of adaptive skipping.
    seen: arrays that choices and weights [layers, T, S], inputs [layers, T, D] and logits [layers, T, N] of experts go to.
    """
    blocks_BM, past_B, block_size = places
    heads, groups, size, group_stride, qk_norm = sizes
    x_TD = np.ctypeslib.as_array((ctypes.c_uint16 * (shape[0] * shape[1])).from_address(x_address)).reshape(shape)
    numbers = (heads, groups, size, block_size, group_stride, qk_norm, numba.get_num_threads())
    where = caches_L2, np.array(angles, np.uint64), blocks_BM, past_B
    _decode(x_TD, *tables, *where, numbers, scalars, thresholds_T, *(seen or _NOT_SEEN))


def use_threads(count: int) -> None:
    """How many threads this thread's later calls run on, at most as many as Numba started with."""
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))
