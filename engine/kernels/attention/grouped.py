"""Attention of one new position of each sequence over a cache whose keys and values lie in blocks of positions."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from engine.kernels.attention.cached_vectors import (
    NO_MORE,
    PRODUCTS,
    add_values,
    keep_query,
    keep_vector,
    query_bytes,
    room_for_scores,
    score_keys,
    slot_of,
    value_bytes,
)
from engine.kernels.attention.instructions import exponentials, largest_of
from engine.kernels.compiler.arithmetic import exp, narrow, wide_vector, widen
from engine.kernels.compiler.compiling import BLOCK, JOB, helper, inline, kernel
from engine.kernels.compiler.memory import address_of, call, floats, halves, integers, keep, record_at
from engine.kernels.compiler.parallel import kernels_at, loop_for

ATTENTION = np.dtype(
    [
        ("kernels", np.int64),
        *((name, np.int64) for name in ("query", "key", "value", "cosine", "sine")),  # [B, H or G, E], angles [B, R]
        *((f"{name}_stride", np.int64) for name in ("query", "key", "value")),  # values from one sequence to the next
        ("keys", np.int64),  # keys of the cache, [G, slots, E]
        ("values", np.int64),
        *((name, np.int64) for name in ("key_scales", "value_scales")),  # float32 [G, slots] where these have 8 bits, or 0
        ("group_stride", np.int64),  # values from one group of the cache to the next
        ("sequences", np.int64),
        ("heads", np.int64),
        ("groups", np.int64),
        ("size", np.int64),  # E
        ("rotated", np.int64),  # R, the first dimensions of a head, which are rotated; 0 for none
        ("blocks", np.int64),  # [B, M] int64: the blocks of each sequence
        ("blocks_of_one", np.int64),  # M, blocks of one sequence
        ("past", np.int64),  # [B] int64: filled positions
        ("block_size", np.int64),
        ("window", np.int64),  # visible positions; a negative number is the size of chunks; 0 for all positions
        ("sinks", np.int64),  # [H] float32; 0 for none
        ("repeats", np.int64),  # 1 if several of the B may be positions of one sequence, else 0
        ("results", np.int64),  # [B, H, E] bfloat16
        ("scale", np.float32),  # factor of the scores
        # The kernel computes the remaining fields, for its blocks. A work W is one piece for one group of one sequence.
        ("begins", np.int64),  # [B + 1] the first work of each sequence, and the end of the last
        ("most", np.int64),  # pieces of the longest sequence
        ("prepared", np.int64),  # of each group of each B: rotated queries, as `keep_query` writes them
        ("sums", np.int64),  # [W, R, E] float32: sums of values, weighted by e^(score − largest score of the piece)
        ("totals", np.int64),  # [W, R, 2] float32: the largest score and the sum of the weights
    ],
    align=True,
)
"""Arguments of the attention of one new position of each sequence. The kernel rotates queries and keys, appends keys and
values to the cache, and then attends. Where sequences repeat, all keys and values are appended before any query attends."""
attention_at = record_at(ATTENTION)
PIECE = 512
"""Positions of a piece. Pieces begin where a sequence's own positions say, so its sums have one order on any number of
threads and in any company."""
NO_SINK = np.float32(-np.inf)
"""The sink of a head that has none."""


@helper
def rotate_head(address: Any, cosine_R: Any, sine_R: Any, turned_E: Any) -> None:
    """Apply the rotary embedding to the first R dimensions of one head's vector, whose two halves are paired."""
    size, rotated = turned_E.shape[0], cosine_R.shape[0]
    half = rotated // 2
    head_E = numba.carray(halves(address), (size,))
    for index in range(half):
        left, right = widen(head_E[index]), widen(head_E[index + half])
        turned_E[index] = left * cosine_R[index] - right * sine_R[index]
        turned_E[index + half] = right * cosine_R[index + half] + left * sine_R[index + half]
    for index in range(rotated, size):
        turned_E[index] = widen(head_E[index])


@inline
def angles_of(job: Any, sequence: Any) -> Any:
    """Return the cosines and sines of one sequence's new position."""
    turn = 2 * sequence * job.rotated
    return wide_vector(job.cosine + turn, job.rotated), wide_vector(job.sine + turn, job.rotated)


@inline
def first_seen(window: Any, past: Any) -> Any:
    """Return the first position that the new position may attend to."""
    first = 0
    if window > 0:
        first = max(0, past + 1 - window)
    elif window < 0:
        first = past // -window * -window
    return first


@inline
def _of_group(job: Any, vectors: Any, scales: Any, group: Any) -> Any:
    """Return the cached vectors of one group, as `cached_vectors` takes them."""
    own = 4 * group * (job.group_stride // job.size) if scales != 0 else 0
    return vectors + value_bytes(scales) * group * job.group_stride, scales + own, job.size


@helper
def _append(job: Any, sequence: Any, group: Any, slot: Any, cosine_R: Any, sine_R: Any) -> None:
    """Rotate the new key, and write the rotated key and the new value into the cache."""
    size, turned_E = job.size, np.empty(job.size, np.float32)
    rotate_head(job.key + 2 * (sequence * job.key_stride + group * size), cosine_R, sine_R, turned_E)
    keep_vector(_of_group(job, job.keys, job.key_scales, group), slot, turned_E)
    value_E = wide_vector(job.value + 2 * (sequence * job.value_stride + group * size), size)
    keep_vector(_of_group(job, job.values, job.value_scales, group), slot, value_E)


@inline
def _pieces(window: Any, past: Any) -> Any:
    """Return the number of pieces of the positions that the new position attends to."""
    return (past - first_seen(window, past)) // PIECE + 1


@helper
def _begin_group(job: Any, sequence: Any, group: Any, prepared: Any) -> None:
    """Write the new key and value of one group of one sequence into the cache, and prepare its queries for the keys."""
    past = numba.carray(integers(job.past), (job.sequences,))[sequence]
    blocks_M = numba.carray(integers(job.blocks + 8 * sequence * job.blocks_of_one), (job.blocks_of_one,))
    (cosine_R, sine_R), per_group, size = angles_of(job, sequence), job.heads // job.groups, job.size
    _append(job, sequence, group, slot_of(job, blocks_M, past), cosine_R, sine_R)
    queries = job.query + 2 * (sequence * job.query_stride + group * per_group * size)
    keys, turned_E = _of_group(job, job.keys, job.key_scales, group), np.empty(size, np.float32)
    for row in range(per_group):
        rotate_head(queries + 2 * row * size, cosine_R, sine_R, turned_E)
        keep_query(keys, turned_E, prepared, row)


@inline
def _prepared(job: Any, work: Any) -> Any:
    """Return the address of the prepared queries of one group of one sequence."""
    return job.prepared + work * query_bytes(_of_group(job, job.keys, job.key_scales, 0), job.heads // job.groups)


@kernel(BLOCK)
def append_block(address: Any, work: Any) -> None:
    """Append the new key and value of one group of one sequence, and prepare its queries."""
    job = attention_at(address)
    _begin_group(job, work // job.groups, work % job.groups, _prepared(job, work))


@helper
def softmax_piece(scores_RP: Any, scale: Any, totals_R2: Any) -> None:
    """Replace the scores by e^(scale · score − largest). Writes the largest and the sum of each row to `totals_R2`."""
    rows, positions = scores_RP.shape
    for row in range(rows):
        own = address_of(scores_RP) + 4 * row * positions
        largest = scale * largest_of(own, positions)
        totals_R2[row, 0], totals_R2[row, 1] = largest, exponentials(own, positions, scale, largest)


@kernel(BLOCK, calls=("multiply_wide", *PRODUCTS, "add_weighted"))
def attend_piece(address: Any, work: Any) -> None:
    """Attend to one piece of the positions for one group of one sequence. All its queries share one read of each key and
    value, block after block."""
    job = attention_at(address)
    size, per_group = job.size, job.heads // job.groups
    begins_B, sequence = numba.carray(integers(job.begins), (job.sequences + 1,)), 0
    while begins_B[sequence + 1] <= work:
        sequence += 1
    past = numba.carray(integers(job.past), (job.sequences,))[sequence]
    pieces = _pieces(job.window, past)
    group, piece = (work - begins_B[sequence]) // pieces, (work - begins_B[sequence]) % pieces
    blocks_M = numba.carray(integers(job.blocks + 8 * sequence * job.blocks_of_one), (job.blocks_of_one,))
    prepared, keys = _prepared(job, sequence * job.groups + group), _of_group(job, job.keys, job.key_scales, group)
    if job.repeats == 0 and job.most == 1:
        _begin_group(job, sequence, group, prepared)
    first = first_seen(job.window, past) + PIECE * piece
    scores_RP = room_for_scores(per_group, min(PIECE, past + 1 - first))[:per_group]
    score_keys(job, keys, NO_MORE, blocks_M, first, prepared, 0, scores_RP)
    softmax_piece(scores_RP, job.scale, numba.carray(floats(job.totals + 8 * work * per_group), (per_group, 2)))
    values = _of_group(job, job.values, job.value_scales, group)
    add_values(job, values, blocks_M, first, scores_RP, job.sums + 4 * work * per_group * size, False)
    if job.most == 1:
        _finish(job, sequence, group, work, 1)


@helper
def join_pieces(totals_WR2: Any, sums_WRE: Any, row: Any, sink: Any, sum_E: Any) -> None:
    """Write a row's attention: the sum of its pieces, each times e^(own largest score − largest), over that of the weights.

    sink: a further score, whose share is dropped, or NO_SINK.
    """
    pieces, largest = totals_WR2.shape[0], sink
    for piece in range(pieces):
        largest = max(largest, totals_WR2[piece, row, 0])
    total = exp(sink - largest) if sink > NO_SINK else np.float32(0.0)
    sum_E[:] = np.float32(0.0)
    for piece in range(pieces):
        factor = exp(totals_WR2[piece, row, 0] - largest)
        total += factor * totals_WR2[piece, row, 1]
        for index in range(sum_E.shape[0]):
            sum_E[index] += factor * sums_WRE[piece, row, index]
    for index in range(sum_E.shape[0]):
        sum_E[index] /= total


@helper
def _finish(job: Any, sequence: Any, group: Any, first: Any, pieces: Any) -> None:
    """Write the results of one group of one sequence."""
    per_group, size = job.heads // job.groups, job.size
    totals_WR2 = numba.carray(floats(job.totals + 8 * first * per_group), (pieces, per_group, 2))
    sums_WRE = numba.carray(floats(job.sums + 4 * first * per_group * size), (pieces, per_group, size))
    mixed_BHE = numba.carray(halves(job.results), (job.sequences, job.heads, size))
    sinks_H, sum_E = numba.carray(floats(job.sinks), (job.heads,)), np.empty(size, np.float32)
    for row in range(per_group):
        head = group * per_group + row
        join_pieces(totals_WR2, sums_WRE, row, sinks_H[head] if job.sinks != 0 else NO_SINK, sum_E)
        for index in range(size):
            mixed_BHE[sequence, head, index] = narrow(sum_E[index])


@kernel(BLOCK)
def finish_block(address: Any, work: Any) -> None:
    """Add up the pieces of one group of one sequence."""
    job = attention_at(address)
    sequence, group = work // job.groups, work % job.groups
    pieces = _pieces(job.window, numba.carray(integers(job.past), (job.sequences,))[sequence])
    first = numba.carray(integers(job.begins), (job.sequences + 1,))[sequence] + group * pieces
    _finish(job, sequence, group, first, pieces)


@kernel(JOB, calls=("parallel_for", "serial_for", "append_block", "attend_piece", "finish_block"))
def attend(address: Any) -> None:
    """Attend for the groups of all sequences, piece by piece; pieces are shared among threads."""
    job = attention_at(address)
    table, per_group = kernels_at(job.kernels), job.heads // job.groups
    past_B, begins_B = numba.carray(integers(job.past), (job.sequences,)), np.zeros(job.sequences + 1, np.int64)
    positions, most = job.sequences, 0
    for sequence in range(job.sequences):
        positions += past_B[sequence]
        pieces = _pieces(job.window, past_B[sequence])
        begins_B[sequence + 1] = begins_B[sequence] + job.groups * pieces
        most = max(most, pieces)
    sums_WRE, totals_WR2 = (
        np.empty((begins_B[-1], per_group, job.size), np.float32),
        np.empty((begins_B[-1], per_group, 2), np.float32),
    )
    keys = _of_group(job, job.keys, job.key_scales, 0)
    prepared = np.zeros(job.sequences * job.groups * query_bytes(keys, per_group), np.uint8)
    job.most, job.prepared = most, address_of(prepared)
    job.begins, job.sums, job.totals = address_of(begins_B), address_of(sums_WRE), address_of(totals_WR2)
    loop = loop_for(table, 2 * value_bytes(job.key_scales) * job.groups * job.size * positions)  # keys and values
    if job.repeats != 0 or job.most > 1:
        call(loop, (table.append_block, address, job.sequences * job.groups))
    call(loop, (table.attend_piece, address, begins_B[-1]))
    if job.most > 1:
        call(loop, (table.finish_block, address, job.sequences * job.groups))
    keep(begins_B)
    keep(prepared)
    keep(sums_WRE)
    keep(totals_WR2)
