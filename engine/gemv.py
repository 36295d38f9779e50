"""The products that decoding consists of, compiled by Numba: bfloat16 matrices times a few vectors, one for each sequence.

Decoding is bound by the memory that its weights come from. These kernels read each weight once for all vectors, a block of
rows after the other, one stream per thread, and keep everything between two products in float32. One call does what torch
needs a dozen for: several matrices on the same vectors, or all chosen experts of a layer, each on the tokens that chose it.
They take addresses: a weight's bits are read where they lie, and nothing is wrapped or checked on the way.
`engine/linear.py` checks and calls them.

Products are written as LLVM instructions, because a compiler that vectorises a loop adds up in another order for each
number of vectors. Here there is one order, so that what a sequence gets does not depend on what is computed beside it. All
is in one file, because Numba looks at no other for whether what it kept on disk is still current.

Optional (`pip install moe-compress[fast]`); without Numba the same products run in torch.

Shape suffixes: T tokens, O output features, I input features, S slots (chosen experts), N experts, D hidden, F expert width,
M matrices or pairs of token and slot, B sequences, G key-value heads, H query heads, R query heads of one group,
P positions, E head dimension, W matrix rows of a block, A addresses of an expert's tensors.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

BLOCK_ROWS = 32
"""Matrix rows that one thread multiplies with all vectors before it goes on: they stay in cache meanwhile."""
_MATHS = {"reassoc", "contract", "nsz"}
"""Sums may be reordered, so that they use vector registers; NaN and infinity stay what they are."""
_LANES = 16
_SUMS = 4
"""Vector registers that one product is added up in."""
_NO_SINKS, _NO_SCALES = np.empty(0, np.float32), np.empty((0, 0), np.float32)
_FLOAT, _SHORT, _INT, _INDEX = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_FLOATS = ir.VectorType(_FLOAT, _LANES)


def _inline(function: Any) -> Any:
    return numba.njit(fastmath=_MATHS, inline="always")(function)


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


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(context: Any, address: Any) -> Any:
    """The bfloat16 values that begin at an address."""
    kind = types.CPointer(types.uint16)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(kind))

    return kind(types.uint64), generate


@_inline
def _widen(bits: Any) -> Any:
    return _as_float(np.uint32(bits) << np.uint32(16))


@_inline
def _narrow(value: Any) -> Any:
    """float32 to the nearest bfloat16's bits, ties to even."""
    bits = _as_bits(value)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


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


def _compiled(signature: str, parallel: bool = True) -> Any:
    return numba.njit(signature, parallel=parallel, fastmath=_MATHS, nogil=True, cache=True)


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


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _multiply(weights: Any, count: Any, inputs: Any, x_address: Any, rows: Any, results: Any, stride: Any) -> None:
    """`count` matrix rows of `inputs` bfloat16 at `weights` times `rows` float32 vectors.

    The product of matrix row w and vector r goes to place `w + r · stride` of the float32 results.
    """
    row = 0
    while row < rows:
        vectors = 4 if rows - row >= 4 else (2 if rows - row >= 2 else 1)
        x = x_address + np.uint64(4) * np.uint64(row * inputs)
        for place in range(count):
            w = weights + np.uint64(2) * np.uint64(place * inputs)
            y = results + np.uint64(4) * np.uint64(row * stride + place)
            if vectors == 4:
                _FOUR_VECTORS(w, x, inputs, y, stride)
            elif vectors == 2:
                _TWO_VECTORS(w, x, inputs, y, stride)
            else:
                _ONE_VECTOR(w, x, inputs, y, stride)
        row += vectors


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


@_compiled("void(uint64, int64, uint64[::1], int64[::1], int64, uint16[:, ::1])")  # type: ignore[untyped-decorator]
def _products(x_address: Any, rows: Any, weights_M: Any, ends_M: Any, inputs: Any, y_TO: Any) -> None:
    """y = [x·W_0ᵀ, x·W_1ᵀ, …]; ends_M: where each matrix's rows end in a row of y."""
    x_TI = _wide_vector(x_address, rows * inputs)
    begin, blocks = 0, 0
    for end in ends_M:
        blocks += (end - begin + BLOCK_ROWS - 1) // BLOCK_ROWS
        begin = end
    matrix_of, first_of = np.empty(blocks, np.int64), np.empty(blocks, np.int64)
    begin = block = 0
    for matrix, end in enumerate(ends_M):
        for first in range(begin, end, BLOCK_ROWS):
            matrix_of[block], first_of[block] = matrix, first
            block += 1
        begin = end
    for block in numba.prange(blocks):  # each thread takes one run of consecutive blocks
        matrix, first = matrix_of[block], first_of[block]
        begin = ends_M[matrix - 1] if matrix else 0
        count = min(BLOCK_ROWS, ends_M[matrix] - first)
        wide_TW = np.empty((rows, BLOCK_ROWS), np.float32)
        weights = weights_M[matrix] + np.uint64(2) * np.uint64((first - begin) * inputs)
        _multiply(weights, count, inputs, _address(x_TI), rows, _address(wide_TW), BLOCK_ROWS)
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


@_compiled(  # type: ignore[untyped-decorator]
    "void(uint64, uint64[:, ::1], int64[:, ::1], float32[:, ::1], float32[:, ::1], int64, float32, float32, uint16[:, ::1])"
)
def _swiglu(
    x_address: Any,
    experts_NA: Any,
    chosen_TS: Any,
    weights_TS: Any,
    scales_TS: Any,
    width: Any,
    alpha: Any,
    limit: Any,
    y_TD: Any,
) -> None:
    """y = Σ_s w_s · down_s(silu(gate_s·x_s) ⊙ up_s·x_s), slots sorted by expert; a negative one is empty.

    x_s is x, times the slot's scale where there are scales.

    With six addresses of an expert the last are of biases; with a limit above 0 the units are of ClampedSwiglu.
    """
    biased = experts_NA.shape[1] > 3
    (tokens, slots), hidden = chosen_TS.shape, y_TD.shape[1]
    ends_N = np.zeros(experts_NA.shape[0] + 1, np.int64)
    for token in range(tokens):
        for slot in range(slots):
            ends_N[chosen_TS[token, slot] + 1] += chosen_TS[token, slot] >= 0
    used = 0
    for expert in range(experts_NA.shape[0]):
        used += ends_N[expert + 1] > 0
        ends_N[expert + 1] += ends_N[expert]
    used_N, begins_N = np.empty(used, np.int64), ends_N[:-1].copy()
    place = 0
    for expert in range(experts_NA.shape[0]):
        if ends_N[expert + 1] > ends_N[expert]:
            used_N[place] = expert
            place += 1
    members = ends_N[-1]
    x_MD, middle_MF = np.empty((members, hidden), np.float32), np.empty((members, width), np.float32)
    place_TS = np.empty((tokens, slots), np.int64)
    for token in range(tokens):
        x_D = numba.carray(_pointer(x_address + np.uint64(2) * np.uint64(token * hidden)), (hidden,))
        for slot in range(slots):
            expert = chosen_TS[token, slot]
            place_TS[token, slot] = -1
            if expert >= 0:
                place_TS[token, slot] = begins_N[expert]
                scale = scales_TS[token, slot] if scales_TS.shape[0] else np.float32(1.0)
                for index in range(hidden):
                    x_MD[begins_N[expert], index] = scale * _widen(x_D[index])
                begins_N[expert] += 1
    x_bytes, middle_bytes = np.uint64(4) * np.uint64(hidden), np.uint64(4) * np.uint64(width)
    blocks = (width + BLOCK_ROWS - 1) // BLOCK_ROWS
    for place in numba.prange(used * blocks):
        expert, first = used_N[place // blocks], place % blocks * BLOCK_ROWS
        begin, rows, count = ends_N[expert], ends_N[expert + 1] - ends_N[expert], min(BLOCK_ROWS, width - first)
        x = _address(x_MD) + np.uint64(begin) * x_bytes
        skipped = np.uint64(2) * np.uint64(first * hidden)
        gate, up = np.empty((rows, BLOCK_ROWS), np.float32), np.empty((rows, BLOCK_ROWS), np.float32)
        _multiply(experts_NA[expert, 0] + skipped, count, hidden, x, rows, _address(gate), BLOCK_ROWS)
        _multiply(experts_NA[expert, 1] + skipped, count, hidden, x, rows, _address(up), BLOCK_ROWS)
        if biased:
            _add_bias(experts_NA[expert, 3], first, count, gate)
            _add_bias(experts_NA[expert, 4], first, count, up)
        for row in range(rows):
            if limit > np.float32(0.0):
                for index in range(count):
                    g = min(gate[row, index], limit)
                    u = max(-limit, min(up[row, index], limit)) + np.float32(1.0)
                    middle_MF[begin + row, first + index] = g / (np.float32(1.0) + _exp(-alpha * g)) * u
            else:
                for index in range(count):
                    g = gate[row, index]
                    middle_MF[begin + row, first + index] = g / (np.float32(1.0) + _exp(-g)) * up[row, index]
    for place in numba.prange((hidden + BLOCK_ROWS - 1) // BLOCK_ROWS):
        first = place * BLOCK_ROWS
        count = min(BLOCK_ROWS, hidden - first)
        down_MW = np.empty((members, BLOCK_ROWS), np.float32)
        for chosen in used_N:
            begin, rows = ends_N[chosen], ends_N[chosen + 1] - ends_N[chosen]
            middle = _address(middle_MF) + np.uint64(begin) * middle_bytes
            results = _address(down_MW) + np.uint64(4) * np.uint64(begin * BLOCK_ROWS)
            weights = experts_NA[chosen, 2] + np.uint64(2) * np.uint64(first * width)
            _multiply(weights, count, width, middle, rows, results, BLOCK_ROWS)
            if biased:
                _add_bias(experts_NA[chosen, 5], first, count, down_MW[begin : begin + rows])
        for token in range(tokens):
            for index in range(count):
                total = np.float32(0.0)
                for slot in range(slots):
                    if place_TS[token, slot] >= 0:
                        total += weights_TS[token, slot] * down_MW[place_TS[token, slot], index]
                y_TD[token, first + index] = _narrow(total)


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
            _multiply(keys, count, size, _address(query_RE), per_group, results, positions)
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


def products(x_address: int, rows: int, weights: list[int], outputs: list[int], inputs: int) -> Any:
    """[x·W_0ᵀ, x·W_1ᵀ, …] side by side, [T, O]. x and the weights: addresses of contiguous bfloat16; returns such bits."""
    ends_M = np.array(list(accumulate(outputs)))
    y_TO = np.empty((rows, ends_M[-1]), np.uint16)
    _products(x_address, rows, np.array(weights, np.uint64), ends_M, inputs, y_TO)
    return y_TO


def swiglu(
    x_address: int,
    experts_NA: Any,
    chosen_TS: Any,
    weights_TS: Any,
    sizes: tuple[int, int],
    clamp: tuple[float, float] | None = None,
    scales_TS: Any = None,
) -> Any:
    """Σ_s w_s · FFN_s(scale_s · x), [T, D]; an expert is read once for all tokens that chose it.

    x [T, D] and each expert's gate [F, D], up [F, D], down [D, F], and where it has biases those of all three: addresses, as
    in `products`. chosen_TS: int64, negative for an empty slot; weights_TS, scales_TS: float32, None for scales of one.
    sizes: D and F. clamp: α and limit of a ClampedSwiglu.
    """
    hidden, width = sizes
    alpha, limit = clamp or (1.0, 0.0)
    y_TD = np.empty((chosen_TS.shape[0], hidden), np.uint16)
    scales_TS = _NO_SCALES if scales_TS is None else scales_TS
    _swiglu(x_address, experts_NA, chosen_TS, weights_TS, scales_TS, width, alpha, limit, y_TD)
    return y_TD


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


def use_threads(count: int) -> None:
    """How many threads this thread's later calls run on, at most as many as Numba started with."""
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))
