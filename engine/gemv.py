"""The products that decoding one token consists of, compiled by Numba: bfloat16 matrices times one vector.

At one row every product is bound by the memory that its weights come from. These kernels read each weight once, row after
row, one stream per thread, and keep everything between two products in float32. One call does what torch needs a dozen
for: several matrices on one vector, or all chosen experts of a layer. They take addresses: a weight's bits are
read where they lie, and nothing is wrapped or checked on the way. `engine/linear.py` checks and calls them.

Optional (`pip install moe-compress[fast]`); without Numba the same products run in torch.

Shape suffixes: O output features, I input features, S slots (chosen experts), D hidden, F expert width, M matrices,
G key-value heads, H query heads, P positions, E head dimension.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

BLOCK_ROWS = 32
"""Rows of gate, then of up, that one thread takes in turn: long enough to be two streams and not one mixed one."""
_MATHS = {"reassoc", "contract", "nsz"}
"""Sums may be reordered, so that they use vector registers; NaN and infinity stay what they are."""


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


@_inline
def _row_times(address: Any, row: Any, x_I: Any) -> Any:
    """One row of the matrix at `address` times x."""
    length = x_I.shape[0]
    row_I = numba.carray(_pointer(address + np.uint64(2) * np.uint64(row * length)), (length,))
    total = np.float32(0.0)
    for index in range(length):
        total += _widen(row_I[index]) * x_I[index]
    return total


def _compiled(signature: str, parallel: bool = True) -> Any:
    return numba.njit(signature, parallel=parallel, fastmath=_MATHS, nogil=True, cache=True)


@_compiled("void(uint64, uint64[::1], int64[::1], int64, uint16[::1])")  # type: ignore[untyped-decorator]
def _products(x_address: Any, weights_M: Any, ends_M: Any, inputs: Any, y_O: Any) -> None:
    """y = [W_0·x, W_1·x, …]; ends_M: where each matrix's rows end in y."""
    x_I = _wide_vector(x_address, inputs)
    for row in numba.prange(y_O.shape[0]):  # each thread takes one run of consecutive rows
        matrix = 0
        while row >= ends_M[matrix]:
            matrix += 1
        begin = ends_M[matrix - 1] if matrix else 0
        y_O[row] = _narrow(_row_times(weights_M[matrix], row - begin, x_I))


@_compiled("void(uint64, uint64[:, ::1], float32[::1], int64, uint16[::1])")  # type: ignore[untyped-decorator]
def _swiglu(x_address: Any, experts_S3: Any, weights_S: Any, width: Any, y_D: Any) -> None:
    """y = Σ_s w_s · down_s(silu(gate_s·x) ⊙ up_s·x)."""
    hidden = y_D.shape[0]
    x_D = _wide_vector(x_address, hidden)
    slots = weights_S.shape[0]
    blocks = (width + BLOCK_ROWS - 1) // BLOCK_ROWS
    middle_SF = np.empty((slots, width), np.float32)
    for place in numba.prange(slots * blocks):
        slot, first = place // blocks, place % blocks * BLOCK_ROWS
        rows = min(BLOCK_ROWS, width - first)
        gate, up = np.empty(BLOCK_ROWS, np.float32), np.empty(BLOCK_ROWS, np.float32)
        for row in range(rows):
            gate[row] = _row_times(experts_S3[slot, 0], first + row, x_D)
        for row in range(rows):
            up[row] = _row_times(experts_S3[slot, 1], first + row, x_D)
        for row in range(rows):
            middle_SF[slot, first + row] = gate[row] / (np.float32(1.0) + _exp(-gate[row])) * up[row]
    for row in numba.prange(hidden):
        total = np.float32(0.0)
        for slot in range(slots):
            total += weights_S[slot] * _row_times(experts_S3[slot, 2], row, middle_SF[slot])
        y_D[row] = _narrow(total)


@_compiled("void(uint64, uint64, float32, uint16[::1])", parallel=False)  # type: ignore[untyped-decorator]
def _rms_norm(x_address: Any, weight_address: Any, epsilon: Any, y_D: Any) -> None:
    """y = weight · bfloat16(x / rms(x)): rounded where torch's own steps round."""
    size = y_D.shape[0]
    x_D, weight_D = _wide_vector(x_address, size), _wide_vector(weight_address, size)
    squares = np.float32(0.0)
    for index in range(size):
        squares += x_D[index] * x_D[index]
    scale = np.float32(1.0) / np.sqrt(squares / np.float32(size) + epsilon)
    for index in range(size):
        y_D[index] = _narrow(weight_D[index] * _widen(_narrow(x_D[index] * scale)))


@_inline
def _rotated(address: Any, cosine_E: Any, sine_E: Any) -> Any:
    """One head's vector turned to its position, halves paired."""
    size = cosine_E.shape[0]
    half = size // 2
    head_E = _wide_vector(address, size)
    turned_E = np.empty(size, np.float32)
    for index in range(half):
        turned_E[index] = head_E[index] * cosine_E[index] - head_E[index + half] * sine_E[index]
        turned_E[index + half] = head_E[index + half] * cosine_E[index + half] + head_E[index] * sine_E[index + half]
    return turned_E


@_compiled(  # type: ignore[untyped-decorator]
    "void(uint64, uint64, uint64, uint64, uint64, uint16[:, :, ::1], uint16[:, :, ::1], int64, int64, uint16[::1])"
)
def _attend(
    query_address: Any,
    key_address: Any,
    value_address: Any,
    cosine_address: Any,
    sine_address: Any,
    keys_GPE: Any,
    values_GPE: Any,
    position: Any,
    first: Any,
    mixed_HE: Any,
) -> None:
    """Rotate query and key, append key and value at `position`, attend from `first` on."""
    groups, size = keys_GPE.shape[0], keys_GPE.shape[2]
    per_group = mixed_HE.shape[0] // size // groups
    head_bytes = np.uint64(2 * size)
    cosine_E, sine_E = _wide_vector(cosine_address, size), _wide_vector(sine_address, size)
    scale = np.float32(1.0) / np.sqrt(np.float32(size))
    for group in numba.prange(groups):
        key_E = _rotated(key_address + np.uint64(group) * head_bytes, cosine_E, sine_E)
        value_E = numba.carray(_pointer(value_address + np.uint64(group) * head_bytes), (size,))
        for index in range(size):
            keys_GPE[group, position, index] = _narrow(key_E[index])
            values_GPE[group, position, index] = value_E[index]
        scores_P = np.empty(position + 1 - first, np.float32)
        sum_E = np.empty(size, np.float32)
        for head in range(group * per_group, (group + 1) * per_group):
            query_E = _rotated(query_address + np.uint64(head) * head_bytes, cosine_E, sine_E)
            largest = np.float32(-np.inf)
            for place in range(scores_P.shape[0]):
                score = np.float32(0.0)
                for index in range(size):
                    score += query_E[index] * _widen(keys_GPE[group, first + place, index])
                scores_P[place] = score * scale
                largest = max(largest, scores_P[place])
            total = np.float32(0.0)
            for place in range(scores_P.shape[0]):
                scores_P[place] = _exp(scores_P[place] - largest)
                total += scores_P[place]
            for index in range(size):
                sum_E[index] = np.float32(0.0)
            for place in range(scores_P.shape[0]):
                weight = scores_P[place]
                for index in range(size):
                    sum_E[index] += weight * _widen(values_GPE[group, first + place, index])
            for index in range(size):
                mixed_HE[head * size + index] = _narrow(sum_E[index] / total)


def products(x_address: int, weights: list[int], outputs: list[int], inputs: int) -> Any:
    """[W_0·x, W_1·x, …], one after the other. x and the weights: addresses of contiguous bfloat16; returns such bits."""
    ends_M = np.cumsum(outputs)
    y_O = np.empty(ends_M[-1], np.uint16)
    _products(x_address, np.array(weights, np.uint64), ends_M, inputs, y_O)
    return y_O


def swiglu(x_address: int, experts: list[tuple[int, int, int]], weights: list[float], hidden: int, width: int) -> Any:
    """Σ_s w_s · FFN_s(x). x and experts' gate [F, D], up [F, D], down [D, F]: addresses, as in `products`."""
    y_D = np.empty(hidden, np.uint16)
    _swiglu(x_address, np.array(experts, np.uint64).reshape(-1, 3), np.array(weights, np.float32), width, y_D)
    return y_D


def rms_norm(x_address: int, weight_address: int, epsilon: float, size: int) -> Any:
    """x / rms(x) · weight of one vector; addresses as in `products`."""
    y_D = np.empty(size, np.uint16)
    _rms_norm(x_address, weight_address, epsilon, y_D)
    return y_D


def attend(
    query_key_value: tuple[int, int, int],
    cosine_sine: tuple[int, int],
    keys_GPE: Any,
    values_GPE: Any,
    position: int,
    first: int,
    query_size: int,
) -> Any:
    """One new position of one sequence: rotates its query and key, appends key and value to the cache, attends.

    query [H, E], key [G, E], value [G, E], cosine [E], sine [E]: addresses, as in `products`. keys_GPE, values_GPE: the
    cache's bits, `position` of them filled; positions before `first` are outside the window. Returns [H·E] bits.
    """
    mixed_HE = np.empty(query_size, np.uint16)
    _attend(*query_key_value, *cosine_sine, keys_GPE, values_GPE, position, first, mixed_HE)
    return mixed_HE


def use_threads(count: int) -> None:
    """How many threads this thread's later calls run on, at most as many as Numba started with."""
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))
