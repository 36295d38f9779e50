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

from engine.kernels.attention.instructions import fetch_bytes, scores_tile, weigh, weigh_pairs, widen_integers
from engine.kernels.compiler.arithmetic import narrow, widen
from engine.kernels.compiler.compiling import helper, inline, kernel
from engine.kernels.compiler.memory import address_of, call, floats, halves, keep, signed_bytes
from engine.kernels.compiler.parallel import kernels_at
from engine.kernels.compiler.processor import MULTIPLIES_BFLOAT16

BFLOAT16_BYTES = 2
LARGEST_INTEGER, SMALLEST_SCALE = np.float32(127.0), np.finfo(np.float32).tiny
"""As in `kv_cache.to_int8`."""
PRODUCTS = ("multiply_keys", "add_weighted_pairs") if MULTIPLIES_BFLOAT16 else ()
NO_MORE = (0, 0, 0)
"""No further cache."""
FEW_QUERIES, WIDENED = 4, 32
"""A tile of up to FEW_QUERIES queries widens integers itself. For more, WIDENED vectors at a time, or a whole piece, are
widened once."""
KEYS_AT_ONCE = 16
"""Keys that all queries are multiplied with before the next keys, so that they come from the first-level cache."""
MANY_QUERIES = 8
"""Number of queries from which each tile prefetches its share of the next keys. With fewer, each prefetches them all."""
_FOUR_OF_MANY, _ONE_OF_MANY, _FOUR_OF_SOME, _ONE_OF_SOME = weigh(4, 64), weigh(1, 64), weigh(4, 16), weigh(1, 16)
_ONE_OF_ONE = weigh(1, 1)
_FOUR_KEYS_OF_4, _FETCHED_KEYS_OF_4, _EIGHT_KEYS_OF_2, _MANY_KEYS_OF_1, _ONE_KEY = (
    *(scores_tile(4, 4), scores_tile(4, 4, fetches=True), scores_tile(8, 2, fetches=True)),
    *(scores_tile(16, 1, fetches=True), scores_tile(1, 1)),
)
_EIGHT_NEAR_PAIRS, _EIGHT_PAIRS, _FOUR_PAIRS_OF_MANY, _ONE_PAIR_OF_MANY, _FOUR_PAIRS, _ONE_PAIR = (
    *(weigh_pairs(8, 1, fetches=False), weigh_pairs(8, 1)),
    *(weigh_pairs(4, 2), weigh_pairs(1, 2)),
    *(weigh_pairs(4, 1), weigh_pairs(1, 1)),
)


@kernel("void(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def multiply_keys(
    keys: Any,
    queries: Any,
    size: Any,
    more_keys: Any,
    more_queries: Any,
    more_size: Any,
    width: Any,
    count: Any,
    stride: Any,
    rows: Any,
    results: Any,
) -> None:
    """Multiply `count` keys with `rows` bfloat16 queries, and add the products of more keys and queries.

    width: bytes of a number of a key. The sizes are multiples of 32; the further one may be 0. The product of key k and
    query r goes to place `k + r · stride` of the float32 results.
    """
    first = 0
    share = 4 * width * size // (rows // 4) if rows >= MANY_QUERIES else 0
    more_share = 4 * width * more_size // (rows // 4) if rows >= MANY_QUERIES else 0
    while first < count:
        end, row = min(first + KEYS_AT_ONCE, count), 0
        while row < rows:
            vectors = 4 if rows - row >= 4 else (2 if rows - row >= 2 else 1)
            own, more, key = queries + 2 * row * size, more_queries + 2 * row * more_size, first
            while key < end:
                k, m = keys + width * key * size, more_keys + width * key * more_size
                y = results + 4 * (row * stride + key)
                if end - key >= 16 // vectors:
                    if vectors == 4 and share > 0:
                        fetch_bytes(k + width * size * KEYS_AT_ONCE + row // 4 * share, share)
                        fetch_bytes(m + width * more_size * KEYS_AT_ONCE + row // 4 * more_share, more_share)
                        _FOUR_KEYS_OF_4(k, own, size, m, more, more_size, width, y, stride)
                    elif vectors == 4:
                        _FETCHED_KEYS_OF_4(k, own, size, m, more, more_size, width, y, stride)
                    elif vectors == 2:
                        _EIGHT_KEYS_OF_2(k, own, size, m, more, more_size, width, y, stride)
                    else:
                        _MANY_KEYS_OF_1(k, own, size, m, more, more_size, width, y, stride)
                    key += 16 // vectors
                else:
                    for each in range(vectors):
                        x, z = own + 2 * each * size, more + 2 * each * more_size
                        _ONE_KEY(k, x, size, m, z, more_size, width, y + 4 * each * stride, stride)
                    key += 1
            row += vectors
        first = end


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


@kernel("void(int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def add_weighted_pairs(
    x: Any, width: Any, size: Any, count: Any, weights: Any, positions: Any, rows: Any, results: Any, near: Any
) -> None:
    """`add_weighted` for bfloat16 weights, an even number of vectors, and sizes that are multiples of 32.

    near: whether the vectors were read just before, so that the caches hold them.
    """
    row = 0
    while row < rows:
        taken = 8 if row + 8 <= rows else (4 if row + 4 <= rows else 1)
        w = weights + 2 * row * positions
        first = 0
        while first < size:
            v, y = x + width * first, results + 4 * (row * size + first)
            if taken == 8 and near:
                _EIGHT_NEAR_PAIRS(v, width, size, count, w, positions, y, size)
                first += 32
            elif taken == 8:
                _EIGHT_PAIRS(v, width, size, count, w, positions, y, size)
                first += 32
            elif first + 64 <= size:
                if taken == 4:
                    _FOUR_PAIRS_OF_MANY(v, width, size, count, w, positions, y, size)
                else:
                    _ONE_PAIR_OF_MANY(v, width, size, count, w, positions, y, size)
                first += 64
            else:
                if taken == 4:
                    _FOUR_PAIRS(v, width, size, count, w, positions, y, size)
                else:
                    _ONE_PAIR(v, width, size, count, w, positions, y, size)
                first += 32
        row += taken


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


@inline
def room_for_wide(cache: Any, rows: Any, positions: Any) -> Any:
    """Return memory for so many vectors of bfloat16, [P, E], for `rows` queries; none where vectors are not widened."""
    _, scales, size = cache
    return np.empty((positions if _widens(scales, size, rows) else 0, size), np.uint16)


@helper
def score_keys(
    job: Any, cache: Any, more: Any, blocks_M: Any, first: Any, queries: Any, more_queries: Any, scores_RP: Any, wide_WE: Any
) -> None:
    """Write the products of the keys from position `first` on with the rotated queries, whose address is given.

    Queries are bfloat16 where `takes_pairs` says so of their size, else float32. more, more_queries: a cache of bfloat16
    keys whose products are added, where `takes_pairs` says so of both sizes; a size of 0 for none. wide_WE: from
    `room_for_wide`, for WIDENED vectors or for all positions, whose vectors it then holds.
    """
    start, scales, size = cache
    more_start, _, more_size = more
    table, (rows, positions), width = kernels_at(job.kernels), scores_RP.shape, value_bytes(scales)
    place, end, widens = first, first + positions, wide_WE.shape[0] > 0
    while place < end:
        count, slot = _run(job, place, end), slot_of(job, blocks_M, place)
        keys, read, results = start + width * slot * size, width, address_of(scores_RP) + 4 * (place - first)
        more_keys = more_start + width * slot * more_size
        if widens:
            used = place - first if wide_WE.shape[0] >= positions else 0
            count, wide = min(count, wide_WE.shape[0] - used), address_of(wide_WE) + BFLOAT16_BYTES * used * size
            widen_integers(keys, count * size, wide)
            keys, read = wide, BFLOAT16_BYTES
        if takes_pairs(size):
            own, others = (keys, queries, size), (more_keys, more_queries, more_size)
            call(table.multiply_keys, (*own, *others, read, count, positions, rows, results))
        elif scales != 0:
            _multiply_integers(keys, size, count, queries, scores_RP, place - first)
        else:
            call(table.multiply_wide, (keys, 0, 1, count, size, queries, rows, results, positions))
        place += count
    if scales != 0:
        _multiply_by_scales(job, scales, blocks_M, first, scores_RP)


@helper
def add_values(job: Any, cache: Any, blocks_M: Any, first: Any, weights_RP: Any, sums: Any, wide_WE: Any, near: Any) -> None:
    """Write the sums of the values from position `first` on, times their weights, to the float32 results at `sums`.

    The weights are multiplied by the scales of the values in place. wide_WE: as in `score_keys`. near: whether
    `score_keys` has just read these vectors; wide_WE, if it has room, then holds all of them.
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
    widens, is_wide = wide_WE.shape[0] > 0, wide_WE.shape[0] > 0 and near
    while place < end:
        count = end - place if is_wide else _run(job, place, end)
        if takes_pairs(size):  # an odd position and the next one are no pair, in blocks and in contiguous memory
            count = 1 if place % 2 == 1 or count == 1 else count & -2
        values, read = start + width * slot_of(job, blocks_M, place) * size, width
        if widens:
            used = place - first if is_wide else 0
            count, wide = min(count, wide_WE.shape[0] - used), address_of(wide_WE) + BFLOAT16_BYTES * used * size
            if not is_wide:
                widen_integers(values, count * size, wide)
            values, read = wide, BFLOAT16_BYTES
        if takes_pairs(size) and count > 1:
            weights = address_of(rounded_RP) + 2 * (place - first)
            call(table.add_weighted_pairs, (values, read, size, count, weights, positions, rows, sums, np.int64(near)))
        else:
            weights = address_of(weights_RP) + 4 * (place - first)
            call(table.add_weighted, (values, read, size, count, weights, positions, rows, sums))
        place += count
    keep(rounded_RP)
