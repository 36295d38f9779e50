"""Latent attention of one new position of each sequence over a cache of latent vectors (engine/decoder/latent_attention.py).

Queries are mapped into the space of latent vectors, compared with these, and the weighted sums of latent vectors are mapped
to values. All heads share the cache, so that a piece of its positions is read once for several heads.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from engine.kernels.attention.cached_vectors import (
    AS_FLOATS,
    BFLOAT16_BYTES,
    NO_MORE,
    PRODUCTS,
    add_values,
    form_of_cache,
    keep_query,
    keep_vector,
    multiply_vectors,
    query_bytes,
    room_for_scores,
    score_keys,
    slot_of,
    value_bytes,
)
from engine.kernels.attention.grouped import NO_SINK, angles_of, join_pieces, softmax_piece
from engine.kernels.compiler.arithmetic import narrow, wide_vector, widen
from engine.kernels.compiler.compiling import BLOCK, JOB, helper, inline, kernel
from engine.kernels.compiler.memory import address_of, call, floats, halves, integers, keep, record_at
from engine.kernels.compiler.parallel import kernels_at, loop_for

LATENT = np.dtype(
    [
        ("kernels", np.int64),
        ("query", np.int64),  # [B, H, N + R] bfloat16, the last R dimensions not yet rotated
        ("latent", np.int64),  # [B, C] bfloat16
        ("key", np.int64),  # [B, R] bfloat16, not yet rotated
        *((f"{name}_stride", np.int64) for name in ("query", "latent", "key")),  # values from one sequence to the next
        *((name, np.int64) for name in ("cosine", "sine")),  # [B, R] bfloat16
        *((name, np.int64) for name in ("keys", "values")),  # the cache: latent vectors [slots, C], rotated keys [slots, R]
        *((name, np.int64) for name in ("key_scales", "value_scales")),  # float32 [slots] where these have 8 bits, or 0
        ("up", np.int64),  # [H, N + V, C] bfloat16
        ("sequences", np.int64),
        ("heads", np.int64),  # H
        ("plain", np.int64),  # N
        ("rotated", np.int64),  # R
        ("rank", np.int64),  # C
        ("value_size", np.int64),  # V
        ("pairs", np.int64),  # whether neighbors among the rotated dimensions are pairs, and not halves
        *((name, np.int64) for name in ("blocks", "blocks_of_one", "past", "block_size")),  # as in ATTENTION
        ("results", np.int64),  # [B, H, V] bfloat16
        ("scale", np.float32),  # factor of the scores
        # The kernel computes the remaining fields, for its blocks. A work W is one piece of the positions of one sequence
        # for up to HEADS heads.
        ("absorbed", np.int64),  # of each B: queries in the space of latent vectors, as `keep_query` writes them
        ("turned", np.int64),  # of each B: rotated queries, written so too
        ("begins", np.int64),  # [B + 1] the first work of each sequence, and the end of the last
        ("sums", np.int64),  # [W, HEADS, C] float32, as in ATTENTION
        ("totals", np.int64),  # [W, HEADS, 2] float32
    ],
    align=True,
)
"""Arguments of the latent attention of one new position of each sequence. All latent vectors and keys are appended before
any query attends, because sequences may be positions of one text."""
latent_at = record_at(LATENT)
HEADS = 16
"""Heads that share one read of a piece."""
PIECE = 256
"""Positions of a piece. The second-level cache has room for its latent vectors."""


@helper
def _turn(job: Any, sequence: Any, x: Any, turned_R: Any) -> None:
    """Write the rotated vector at an address."""
    rotated, half = job.rotated, job.rotated // 2
    x_R = numba.carray(halves(x), (rotated,))
    cosine_R, sine_R = angles_of(job, sequence)
    for index in range(half):
        first, second = (2 * index, 2 * index + 1) if job.pairs != 0 else (index, index + half)
        left, right = widen(x_R[first]), widen(x_R[second])
        turned_R[index] = left * cosine_R[index] - right * sine_R[index]
        turned_R[index + half] = right * cosine_R[index + half] + left * sine_R[index + half]


@inline
def _latents(job: Any) -> Any:
    """Return the cached latent vectors, as `cached_vectors` takes them."""
    return job.keys, job.key_scales, job.rank


@inline
def _rotated_keys(job: Any) -> Any:
    """Return the cached rotated keys, as `cached_vectors` takes them."""
    return job.values, job.value_scales, job.rotated


@kernel(BLOCK, calls=("add_weighted",))
def latent_query_block(address: Any, work: Any) -> None:
    """Map one head's query into the space of latent vectors, and rotate its rotated dimensions."""
    job = latent_at(address)
    sequence, head = work // job.heads, work % job.heads
    query = job.query + 2 * (sequence * job.query_stride + head * (job.plain + job.rotated))
    plain_N, own_C = wide_vector(query, job.plain), np.zeros(job.rank, np.float32)
    up, add = job.up + 2 * head * (job.plain + job.value_size) * job.rank, kernels_at(job.kernels).add_weighted
    given, made = address_of(plain_N), address_of(own_C)
    call(add, (up, BFLOAT16_BYTES, job.rank, job.plain, given, job.plain, np.int64(1), made))
    keep(plain_N)
    latents, keys = _latents(job), _rotated_keys(job)
    keep_query(latents, own_C, job.absorbed + sequence * query_bytes(latents, job.heads), head)
    turned_R = np.empty(job.rotated, np.float32)
    _turn(job, sequence, query + 2 * job.plain, turned_R)
    keep_query(keys, turned_R, job.turned + sequence * query_bytes(keys, job.heads), head)


@helper
def _append(job: Any, sequence: Any) -> None:
    """Write the new latent vector and the rotated key of one sequence into the cache."""
    past = numba.carray(integers(job.past), (job.sequences,))[sequence]
    blocks_M = numba.carray(integers(job.blocks + 8 * sequence * job.blocks_of_one), (job.blocks_of_one,))
    slot = slot_of(job, blocks_M, past)
    latent_C, turned_R = (
        wide_vector(job.latent + 2 * sequence * job.latent_stride, job.rank),
        np.empty(job.rotated, np.float32),
    )
    keep_vector(_latents(job), slot, latent_C)
    _turn(job, sequence, job.key + 2 * sequence * job.key_stride, turned_R)
    keep_vector(_rotated_keys(job), slot, turned_R)


@kernel(BLOCK, calls=("multiply_wide", *PRODUCTS, "add_weighted"))
def latent_piece(address: Any, work: Any) -> None:
    """Attend to one piece of the positions of one sequence for some heads."""
    job = latent_at(address)
    begins_B, sequence = numba.carray(integers(job.begins), (job.sequences + 1,)), 0
    while begins_B[sequence + 1] <= work:
        sequence += 1
    past = numba.carray(integers(job.past), (job.sequences,))[sequence]
    pieces = past // PIECE + 1
    part, piece = (work - begins_B[sequence]) // pieces, (work - begins_B[sequence]) % pieces
    head, first = part * HEADS, PIECE * piece
    rows, positions = min(HEADS, job.heads - head), min(PIECE, past + 1 - first)
    blocks_M = numba.carray(integers(job.blocks + 8 * sequence * job.blocks_of_one), (job.blocks_of_one,))
    latents, keys = _latents(job), _rotated_keys(job)
    absorbed = job.absorbed + sequence * query_bytes(latents, job.heads) + query_bytes(latents, head)
    turned = job.turned + sequence * query_bytes(keys, job.heads) + query_bytes(keys, head)
    scores_HP = room_for_scores(rows, positions)[:rows]
    if form_of_cache(latents) == form_of_cache(keys) and form_of_cache(keys) != AS_FLOATS:
        score_keys(job, latents, keys, blocks_M, first, absorbed, turned, scores_HP)
    else:
        more_HP = room_for_scores(rows, positions)[:rows]
        score_keys(job, latents, NO_MORE, blocks_M, first, absorbed, 0, scores_HP)
        score_keys(job, keys, NO_MORE, blocks_M, first, turned, 0, more_HP)
        for row in range(rows):
            for position in range(positions):
                scores_HP[row, position] += more_HP[row, position]
    softmax_piece(scores_HP, job.scale, numba.carray(floats(job.totals + 8 * work * HEADS), (rows, 2)))
    add_values(job, latents, blocks_M, first, scores_HP, job.sums + 4 * work * HEADS * job.rank, True)


@kernel(BLOCK, calls=("multiply_wide", *PRODUCTS))
def latent_value_block(address: Any, work: Any) -> None:
    """Add up the pieces of one head of one sequence, and map the sum to the head's value."""
    job = latent_at(address)
    sequence, head = work // job.heads, work % job.heads
    pieces = numba.carray(integers(job.past), (job.sequences,))[sequence] // PIECE + 1
    first = numba.carray(integers(job.begins), (job.sequences + 1,))[sequence] + head // HEADS * pieces
    row, rank = head % HEADS, job.rank
    totals_WH2 = numba.carray(floats(job.totals + 8 * first * HEADS), (pieces, HEADS, 2))
    sums_WHC = numba.carray(floats(job.sums + 4 * first * HEADS * rank), (pieces, HEADS, rank))
    sum_C = np.empty(rank, np.float32)
    join_pieces(totals_WH2, sums_WHC, row, NO_SINK, sum_C)
    matrix = job.up + 2 * (head * (job.plain + job.value_size) + job.plain) * rank, 0, rank
    prepared, value_V = np.empty(query_bytes(matrix, 1), np.uint8), room_for_scores(1, job.value_size)[0]
    keep_query(matrix, sum_C, address_of(prepared), 0)
    own, to = (matrix[0], 0, address_of(prepared), rank), (1, address_of(value_V), job.value_size)
    multiply_vectors(kernels_at(job.kernels), form_of_cache(matrix), own, (0, *NO_MORE), job.value_size, to)
    keep(prepared)
    results_V = numba.carray(halves(job.results + 2 * work * job.value_size), (job.value_size,))
    for index in range(job.value_size):
        results_V[index] = narrow(value_V[index])


@kernel(JOB, calls=("parallel_for", "serial_for", "latent_query_block", "latent_piece", "latent_value_block"))
def attend_latent(address: Any) -> None:
    """Append the new positions, and attend for all heads of all sequences. Threads share heads and pieces."""
    job = latent_at(address)
    table, past_B = kernels_at(job.kernels), numba.carray(integers(job.past), (job.sequences,))
    begins_B, parts, positions = np.zeros(job.sequences + 1, np.int64), (job.heads + HEADS - 1) // HEADS, 0
    for sequence in range(job.sequences):
        begins_B[sequence + 1] = begins_B[sequence] + parts * (past_B[sequence] // PIECE + 1)
        positions += past_B[sequence] + 1
        _append(job, sequence)
    heads = job.sequences * job.heads
    absorbed = np.zeros(job.sequences * query_bytes(_latents(job), job.heads), np.uint8)
    turned = np.zeros(job.sequences * query_bytes(_rotated_keys(job), job.heads), np.uint8)
    sums_WHC = np.empty((begins_B[-1], HEADS, job.rank), np.float32)
    totals_WH2 = np.empty((begins_B[-1], HEADS, 2), np.float32)
    job.absorbed, job.turned, job.begins = address_of(absorbed), address_of(turned), address_of(begins_B)
    job.sums, job.totals = address_of(sums_WHC), address_of(totals_WH2)
    loop = loop_for(table, 2 * heads * job.plain * job.rank)
    call(loop, (table.latent_query_block, address, heads))
    read = value_bytes(job.key_scales) * parts * positions * (job.rank + job.rotated)
    call(loop_for(table, read), (table.latent_piece, address, begins_B[-1]))
    call(loop, (table.latent_value_block, address, heads))
    keep(absorbed)
    keep(turned)
    keep(begins_B)
    keep(sums_WHC)
    keep(totals_WH2)
