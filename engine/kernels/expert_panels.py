"""All chosen experts of many tokens. The tokens of an expert lie in panels, and so do the inputs of its down projection.

Experts may differ in width. Widths are multiples of 4, because four matrix rows are multiplied at once.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from engine.kernels.compiler.arithmetic import narrow_pair, wide_vector
from engine.kernels.compiler.compiling import BLOCK, JOB, helper, kernel
from engine.kernels.compiler.instructions import LANES
from engine.kernels.compiler.memory import address_of, aligned, call, floats, integers, keep, pairs
from engine.kernels.compiler.parallel import kernels_at, loop_of
from engine.kernels.experts import EXPERT_BYTES, NO_GATE, expert_at, experts_at, unit
from engine.kernels.panels import pack_tokens, panel_rows, panels, plain_rows, turned, value_bytes
from engine.kernels.products import write
from engine.kernels.stored.forms import form_at

_DOWN_ROWS = 64
"""Maximum number of rows of the down projections that one thread takes."""


@helper
def _add_bias_to_rows(address: Any, first: Any, made_WZ: Any) -> None:
    """Add the bfloat16 values at an address, starting with number `first`, one value to each row."""
    bias_W = wide_vector(address + 2 * first, made_WZ.shape[0])
    for row in range(made_WZ.shape[0]):
        for place in range(made_WZ.shape[1]):
            made_WZ[row, place] += bias_W[row]


@helper
def _unit_pairs(gate_WZ: Any, up_WZ: Any, alpha: Any, limit: Any, target: Any) -> None:
    """Compute the hidden units of W rows and write them as W / 2 pairs of a panel."""
    count, places = gate_WZ.shape
    panel_CZ = numba.carray(pairs(target), (count // 2, places))
    for pair in range(count // 2):
        for place in range(places):
            low = unit(gate_WZ[2 * pair, place], up_WZ[2 * pair, place], alpha, limit)
            high = unit(gate_WZ[2 * pair + 1, place], up_WZ[2 * pair + 1, place], alpha, limit)
            panel_CZ[pair, place] = narrow_pair(low, high)


@helper
def _unit_floats(gate_WZ: Any, up_WZ: Any, alpha: Any, limit: Any, target: Any) -> None:
    """Compute the hidden units of W rows and write them as W inputs of a panel of float32."""
    count, places = gate_WZ.shape
    panel_WZ = numba.carray(floats(target), (count, places))
    for row in range(count):
        for place in range(places):
            panel_WZ[row, place] = unit(gate_WZ[row, place], up_WZ[row, place], alpha, limit)


@helper
def _place_members(job: Any, next_N: Any, tokens_Z: Any, weights_Z: Any, scales_Z: Any) -> None:
    """Write each place's token, and the weight and scale of its slot. next_N: the first place of each expert."""
    chosen_TS = numba.carray(integers(job.chosen), (job.tokens, job.slots))
    weights_TS = numba.carray(floats(job.weights), (job.tokens, job.slots))
    scales_TS = numba.carray(floats(job.scales), (job.tokens, job.slots))
    for token in range(job.tokens):
        for slot in range(job.slots):
            expert = chosen_TS[token, slot]
            if expert >= 0:
                place = next_N[expert]
                tokens_Z[place], weights_Z[place] = token, weights_TS[token, slot]
                if job.scales != 0:
                    scales_Z[place] = scales_TS[token, slot]
                next_N[expert] += 1


@helper
def unit_blocks(used_U: Any, widths_N: Any, size: Any) -> Any:
    """Return the expert and the first unit of each block of up to `size` units of the used experts, [K, 2].

    Experts have unequal numbers of tokens. The blocks of each expert are spread evenly over the result, which gives equal
    amounts of work to threads that take runs of consecutive blocks. If all experts have one width, the first block of each
    expert is followed by the second block of each.
    """
    most = total = 0
    for expert in used_U:
        blocks = (widths_N[expert] + size - 1) // size
        most, total = max(most, blocks), total + blocks
    blocks_K2, number = np.empty((total, 2), np.int64), 0
    for turn in range(most):
        for expert in used_U:
            blocks = (widths_N[expert] + size - 1) // size
            block = (turn * blocks + most // 2) // most
            if block < ((turn + 1) * blocks + most // 2) // most:
                blocks_K2[number, 0], blocks_K2[number, 1] = expert, block * size
                number += 1
    return blocks_K2


@helper
def _middle_begins(widths_N: Any, panels_N: Any, begins_P: Any) -> Any:
    """Return where the hidden units of each panel begin, and where the last ones end, [P + 1]."""
    middle_begins_P = np.zeros(begins_P.shape[0], np.int64)
    for expert, width in enumerate(widths_N):
        for panel in range(panels_N[expert], panels_N[expert + 1]):
            middle_begins_P[panel + 1] = middle_begins_P[panel] + width * (begins_P[panel + 1] - begins_P[panel])
    return middle_begins_P


@kernel(JOB, calls=("parallel_for", "serial_for", "pack_experts_block", "unit_panels_block", "down_panels_block"))
def panel_swiglu(address: Any) -> None:
    """Compute `swiglu` for many tokens."""
    job = experts_at(address)
    table = kernels_at(job.kernels)
    chosen_TS, members_N = numba.carray(integers(job.chosen), (job.tokens, job.slots)), np.zeros(job.count, np.int64)
    for token in range(job.tokens):
        for slot in range(job.slots):
            if chosen_TS[token, slot] >= 0:
                members_N[chosen_TS[token, slot]] += 1
    panels_N, begins_P, vectors_P = panels(members_N)
    used_N, next_N, used = np.empty(job.count, np.int64), np.empty(job.count, np.int64), 0
    widths_N, widest = np.empty(job.count, np.int64), 0
    for expert in range(job.count):
        next_N[expert] = begins_P[panels_N[expert]]
        widths_N[expert] = expert_at(job.experts + expert * EXPERT_BYTES).width
        if members_N[expert] > 0:
            used_N[used] = expert
            used, widest = used + 1, max(widest, widths_N[expert])
    places, middle_begins_P = begins_P[-1], _middle_begins(widths_N, panels_N, begins_P)
    tokens_Z, weights_Z = np.full(places, -1), np.empty(places, np.float32)
    scales_Z = np.empty(places if job.scales != 0 else 0, np.float32)
    _place_members(job, next_N, tokens_Z, weights_Z, scales_Z)
    size = value_bytes(form_at(job.form))
    x, middle = aligned(size * job.hidden * places), aligned(size * middle_begins_P[-1])
    job.used, job.used_count, job.members = address_of(used_N), used, places
    job.panels, job.panel_begins, job.panel_vectors = address_of(panels_N), address_of(begins_P), address_of(vectors_P)
    job.tokens_of_places, job.weights_of_places, job.scales_of_places = (
        address_of(tokens_Z),
        address_of(weights_Z),
        address_of(scales_Z),
    )
    job.prepared, job.prepared_middle, job.middle_begins = address_of(x), address_of(middle), address_of(middle_begins_P)
    loop = loop_of(table, job.threads)
    call(loop, (table.pack_experts_block, address, vectors_P.shape[0]))
    job.block_rows = panel_rows(widest, job.threads)
    blocks_K2 = unit_blocks(used_N[:used], widths_N, job.block_rows)
    job.unit_blocks = address_of(blocks_K2)
    call(loop, (table.unit_panels_block, address, blocks_K2.shape[0]))
    job.block_rows = min(_DOWN_ROWS, panel_rows(job.hidden, job.threads))
    blocks = (job.hidden + job.block_rows - 1) // job.block_rows
    call(loop, (table.down_panels_block, address, blocks))
    keep(used_N)
    keep(panels_N)
    keep(begins_P)
    keep(vectors_P)
    keep(tokens_Z)
    keep(weights_Z)
    keep(scales_Z)
    keep(x)
    keep(middle)
    keep(middle_begins_P)
    keep(blocks_K2)


@kernel(BLOCK)
def pack_experts_block(address: Any, panel: Any) -> None:
    """Pack one panel of one expert's tokens."""
    job = experts_at(address)
    begins_P = numba.carray(integers(job.panel_begins), (panel + 2,))
    first, count = begins_P[panel], begins_P[panel + 1] - begins_P[panel]
    tokens_Z = numba.carray(integers(job.tokens_of_places + 8 * first), (count,))
    scales_Z = numba.carray(floats(job.scales_of_places + 4 * first), (count if job.scales != 0 else 0,))
    pack_tokens(job, job.hidden, first, tokens_Z, scales_Z)


@kernel(BLOCK)
def unit_panels_block(address: Any, place: Any) -> None:
    """Compute some hidden units of one expert, for all its panels."""
    job = experts_at(address)
    form, hidden = form_at(job.form), job.hidden
    panels_N = numba.carray(integers(job.panels), (job.count + 1,))
    block_2 = numba.carray(integers(job.unit_blocks + 16 * place), (2,))
    expert, first = block_2[0], block_2[1]
    own = expert_at(job.experts + expert * EXPERT_BYTES)
    count = min(job.block_rows, own.width - first)
    has_gate = job.limit != NO_GATE
    up_weights = plain_rows(job.form, own.up, first, count, hidden)
    gate_weights = up_weights
    if has_gate:
        gate_weights = plain_rows(job.form, own.gate, first, count, hidden)
    begins_P = numba.carray(integers(job.panel_begins), (panels_N[job.count] + 1,))
    vectors_P = numba.carray(integers(job.panel_vectors), (panels_N[job.count],))
    middle_begins_P = numba.carray(integers(job.middle_begins), (panels_N[job.count] + 1,))
    for panel in range(panels_N[expert], panels_N[expert + 1]):
        begin, vectors = begins_P[panel], vectors_P[panel]
        gate_WZ, up_WZ = np.zeros((count, LANES * vectors), np.float32), np.zeros((count, LANES * vectors), np.float32)
        x = job.prepared + value_bytes(form) * hidden * begin
        if has_gate:
            call(form.multiply_panel, (address_of(gate_weights), count, hidden, x, vectors, address_of(gate_WZ)))
        call(form.multiply_panel, (address_of(up_weights), count, hidden, x, vectors, address_of(up_WZ)))
        if own.gate_bias != 0:
            _add_bias_to_rows(own.gate_bias, first, gate_WZ)
            _add_bias_to_rows(own.up_bias, first, up_WZ)
        target = job.prepared_middle + value_bytes(form) * (middle_begins_P[panel] + first * LANES * vectors)
        if form.takes_floats:
            _unit_floats(gate_WZ, up_WZ, job.alpha, job.limit, target)
        else:
            _unit_pairs(gate_WZ, up_WZ, job.alpha, job.limit, target)
    keep(gate_weights)
    keep(up_weights)


@kernel(BLOCK)
def down_panels_block(address: Any, place: Any) -> None:
    """Compute some outputs of all experts, and sum them for each token with the weights of its slots."""
    job = experts_at(address)
    hidden, size = job.hidden, job.block_rows
    used_N = numba.carray(integers(job.used), (job.used_count,))
    first = place * size
    count = min(size, hidden - first)
    y_TW = np.zeros((job.tokens, count), np.float32)
    for chosen in used_N:
        _add_expert(job, chosen, first, count, y_TW)
    for token in range(job.tokens):
        write(job.results, token * hidden + first, y_TW[token], form_at(job.form))


@helper
def _add_expert(job: Any, chosen: Any, first: Any, count: Any, y_TW: Any) -> None:
    """Add `count` outputs of one expert to the outputs of its tokens."""
    form, size = form_at(job.form), job.block_rows
    panels_N, own = numba.carray(integers(job.panels), (job.count + 1,)), expert_at(job.experts + chosen * EXPERT_BYTES)
    width = own.width
    begins_P = numba.carray(integers(job.panel_begins), (panels_N[job.count] + 1,))
    vectors_P = numba.carray(integers(job.panel_vectors), (panels_N[job.count],))
    middle_begins_P = numba.carray(integers(job.middle_begins), (panels_N[job.count] + 1,))
    tokens_Z = numba.carray(integers(job.tokens_of_places), (job.members,))
    weights_Z = numba.carray(floats(job.weights_of_places), (job.members,))
    weights = plain_rows(job.form, own.down, first, count, width)
    for panel in range(panels_N[chosen], panels_N[chosen + 1]):
        begin, vectors = begins_P[panel], vectors_P[panel]
        down_WZ = np.zeros((size, LANES * vectors), np.float32)
        middle = job.prepared_middle + value_bytes(form) * middle_begins_P[panel]
        call(form.multiply_panel, (address_of(weights), count, width, middle, vectors, address_of(down_WZ)))
        if own.down_bias != 0:
            _add_bias_to_rows(own.down_bias, first, down_WZ[:count])
        down_ZW = turned(down_WZ)
        for member in range(LANES * vectors):
            token = tokens_Z[begin + member]
            if token >= 0:
                for index in range(count):
                    y_TW[token, index] += weights_Z[begin + member] * down_ZW[member, index]
    keep(weights)
