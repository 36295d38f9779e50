"""Products of queries with the vectors of a cache, and weighted sums of these, as they are stored: bfloat16 or 8 bits.

A cache of vectors is a tuple of the address of its first slot, the address of the float32 scales of the slots (0 where the
vectors are bfloat16), and the size E of a vector. bfloat16 holds integers of 8 bits exactly, so that the same instructions
multiply them: q · (s·k) = s · (q·k), and p · (s·v) = (p·s) · v.

Shape suffixes: R queries that read the same vectors, P positions, E size of a vector, M blocks of a sequence.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from engine.kernels.attention.instructions import scores_tile, weigh, weigh_pairs, widen_integers
from engine.kernels.compiler.arithmetic import narrow, widen
from engine.kernels.compiler.compiling import helper, inline, kernel
from engine.kernels.compiler.memory import address_of, call, floats, halves, keep, signed_bytes
from engine.kernels.compiler.parallel import kernels_at
from engine.kernels.compiler.processor import MULTIPLIES_BFLOAT16

BFLOAT16_BYTES = 2
LARGEST_INTEGER, SMALLEST_SCALE = np.float32(127.0), np.finfo(np.float32).tiny
"""As in `kv_cache.to_int8`."""
PRODUCTS = ("multiply_keys", "add_weighted_pairs") if MULTIPLIES_BFLOAT16 else ()
FEW_QUERIES, WIDENED = 4, 32
"""A tile of up to FEW_QUERIES queries widens integers itself. For more, WIDENED vectors at a time are widened once."""
_FOUR_OF_MANY, _ONE_OF_MANY, _FOUR_OF_SOME, _ONE_OF_SOME = weigh(4, 64), weigh(1, 64), weigh(4, 16), weigh(1, 16)
_ONE_OF_ONE = weigh(1, 1)
_FOUR_KEYS_OF_4, _EIGHT_KEYS_OF_2, _MANY_KEYS_OF_1, _ONE_KEY = (
    *(scores_tile(4, 4), scores_tile(8, 2)),
    *(scores_tile(16, 1), scores_tile(1, 1)),
)
_FOUR_PAIRS_OF_MANY, _ONE_PAIR_OF_MANY, _FOUR_PAIRS, _ONE_PAIR = (
    *(weigh_pairs(4, 2), weigh_pairs(1, 2)),
    *(weigh_pairs(4, 1), weigh_pairs(1, 1)),
)


@kernel("void(int64, int64, int64, int64, int64, int64, int64, int64)")
def multiply_keys(keys: Any, width: Any, size: Any, count: Any, queries: Any, stride: Any, rows: Any, results: Any) -> None:
    """Multiply `count` keys with `rows` bfloat16 queries. The size is a multiple of 32.

    width: bytes of a number of a key. The product of key k and query r goes to place `k + r · stride` of the float32
    results.
    """
    row = 0
    while row < rows:
        vectors = 4 if rows - row >= 4 else (2 if rows - row >= 2 else 1)
        own, key = queries + 2 * row * size, 0
        while key < count:
            k, y = keys + width * key * size, results + 4 * (row * stride + key)
            if count - key >= 16 // vectors:
                if vectors == 4:
                    _FOUR_KEYS_OF_4(k, width, own, size, y, stride)
                elif vectors == 2:
                    _EIGHT_KEYS_OF_2(k, width, own, size, y, stride)
                else:
                    _MANY_KEYS_OF_1(k, width, own, size, y, stride)
                key += 16 // vectors
            else:
                for more in range(vectors):
                    _ONE_KEY(k, width, own + 2 * more * size, size, y + 4 * more * stride, stride)
                key += 1
        row += vectors


@kernel("void(int64, int64, int64, int64, int64, int64, int64, int64)")
def add_weighted(x: Any, width: Any, size: Any, count: Any, weights: Any, positions: Any, rows: Any, results: Any) -> None:
    """Add `count` vectors of `size` values at `x`, each times its weight, to `rows` contiguous float32 results.

    width: bytes of a value.
    """
    row = 0
    while row < rows:
        four = row + 4 <= rows
        w = weights + 4 * row * positions
        first = 0
        while first < size:
            v, y = x + width * first, results + 4 * (row * size + first)
            if first + 64 <= size:
                if four:
                    _FOUR_OF_MANY(v, width, size, count, w, positions, y, size)
                else:
                    _ONE_OF_MANY(v, width, size, count, w, positions, y, size)
                first += 64
            elif first + 16 <= size:
                if four:
                    _FOUR_OF_SOME(v, width, size, count, w, positions, y, size)
                else:
                    _ONE_OF_SOME(v, width, size, count, w, positions, y, size)
                first += 16
            else:
                for more in range(4 if four else 1):
                    _ONE_OF_ONE(v, width, size, count, w + 4 * more * positions, positions, y + 4 * more * size, size)
                first += 1
        row += 4 if four else 1


@kernel("void(int64, int64, int64, int64, int64, int64, int64, int64)")
def add_weighted_pairs(
    x: Any, width: Any, size: Any, count: Any, weights: Any, positions: Any, rows: Any, results: Any
) -> None:
    """`add_weighted` for bfloat16 weights, an even number of vectors, and sizes that are multiples of 32."""
    row = 0
    while row < rows:
        four = row + 4 <= rows
        w = weights + 2 * row * positions
        first = 0
        while first < size:
            v, y = x + width * first, results + 4 * (row * size + first)
            if first + 64 <= size:
                if four:
                    _FOUR_PAIRS_OF_MANY(v, width, size, count, w, positions, y, size)
                else:
                    _ONE_PAIR_OF_MANY(v, width, size, count, w, positions, y, size)
                first += 64
            else:
                if four:
                    _FOUR_PAIRS(v, width, size, count, w, positions, y, size)
                else:
                    _ONE_PAIR(v, width, size, count, w, positions, y, size)
                first += 32
        row += 4 if four else 1


@inline
def takes_pairs(size: Any) -> Any:
    """Return whether pairs of bfloat16 are multiplied, in vectors of this size."""
    return MULTIPLIES_BFLOAT16 and size % 32 == 0


@inline
def slot_of(job: Any, blocks_M: Any, position: Any) -> Any:
    """Return the slot of the cache that holds a sequence's position."""
    return blocks_M[position // job.block_size] * job.block_size + position % job.block_size


@inline
def _run(job: Any, place: Any, end: Any) -> Any:
    """Return how many positions from this one on, up to `end`, lie in one block."""
    return min(job.block_size - place % job.block_size, end - place)


@inline
def value_bytes(scales: Any) -> Any:
    """Return the bytes of each value of a cache with these scales."""
    return 1 if scales != 0 else BFLOAT16_BYTES


@helper
def keep_vector(cache: Any, slot: Any, x_E: Any) -> None:
    """Round a vector of float32 to bfloat16, in place, and write it to a slot.

    A cache of 8 bits gets its integers and its scale, which is NaN where a value is.
    """
    start, scales, size = cache
    for index in range(size):
        x_E[index] = widen(narrow(x_E[index]))
    if scales == 0:
        half_E = numba.carray(halves(start + BFLOAT16_BYTES * slot * size), (size,))
        for index in range(size):
            half_E[index] = narrow(x_E[index])
        return
    largest, is_number = np.float32(0.0), True
    for index in range(size):
        largest = max(largest, abs(x_E[index]))
        is_number = is_number and x_E[index] == x_E[index]
    scale = largest / LARGEST_INTEGER if is_number else np.float32(np.nan)
    numba.carray(floats(scales + 4 * slot), (1,))[0] = scale
    integer_E, divisor = numba.carray(signed_bytes(start + slot * size), (size,)), max(scale, SMALLEST_SCALE)
    for index in range(size):
        integer_E[index] = np.int8(np.rint(x_E[index] / divisor))


@helper
def _multiply_by_scales(job: Any, scales: Any, blocks_M: Any, first: Any, values_RP: Any) -> None:
    """Multiply the value of each position from `first` on by the position's scale."""
    rows, positions = values_RP.shape
    place, end = first, first + positions
    while place < end:
        count = _run(job, place, end)
        scale_P = numba.carray(floats(scales + 4 * slot_of(job, blocks_M, place)), (count,))
        for row in range(rows):
            begin = address_of(values_RP) + 4 * (row * positions + place - first)
            own_P = numba.carray(floats(begin), (count,))  # LLVM does not vectorize an access whose index is a sum
            for index in range(count):
                own_P[index] *= scale_P[index]
        place += count


@helper
def _multiply_integers(keys: Any, size: Any, count: Any, queries: Any, results_RP: Any, begin: Any) -> None:
    """Multiply `count` keys of 8 bits with float32 queries, without products of pairs. begin: the first key's position."""
    rows = results_RP.shape[0]
    query_RE, key_PE = numba.carray(floats(queries), (rows, size)), numba.carray(signed_bytes(keys), (count, size))
    for row in range(rows):
        for key in range(count):
            total = np.float32(0.0)
            for index in range(size):
                total += query_RE[row, index] * np.float32(key_PE[key, index])
            results_RP[row, begin + key] = total


@inline
def _widens(scales: Any, size: Any, rows: Any) -> Any:
    """Return whether vectors of 8 bits are first written as bfloat16 to memory, once for all queries."""
    return scales != 0 and takes_pairs(size) and rows > FEW_QUERIES


@helper
def score_keys(job: Any, cache: Any, blocks_M: Any, first: Any, queries: Any, scores_RP: Any) -> None:
    """Write the products of the keys from position `first` on with the rotated queries, whose address is given.

    Queries are bfloat16 where `takes_pairs` says so of their size, else float32.
    """
    start, scales, size = cache
    table, (rows, positions), width = kernels_at(job.kernels), scores_RP.shape, value_bytes(scales)
    place, end, widens = first, first + positions, _widens(scales, size, rows)
    wide, read = np.empty(WIDENED * size if widens else 0, np.uint16), BFLOAT16_BYTES if widens else width
    while place < end:
        count = _run(job, place, end)
        keys = start + width * slot_of(job, blocks_M, place) * size
        results = address_of(scores_RP) + 4 * (place - first)
        if widens:
            count = min(count, WIDENED)
            widen_integers(keys, count * size, address_of(wide))
            keys = address_of(wide)
        if takes_pairs(size):
            call(table.multiply_keys, (keys, read, size, count, queries, positions, rows, results))
        elif scales != 0:
            _multiply_integers(keys, size, count, queries, scores_RP, place - first)
        else:
            call(table.multiply_wide, (keys, 0, 1, count, size, queries, rows, results, positions))
        place += count
    keep(wide)
    if scales != 0:
        _multiply_by_scales(job, scales, blocks_M, first, scores_RP)


@helper
def add_values(job: Any, cache: Any, blocks_M: Any, first: Any, weights_RP: Any, sums: Any) -> None:
    """Write the sums of the values from position `first` on, times their weights, to the float32 results at `sums`.

    The weights are multiplied by the scales of the values in place.
    """
    start, scales, size = cache
    table, (rows, positions), width = kernels_at(job.kernels), weights_RP.shape, value_bytes(scales)
    if scales != 0:
        _multiply_by_scales(job, scales, blocks_M, first, weights_RP)
    sum_RE, place, end = numba.carray(floats(sums), (rows, size)), first, first + positions
    sum_RE[:] = np.float32(0.0)
    rounded_RP = np.empty((rows, positions if takes_pairs(size) else 0), np.uint16)
    for row in range(rows):
        for index in range(rounded_RP.shape[1]):
            rounded_RP[row, index] = narrow(weights_RP[row, index])
    widens = _widens(scales, size, rows)
    wide, read = np.empty(WIDENED * size if widens else 0, np.uint16), BFLOAT16_BYTES if widens else width
    while place < end:
        count = _run(job, place, end)
        values = start + width * slot_of(job, blocks_M, place) * size
        if takes_pairs(size):  # an odd position and the next one are no pair, in blocks and in contiguous memory
            count = 1 if place % 2 == 1 or count == 1 else count & -2
        if widens:
            count = min(count, WIDENED)
            widen_integers(values, count * size, address_of(wide))
            values = address_of(wide)
        if takes_pairs(size) and count > 1:
            weights = address_of(rounded_RP) + 2 * (place - first)
            call(table.add_weighted_pairs, (values, read, size, count, weights, positions, rows, sums))
        else:
            weights = address_of(weights_RP) + 4 * (place - first)
            call(table.add_weighted, (values, read, size, count, weights, positions, rows, sums))
        place += count
    keep(wide)
    keep(rounded_RP)
