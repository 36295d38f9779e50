"""Attention of many new positions of each sequence, block by block of keys.

Queries lie in panels, one in each lane, so the softmax of a query needs nothing from other lanes. A block of keys is
multiplied with a panel of queries, its scores become weights, and these are multiplied with the block of values (Dao 2023,
arXiv 2307.08691, algorithm 1): the largest score m and the sum of weights ℓ so far rescale the sum of values O.

    m' = max(m, max_k s_k)    w_k = e^(s_k − m')    ℓ' = e^(m − m') · ℓ + Σ_k w_k    O' = e^(m − m') · O + Σ_k w_k · v_k

Weights are rounded to bfloat16 for the product with values, as torch rounds probabilities. Blocks begin at multiples of
their size, counted from the first position of the text, so a query gets the same bits however a text is split.

Shape suffixes: K keys of a block, P all keys, E size of a key, V of a value, Z places of a panel.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.kernels.attention.grouped import first_seen
from engine.kernels.attention.instructions import exponential
from engine.kernels.compiler.arithmetic import narrow
from engine.kernels.compiler.compiling import BLOCK, JOB, helper, kernel
from engine.kernels.compiler.instructions import (
    FLOATS,
    IN_ORDER,
    INDEX,
    INTS,
    LANES,
    add_product,
    load,
    loop,
    repeated,
    rounded,
)
from engine.kernels.compiler.memory import address_of, aligned, call, floats, halves, integers, keep, record_at, signed_bytes
from engine.kernels.compiler.parallel import kernels_at
from engine.kernels.panels import pack, panels, turned

PROMPT = np.dtype(
    [
        ("kernels", np.int64),
        *((name, np.int64) for name in ("query", "key", "value")),  # [B, H or G, L or P, E or V]
        # Values from one sequence to the next, from one head or group to the next, and from one position to the next.
        *((f"{name}_{step}", np.int64) for name in ("query", "key", "value") for step in ("sequence", "head", "position")),
        *((name, np.int64) for name in ("key_scales", "value_scales")),  # float32 [B, G, P] of integers of 8 bits, or 0
        *((f"scale_{step}", np.int64) for step in ("sequence", "head")),
        ("sequences", np.int64),
        ("heads", np.int64),
        ("groups", np.int64),
        ("size", np.int64),  # E, even
        ("value_size", np.int64),  # V
        ("new", np.int64),  # L, the last of the P positions
        ("total", np.int64),  # P
        ("first", np.int64),  # number of the first key's position in its text
        ("window", np.int64),  # visible positions; a negative number is the size of chunks; 0 for all positions
        ("sinks", np.int64),  # [H] float32; 0 for none
        ("results", np.int64),  # [B, L, H, V] bfloat16
        ("scale", np.float32),  # factor of the scores
        # The kernel computes the remaining fields, for its blocks.
        ("panels", np.int64),  # of each group, and then as in PRODUCTS
        ("panel_begins", np.int64),
        ("panel_vectors", np.int64),
    ],
    align=True,
)
"""Arguments of the attention of the last L of P positions of each sequence, whose keys and values are in place."""
prompt_at = record_at(PROMPT)
KEYS = 64
"""Keys of a block."""
_LOWEST = np.float32(-3e38)
"""The largest score of no keys. It is finite, so that its differences are no NaN."""


@intrinsic  # type: ignore[untyped-decorator]
def _softmax(context: Any, scores: Any, count: Any, stride: Any, scale: Any, state: Any, weights: Any) -> Any:
    """Turn `count` scores of 16 queries, an even number, into weights.

    scores: address of float32 [K, stride], of which 16 columns are taken. state: address of the queries' m, ℓ and
    e^(m − m'), float32 [3, stride], as many columns. weights: address of the result, pairs of bfloat16 [K / 2, stride].
    A score of −∞ has no weight.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scores, count, stride, scale, state, weights = arguments
        factor = repeated(builder, scale, LANES)
        row_bytes = builder.mul(stride, INDEX(4))
        top_place, total_place, change_place = (builder.add(state, builder.mul(row_bytes, INDEX(i))) for i in range(3))
        old = load(builder, top_place, FLOATS)

        def score(key: Any) -> Any:
            return load(builder, builder.add(scores, builder.mul(key, row_bytes)), FLOATS)

        def larger(key: Any, found: list[Any]) -> list[Any]:
            scaled = builder.fmul(score(key), factor)
            return [builder.select(builder.fcmp_ordered(">", scaled, found[0]), scaled, found[0])]

        new = loop(builder, INDEX(0), count, 1, [old], larger)[0]
        less, closed = builder.fneg(new), ir.Constant(FLOATS, [float("-inf")] * LANES)
        nothing = ir.Constant(FLOATS, [0.0] * LANES)

        def weight(key: Any) -> Any:
            own = score(key)
            made = exponential(builder, add_product(builder, less, own, factor), LANES)
            return builder.select(builder.fcmp_ordered("==", own, closed), nothing, made)

        def take(pair: Any, sums: list[Any]) -> list[Any]:
            each = [weight(builder.add(builder.mul(pair, INDEX(2)), INDEX(i))) for i in range(2)]
            place = builder.add(weights, builder.mul(pair, row_bytes))
            builder.store(_pair(builder, *each), builder.inttoptr(place, INTS.as_pointer()), align=4)
            return [builder.fadd(builder.fadd(sums[0], each[0], flags=IN_ORDER), each[1], flags=IN_ORDER)]

        total = loop(builder, INDEX(0), builder.lshr(count, INDEX(1)), 1, [nothing], take)[0]
        change = exponential(builder, builder.fsub(old, new), LANES)
        total = add_product(builder, total, load(builder, total_place, FLOATS), change)
        for place, value in ((top_place, new), (total_place, total), (change_place, change)):
            builder.store(value, builder.inttoptr(place, FLOATS.as_pointer()), align=4)
        return context.get_dummy_value()

    kinds = (types.int64, types.int64, types.int64, types.float32, types.int64, types.int64)
    return types.void(*kinds), generate


def _pair(builder: Any, low: Any, high: Any) -> Any:
    """Return pairs of bfloat16 that are nearest to the float32 values of two vectors, with ties to even."""

    half, upper = (ir.Constant(INTS, [value] * LANES) for value in (16, -0x10000))
    return builder.or_(builder.lshr(rounded(builder, low), half), builder.and_(rounded(builder, high), upper))


@kernel(JOB, calls=("parallel_for", "attend_panel"))
def attend_prompt(address: Any) -> None:
    """Attend for the panels of all groups of all sequences."""
    job = prompt_at(address)
    table = kernels_at(job.kernels)
    _, begins_P, vectors_P = panels(np.full(1, job.new * (job.heads // job.groups)))
    job.panels, job.panel_begins, job.panel_vectors = vectors_P.shape[0], address_of(begins_P), address_of(vectors_P)
    call(table.parallel_for, (table.attend_panel, address, job.sequences * job.groups * job.panels))
    keep(begins_P)
    keep(vectors_P)


@kernel(BLOCK, calls=("multiply_panel", "multiply_paired"))
def attend_panel(address: Any, work: Any) -> None:
    """Attend for one panel of queries of one group of one sequence.

    Later panels have more keys. Threads take runs of consecutive work, so the first panel is followed by the last one.
    """
    job = prompt_at(address)
    table, per_group = kernels_at(job.kernels), job.heads // job.groups
    turn, sequence, group = work % job.panels, work // job.panels // job.groups, work // job.panels % job.groups
    panel = job.panels - 1 - turn // 2 if turn % 2 == 1 else turn // 2
    row = numba.carray(integers(job.panel_begins), (job.panels + 1,))[panel]
    vectors = numba.carray(integers(job.panel_vectors), (job.panels,))[panel]
    rows, places = min(LANES * vectors, job.new * per_group - row), LANES * vectors
    first_Z, last_Z = np.empty(places, np.int64), np.empty(places, np.int64)
    query = aligned(2 * job.size * places)
    _pack_queries(job, (sequence, group, row, rows), first_Z, last_Z, address_of(query))
    width = (job.value_size + LANES - 1) // LANES * LANES
    sums_VZ, state_3Z = np.zeros((width, places), np.float32), np.zeros((3, places), np.float32)
    for place in range(places):
        state_3Z[0, place] = _LOWEST
    if job.sinks != 0:
        sinks_H = numba.carray(floats(job.sinks), (job.heads,))
        for place in range(places):
            sink = sinks_H[group * per_group + (row + place) % per_group]
            state_3Z[0, place] = max(sink, _LOWEST)
            state_3Z[1, place] = np.float32(1.0) if sink > _LOWEST else np.float32(0.0)
    keys_KE, values_KV = np.empty((KEYS, job.size), np.uint16), np.zeros((KEYS, width), np.uint16)
    pairs_KV, weights_KZ = np.empty((KEYS // 2, width), np.uint32), np.empty((KEYS // 2, places), np.uint32)
    scores_KZ = np.empty((KEYS, places), np.float32)
    start, end = first_Z[0] // KEYS * KEYS, last_Z[places - 1] + 1
    while start < end:
        keys = min(KEYS, (end - start + 3) // 4 * 4)
        _read_block(job, (sequence, group), start, keys_KE[:keys], values_KV[:keys], pairs_KV[: keys // 2])
        scores_KZ[:keys] = np.float32(0.0)
        scores, weights = address_of(scores_KZ), address_of(weights_KZ)
        call(table.multiply_panel, (address_of(keys_KE), keys, job.size, address_of(query), vectors, scores))
        if start < first_Z[places - 1] or start + keys - 1 > last_Z[0]:
            _close(start, first_Z, last_Z, scores_KZ[:keys])
        for column in range(0, 4 * places, 4 * LANES):
            _softmax(scores + column, keys, places, job.scale, address_of(state_3Z) + column, weights + column)
        _rescale(state_3Z, sums_VZ)
        call(table.multiply_paired, (address_of(pairs_KV), width, keys, weights, vectors, address_of(sums_VZ)))
        start += KEYS
    keep(query)
    keep(keys_KE)
    keep(pairs_KV)
    keep(scores_KZ)
    keep(weights_KZ)
    _write(job, (sequence, group, row, rows), state_3Z, turned(sums_VZ))


@helper
def _pack_queries(job: Any, where: Any, first_Z: Any, last_Z: Any, panel: Any) -> None:
    """Pack the queries of a panel, and write the numbers of the first and the last position that each may attend to.

    where: sequence, group, first row of the panel, and its rows; a row is a query of one head, position after position.
    """
    (sequence, group, row, rows), per_group = where, job.heads // job.groups
    places, past = first_Z.shape[0], job.first + job.total - job.new
    offsets_Z, size = np.empty(places, np.int64), job.size
    for place in range(places):
        own = row + min(place, rows - 1)
        position, head = own // per_group, group * per_group + own % per_group
        first_Z[place], last_Z[place] = first_seen(job.window, past + position), past + position
        offset = sequence * job.query_sequence + head * job.query_head + position * job.query_position
        offsets_Z[place] = offset // size if place < rows else -1
    pack(job.query, size, offsets_Z, np.empty(0, np.float32), panel)


@helper
def _read_block(job: Any, where: Any, start: Any, key_KE: Any, value_KV: Any, pairs_KV: Any) -> None:
    """Copy the keys and values of K positions from `start` on; the values also as pairs of positions, [K / 2, V]."""
    sequence, group = where
    own = sequence * job.scale_sequence + group * job.scale_head
    offset = sequence * job.key_sequence + group * job.key_head
    _read_rows(job, (job.key, job.key_scales, own), (offset, job.key_position), start, job.size, key_KE)
    offset = sequence * job.value_sequence + group * job.value_head
    _read_rows(job, (job.value, job.value_scales, own), (offset, job.value_position), start, job.value_size, value_KV)
    for pair in range(pairs_KV.shape[0]):
        for index in range(pairs_KV.shape[1]):
            low, high = np.uint32(value_KV[2 * pair, index]), np.uint32(value_KV[2 * pair + 1, index])
            pairs_KV[pair, index] = low | high << np.uint32(16)


@helper
def _read_rows(job: Any, source: Any, strides: Any, start: Any, size: Any, rows_KE: Any) -> None:
    """Copy vectors of consecutive positions, as bfloat16. Positions before the first or after the last one are zeros.

    source: addresses of the vectors and of their scales, and the number of the group's first scale. strides: number of
    values before the group's first vector, and from one position to the next.
    """
    (vectors, scales, first_scale), (offset, step) = source, strides
    scales_P = numba.carray(floats(scales + 4 * first_scale), (job.total,))
    for key in range(rows_KE.shape[0]):
        place = start + key - job.first
        if place < 0 or place >= job.total:
            for index in range(size):
                rows_KE[key, index] = np.uint16(0)
        elif scales != 0:
            bytes_E = numba.carray(signed_bytes(vectors + offset + place * step), (size,))
            for index in range(size):
                rows_KE[key, index] = narrow(np.float32(bytes_E[index]) * scales_P[place])
        else:
            halves_E = numba.carray(halves(vectors + 2 * (offset + place * step)), (size,))
            for index in range(size):
                rows_KE[key, index] = halves_E[index]


@helper
def _close(start: Any, first_Z: Any, last_Z: Any, scores_KZ: Any) -> None:
    """Set the scores of keys that a query may not attend to, to −∞."""
    for key in range(scores_KZ.shape[0]):
        position = start + key
        for place in range(scores_KZ.shape[1]):
            if position < first_Z[place] or position > last_Z[place]:
                scores_KZ[key, place] = np.float32(-np.inf)


@helper
def _rescale(state_3Z: Any, sums_VZ: Any) -> None:
    """Multiply the sums of values by e^(m − m'), unless all of these are 1."""
    changes = False
    for place in range(state_3Z.shape[1]):
        changes |= state_3Z[2, place] != np.float32(1.0)
    if changes:
        for index in range(sums_VZ.shape[0]):
            for place in range(sums_VZ.shape[1]):
                sums_VZ[index, place] *= state_3Z[2, place]


@helper
def _write(job: Any, where: Any, state_3Z: Any, sums_ZV: Any) -> None:
    """Write O / ℓ for the rows of a panel."""
    (sequence, group, row, rows), per_group, size = where, job.heads // job.groups, job.value_size
    mixed_BLHV = numba.carray(halves(job.results), (job.sequences, job.new, job.heads, size))
    for place in range(rows):
        position, head = (row + place) // per_group, group * per_group + (row + place) % per_group
        share = np.float32(1.0) / state_3Z[1, place]
        for index in range(size):
            mixed_BLHV[sequence, position, head, index] = narrow(sums_ZV[place, index] * share)
