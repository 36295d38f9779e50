"""Products of queries with the vectors of a cache, and weighted sums of these, as they are stored: bfloat16 or 8 bits.

A cache of vectors is a tuple of the address of its first slot, the address of the float32 scales of the slots (0 where the
vectors are bfloat16), and the size E of a vector. Integers of 8 bits are multiplied as they are, q · (s·k) = s · (q·k) and
p · (s·v) = (p·s) · v: with queries and weights of 15 bits where the processor multiplies bytes four at a time, and with
float32 elsewhere and in vectors of more than MOST_OF_BYTES values, which no known model has.

Shape suffixes: R queries that read the same vectors, P positions, E size of a vector, M blocks of a sequence.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from engine.kernels.attention.byte_values import (
    FEW_ROWS,
    STEP_BYTES,
    TOGETHER,
    round_weights,
    steps_of,
)
from engine.kernels.attention.instructions import weigh, weigh_pairs
from engine.kernels.attention.scores import (
    IN_A_REGISTER,
    MOST_OF_BYTES,
    bytes_of_bytes,
    bytes_of_pairs,
    keep_bytes,
    keep_pairs,
    registers_of,
)
from engine.kernels.compiler.arithmetic import narrow, widen
from engine.kernels.compiler.compiling import helper, inline, kernel
from engine.kernels.compiler.memory import address_of, aligned, call, floats, halves, keep, signed_bytes
from engine.kernels.compiler.parallel import kernels_at
from engine.kernels.compiler.processor import MULTIPLIES_BFLOAT16, MULTIPLIES_QUADRUPLES

BFLOAT16_BYTES = 2
LARGEST_INTEGER, SMALLEST_SCALE = np.float32(127.0), np.finfo(np.float32).tiny
"""As in `kv_cache.to_int8`."""
PRODUCTS = (
    *(("score_pairs", "add_weighted_pairs") if MULTIPLIES_BFLOAT16 else ()),
    *(("score_bytes", "add_weighted_bytes") if MULTIPLIES_QUADRUPLES else ()),
)
NO_MORE = (0, 0, 0)
"""No further cache."""
AS_FLOATS, AS_PAIRS, AS_BYTES = 0, 1, 2
"""Forms of a cache: its vectors are multiplied as float32, as pairs of bfloat16, or as integers of 8 bits."""
_FOUR_OF_MANY, _ONE_OF_MANY, _FOUR_OF_SOME, _ONE_OF_SOME = weigh(4, 64), weigh(1, 64), weigh(4, 16), weigh(1, 16)
_ONE_OF_ONE = weigh(1, 1)
_EIGHT_NEAR_PAIRS, _EIGHT_PAIRS, _FOUR_PAIRS_OF_MANY, _ONE_PAIR_OF_MANY, _FOUR_PAIRS, _ONE_PAIR = (
    *(weigh_pairs(8, 1, fetches=False), weigh_pairs(8, 1)),
    *(weigh_pairs(4, 2), weigh_pairs(1, 2)),
    *(weigh_pairs(4, 1), weigh_pairs(1, 1)),
)


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
    x: Any, size: Any, count: Any, weights: Any, positions: Any, rows: Any, results: Any, near: Any
) -> None:
    """`add_weighted` for vectors and weights of bfloat16, an even number of vectors, and sizes that are multiples of 32.

    near: whether the vectors were read just before, so that the caches hold them.
    """
    row = 0
    while row < rows:
        taken = 8 if row + 8 <= rows else (4 if row + 4 <= rows else 1)
        w = weights + 2 * row * positions
        first = 0
        while first < size:
            v, y = x + BFLOAT16_BYTES * first, results + 4 * (row * size + first)
            if taken == 8 and near:
                _EIGHT_NEAR_PAIRS(v, BFLOAT16_BYTES, size, count, w, positions, y, size)
                first += 32
            elif taken == 8:
                _EIGHT_PAIRS(v, BFLOAT16_BYTES, size, count, w, positions, y, size)
                first += 32
            elif first + 64 <= size:
                if taken == 4:
                    _FOUR_PAIRS_OF_MANY(v, BFLOAT16_BYTES, size, count, w, positions, y, size)
                else:
                    _ONE_PAIR_OF_MANY(v, BFLOAT16_BYTES, size, count, w, positions, y, size)
                first += 64
            else:
                if taken == 4:
                    _FOUR_PAIRS(v, BFLOAT16_BYTES, size, count, w, positions, y, size)
                else:
                    _ONE_PAIR(v, BFLOAT16_BYTES, size, count, w, positions, y, size)
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


@inline
def form_of_cache(cache: Any) -> Any:
    """Return the form of a cache."""
    _, scales, size = cache
    form = AS_FLOATS
    if scales != 0 and MULTIPLIES_QUADRUPLES and size % 32 == 0 and size <= MOST_OF_BYTES:
        form = AS_BYTES
    elif scales == 0 and takes_pairs(size):
        form = AS_PAIRS
    return form


@inline
def query_bytes(cache: Any, rows: Any) -> Any:
    """Return the bytes of so many queries that are prepared for the vectors of a cache."""
    size, form = cache[2], form_of_cache(cache)
    taken = 4 * rows * size
    if form == AS_BYTES:
        taken = bytes_of_bytes(size, rows)
    elif form == AS_PAIRS:
        taken = bytes_of_pairs(size, rows)
    return taken


@helper
def keep_query(cache: Any, x_E: Any, queries: Any, row: Any) -> None:
    """Write a query of float32 to its place among the queries that are prepared for the vectors of a cache."""
    form, size = form_of_cache(cache), x_E.shape[0]
    if form == AS_BYTES:
        keep_bytes(x_E, queries, row)
    elif form == AS_PAIRS:
        keep_pairs(x_E, queries, row)
    else:
        own_E = numba.carray(floats(queries + 4 * row * size), (size,))
        own_E[:] = x_E


@inline
def room_for_scores(rows: Any, positions: Any) -> Any:
    """Return memory for scores [R, P], whose number of rows is a multiple of that of queries in a register."""
    return np.empty((IN_A_REGISTER * registers_of(rows), positions), np.float32)


@helper
def _multiply_integers(keys: Any, size: Any, count: Any, queries: Any, results_RP: Any, begin: Any) -> None:
    """Multiply `count` keys of 8 bits with float32 queries, where bytes are not multiplied four at a time.

    begin: the first key's position.
    """
    rows = results_RP.shape[0]
    query_RE, key_PE = numba.carray(floats(queries), (rows, size)), numba.carray(signed_bytes(keys), (count, size))
    for row in range(rows):
        for key in range(count):
            total = np.float32(0.0)
            for index in range(size):
                total += query_RE[row, index] * np.float32(key_PE[key, index])
            results_RP[row, begin + key] = total


@helper
def multiply_vectors(table: Any, form: Any, own: Any, more: Any, count: Any, to: Any) -> None:
    """Multiply `count` vectors of a form, which lie one after the other, with prepared queries.

    own: addresses of the vectors, of their scales and of the queries, and their size. more: the same of vectors whose
    products are added, with a size of 0 for none. to: number of queries, address of the results, and stride. There must
    be room for results as in `room_for_scores`. AS_FLOATS takes vectors of bfloat16, and no more vectors.
    """
    (vectors, _, queries, size), (rows, results, stride) = own, to
    if form == AS_FLOATS:
        call(table.multiply_wide, (vectors, 0, 1, count, size, queries, rows, results, stride))
    else:
        score = table.score_bytes if form == AS_BYTES else table.score_pairs
        call(score, (*own, *more, count, registers_of(rows), results, stride))


@helper
def score_keys(
    job: Any, cache: Any, more: Any, blocks_M: Any, first: Any, queries: Any, more_queries: Any, scores_RP: Any
) -> None:
    """Write the products of the keys from position `first` on with the rotated queries, whose address is given.

    queries, more_queries: as `keep_query` writes them. more: a cache of the same form, whose products are added; NO_MORE for
    none. scores_RP: the first rows of `room_for_scores`.
    """
    start, scales, size = cache
    more_start, more_scales, more_size = more
    table, (rows, positions), width = kernels_at(job.kernels), scores_RP.shape, value_bytes(scales)
    place, end, form = first, first + positions, form_of_cache(cache)
    while place < end:
        count, slot = _run(job, place, end), slot_of(job, blocks_M, place)
        keys, results = start + width * slot * size, address_of(scores_RP) + 4 * (place - first)
        if form == AS_FLOATS and scales != 0:
            _multiply_integers(keys, size, count, queries, scores_RP, place - first)
        else:
            own = keys, scales + 4 * slot, queries, size
            others = more_start + width * slot * more_size, more_scales + 4 * slot, more_queries, more_size
            multiply_vectors(table, form, own, others, count, (rows, results, positions))
        place += count
    if form == AS_FLOATS and scales != 0:
        _multiply_by_scales(job, scales, blocks_M, first, scores_RP)


@helper
def _add_bytes(job: Any, cache: Any, blocks_M: Any, first: Any, weights_RP: Any, sums: Any) -> None:
    """`add_values` for vectors of 8 bits, whose scales the weights have been multiplied by.

    Four positions that lie in several blocks, or are fewer than four, are copied.
    """
    (rows, positions), (start, _, size) = weights_RP.shape, cache
    steps, place, end, copied = steps_of(positions), first, first + positions, 0
    place_S = np.empty(steps, np.int64)
    copies = np.zeros((min(steps, positions // job.block_size + 2), TOGETHER, size), np.int8)
    while place < end:
        step, whole = (place - first) // TOGETHER, _run(job, place, end) // TOGETHER
        vectors = start + slot_of(job, blocks_M, place) * size
        for each in range(whole):
            place_S[step + each] = vectors + TOGETHER * size * each
        if whole == 0:
            place_S[step] = address_of(copies) + TOGETHER * size * copied
            for each in range(min(TOGETHER, end - place)):
                vector = start + slot_of(job, blocks_M, place + each) * size
                copies[copied, each] = numba.carray(signed_bytes(vector), (size,))
            copied += 1
        place += TOGETHER * max(whole, 1)
    rounded_RLP, factor_R = np.empty((rows, 2, TOGETHER * steps), np.uint8), np.empty(rows, np.float32)
    round_weights(weights_RP, rounded_RLP, factor_R)
    turned = aligned(steps * STEP_BYTES if rows > FEW_ROWS else 0)
    given = address_of(place_S), steps, size, address_of(rounded_RLP), address_of(factor_R), rows, address_of(turned), sums
    call(kernels_at(job.kernels).add_weighted_bytes, given)
    keep(turned)
    keep(place_S)
    keep(copies)
    keep(rounded_RLP)
    keep(factor_R)


@helper
def add_values(job: Any, cache: Any, blocks_M: Any, first: Any, weights_RP: Any, sums: Any, near: Any) -> None:
    """Write the sums of the values from position `first` on, times their weights, to the float32 results at `sums`.

    The weights are multiplied by the scales of the values in place. near: whether `score_keys` has just read these vectors.
    """
    start, scales, size = cache
    table, (rows, positions), width = kernels_at(job.kernels), weights_RP.shape, value_bytes(scales)
    form = form_of_cache(cache)
    if scales != 0:
        _multiply_by_scales(job, scales, blocks_M, first, weights_RP)
    if form == AS_BYTES:
        _add_bytes(job, cache, blocks_M, first, weights_RP, sums)
        return
    sum_RE, place, end = numba.carray(floats(sums), (rows, size)), first, first + positions
    sum_RE[:] = np.float32(0.0)
    rounded_RP = np.empty((rows, positions if form == AS_PAIRS else 0), np.uint16)
    for row in range(rows):
        for index in range(rounded_RP.shape[1]):
            rounded_RP[row, index] = narrow(weights_RP[row, index])
    while place < end:
        count = _run(job, place, end)
        if form == AS_PAIRS:  # an odd position and the next one are no pair, in blocks and in contiguous memory
            count = 1 if place % 2 == 1 or count == 1 else count & -2
        values = start + width * slot_of(job, blocks_M, place) * size
        if form == AS_PAIRS and count > 1:
            weights = address_of(rounded_RP) + 2 * (place - first)
            call(table.add_weighted_pairs, (values, size, count, weights, positions, rows, sums, np.int64(near)))
        else:
            weights = address_of(weights_RP) + 4 * (place - first)
            call(table.add_weighted, (values, width, size, count, weights, positions, rows, sums))
        place += count
    keep(rounded_RP)
