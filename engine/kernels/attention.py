"""Attention of one new position of each sequence over a cache whose keys and values lie in blocks of positions."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

from engine.kernels.compiler.arithmetic import exp, narrow, wide_vector, widen
from engine.kernels.compiler.compiling import BLOCK, JOB, helper, inline, kernel
from engine.kernels.compiler.instructions import FLOAT, INDEX, at, load, loop, many, repeated, widened
from engine.kernels.compiler.memory import address_of, call, floats, halves, integers, keep, record_at
from engine.kernels.compiler.parallel import kernels_at, loop_for

ATTENTION = np.dtype(
    [
        ("kernels", np.int64),
        *((name, np.int64) for name in ("query", "key", "value", "cosine", "sine")),  # [B, H or G, E], angles [B, E]
        *((f"{name}_stride", np.int64) for name in ("query", "key", "value")),  # values from one sequence to the next
        ("keys", np.int64),  # keys of the cache, [G, slots, E]
        ("values", np.int64),
        ("group_stride", np.int64),  # values from one group of the cache to the next
        ("sequences", np.int64),
        ("heads", np.int64),
        ("groups", np.int64),
        ("size", np.int64),  # E
        ("blocks", np.int64),  # [B, M] int64: the blocks of each sequence
        ("blocks_of_one", np.int64),  # M, blocks of one sequence
        ("past", np.int64),  # [B] int64: filled positions
        ("block_size", np.int64),
        ("window", np.int64),  # visible positions; a negative number is the size of chunks; 0 for all positions
        ("sinks", np.int64),  # [H] float32; 0 for none
        ("repeats", np.int64),  # 1 if several of the B may be positions of one sequence, else 0
        ("results", np.int64),  # [B, H, E] bfloat16
        ("scale", np.float32),  # factor of the scores
    ],
    align=True,
)
"""Arguments of the attention of one new position of each sequence. The kernel rotates queries and keys, appends keys and
values to the cache, and then attends. Where sequences repeat, all keys and values are appended before any query attends."""
attention_at = record_at(ATTENTION)


def _weigh(rows: int, size: int) -> Any:
    """Return a function of (address of P bfloat16 vectors, values from one vector to the next, P, address of R rows of P
    float32 weights, values from one row to the next, address of the results, stride).

    The function adds Σ_p weight_rp · vector_p, of `size` values, to the float32 results of row r at `r · stride`.
    """
    kind = many(FLOAT, size)

    def weigh(
        context: Any, x_PE: Any, step: Any, count: Any, weights_RP: Any, weight_stride: Any, results: Any, stride: Any
    ) -> Any:
        return types.void(*[types.int64] * 7), generate

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x_address, step, count, weight_address, weight_stride, result_address, stride = arguments
        weight_rows = [at(builder, weight_address, builder.mul(weight_stride, INDEX(r)), 4) for r in range(rows)]
        places = [at(builder, result_address, builder.mul(stride, INDEX(r)), 4) for r in range(rows)]

        def add(index: Any, sums: list[Any]) -> list[Any]:
            x = widened(builder, at(builder, x_address, builder.mul(index, step), 2), size)
            weights = [repeated(builder, load(builder, at(builder, row, index, 4), FLOAT), size) for row in weight_rows]
            products = [builder.fmul(weight, x, flags=("contract",)) for weight in weights]
            return [builder.fadd(s, p, flags=("contract",)) for s, p in zip(sums, products, strict=True)]

        sums = loop(builder, INDEX(0), count, 1, [load(builder, place, kind) for place in places], add)
        for place, total in zip(places, sums, strict=True):
            builder.store(total, builder.inttoptr(place, kind.as_pointer()), align=4)
        return context.get_dummy_value()

    return intrinsic(weigh)


_FOUR_OF_MANY, _ONE_OF_MANY, _FOUR_OF_SOME, _ONE_OF_SOME = _weigh(4, 64), _weigh(1, 64), _weigh(4, 16), _weigh(1, 16)
_ONE_OF_ONE = _weigh(1, 1)


@kernel("void(int64, int64, int64, int64, int64, int64, int64)")
def add_weighted(x: Any, size: Any, count: Any, weights: Any, positions: Any, rows: Any, results: Any) -> None:
    """Add `count` bfloat16 vectors of `size` values at `x`, each times its weight, to `rows` contiguous float32 results."""
    row = 0
    while row < rows:
        four = row + 4 <= rows
        w = weights + 4 * row * positions
        first = 0
        while first < size:
            v, y = x + 2 * first, results + 4 * (row * size + first)
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
                    _ONE_OF_ONE(v, size, count, w + 4 * more * positions, positions, y + 4 * more * size, size)
                first += 1
        row += 4 if four else 1


@helper
def _rotate(address: Any, cosine_E: Any, sine_E: Any, turned_E: Any) -> None:
    """Apply the rotary embedding to one head's vector, whose two halves are paired."""
    size = cosine_E.shape[0]
    half = size // 2
    head_E = numba.carray(halves(address), (size,))
    for index in range(half):
        left, right = widen(head_E[index]), widen(head_E[index + half])
        turned_E[index] = left * cosine_E[index] - right * sine_E[index]
        turned_E[index + half] = right * cosine_E[index + half] + left * sine_E[index + half]


@kernel(JOB, calls=("parallel_for", "serial_for", "append_block", "attend_block"))
def attend(address: Any) -> None:
    """Attend for the groups of all sequences, which are shared among threads."""
    job = attention_at(address)
    table = kernels_at(job.kernels)
    past_B = numba.carray(integers(job.past), (job.sequences,))
    positions = job.sequences
    for past in past_B:
        positions += past
    loop = loop_for(table, 4 * job.groups * job.size * positions)  # keys and values in bfloat16
    if job.repeats != 0:
        call(loop, (table.append_block, address, job.sequences * job.groups))
    call(loop, (table.attend_block, address, job.sequences * job.groups))


@inline
def _slot(job: Any, blocks_M: Any, position: Any) -> Any:
    """Return the slot of the cache that holds a sequence's position."""
    return blocks_M[position // job.block_size] * job.block_size + position % job.block_size


@inline
def _first_seen(window: Any, past: Any) -> Any:
    """Return the first position that the new position may attend to."""
    first = 0
    if window > 0:
        first = max(0, past + 1 - window)
    elif window < 0:
        first = past // -window * -window
    return first


@helper
def _append(job: Any, sequence: Any, group: Any, slot: Any, cosine_E: Any, sine_E: Any) -> None:
    """Rotate the new key, and write the rotated key and the new value into the cache."""
    size = job.size
    new = 2 * (group * job.group_stride + slot * size)
    key_E, value_E = numba.carray(halves(job.keys + new), (size,)), numba.carray(halves(job.values + new), (size,))
    turned_E = np.empty(size, np.float32)
    _rotate(job.key + 2 * (sequence * job.key_stride + group * size), cosine_E, sine_E, turned_E)
    given_E = numba.carray(halves(job.value + 2 * (sequence * job.value_stride + group * size)), (size,))
    for index in range(size):
        key_E[index] = narrow(turned_E[index])
        value_E[index] = given_E[index]


@helper
def _softmax(scores_RP: Any, scale: Any, sinks: Any, first_head: Any, total_R: Any) -> None:
    """Replace the scores by e^(scale · score − largest) with their sums in `total_R`. sinks: an address, or 0 for none."""
    per_group, positions = scores_RP.shape
    sinks_R = numba.carray(floats(sinks + 4 * first_head), (per_group,))
    for head in range(per_group):
        sink = sinks_R[head] if sinks != 0 else np.float32(-np.inf)
        largest = sink
        for place in range(positions):
            scores_RP[head, place] *= scale
            largest = max(largest, scores_RP[head, place])
        if sinks != 0:
            total_R[head] = exp(sink - largest)
        for place in range(positions):
            scores_RP[head, place] = exp(scores_RP[head, place] - largest)
            total_R[head] += scores_RP[head, place]


@kernel(BLOCK)
def append_block(address: Any, work: Any) -> None:
    """Write the new key and value of one group of one sequence into the cache."""
    job = attention_at(address)
    sequence, group = work // job.groups, work % job.groups
    past = numba.carray(integers(job.past), (job.sequences,))[sequence]
    blocks_M = numba.carray(integers(job.blocks + 8 * sequence * job.blocks_of_one), (job.blocks_of_one,))
    turn = 2 * sequence * job.size
    cosine_E, sine_E = wide_vector(job.cosine + turn, job.size), wide_vector(job.sine + turn, job.size)
    _append(job, sequence, group, _slot(job, blocks_M, past), cosine_E, sine_E)


@kernel(BLOCK, calls=("multiply_wide", "add_weighted"))
def attend_block(address: Any, work: Any) -> None:
    """Attend for one group of one sequence. All its queries share one read of each key and value, block after block."""
    job = attention_at(address)
    table, size, per_group = kernels_at(job.kernels), job.size, job.heads // job.groups
    sequence, group = work // job.groups, work % job.groups
    past = numba.carray(integers(job.past), (job.sequences,))[sequence]
    blocks_M = numba.carray(integers(job.blocks + 8 * sequence * job.blocks_of_one), (job.blocks_of_one,))
    first = _first_seen(job.window, past)
    turn = 2 * sequence * size
    cosine_E, sine_E = wide_vector(job.cosine + turn, size), wide_vector(job.sine + turn, size)
    if job.repeats == 0:
        _append(job, sequence, group, _slot(job, blocks_M, past), cosine_E, sine_E)
    query_RE = np.empty((per_group, size), np.float32)
    for head in range(per_group):
        own = 2 * (sequence * job.query_stride + (group * per_group + head) * size)
        _rotate(job.query + own, cosine_E, sine_E, query_RE[head])
    positions = past + 1 - first
    scores_RP = np.empty((per_group, positions), np.float32)
    place = first
    while place <= past:
        count = min(job.block_size - place % job.block_size, past + 1 - place)
        keys = job.keys + 2 * (group * job.group_stride + _slot(job, blocks_M, place) * size)
        results = address_of(scores_RP) + 4 * (place - first)
        call(table.multiply_wide, (keys, 0, 1, count, size, address_of(query_RE), per_group, results, positions))
        place += count
    keep(query_RE)
    total_R, sum_RE = np.zeros(per_group, np.float32), np.zeros((per_group, size), np.float32)
    _softmax(scores_RP, job.scale, job.sinks, group * per_group, total_R)
    place = first
    while place <= past:
        count = min(job.block_size - place % job.block_size, past + 1 - place)
        values = job.values + 2 * (group * job.group_stride + _slot(job, blocks_M, place) * size)
        weights = address_of(scores_RP) + 4 * (place - first)
        call(table.add_weighted, (values, size, count, weights, positions, per_group, address_of(sum_RE)))
        place += count
    keep(scores_RP)
    mixed_BHE = numba.carray(halves(job.results), (job.sequences, job.heads, size))
    for head in range(per_group):
        for index in range(size):
            mixed_BHE[sequence, group * per_group + head, index] = narrow(sum_RE[head, index] / total_R[head])
