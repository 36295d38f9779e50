"""All chosen experts of a few tokens in one call: Σ_s w_s · down_s(silu(gate_s·x_s) ⊙ up_s·x_s), or without gates
Σ_s w_s · down_s(relu(up_s·x_s)²).

Members are pairs of a token and one of its slots, sorted by expert: an expert's weights are read once for all its members.
Experts may differ in width. Nothing is padded: the hidden units of all members lie one after another. Matrices may differ
in form, even those of one expert; each vector is then prepared for each matrix that multiplies it.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from engine.kernels.compiler.arithmetic import exp, wide_vector
from engine.kernels.compiler.compiling import BLOCK, JOB, helper, inline, kernel
from engine.kernels.compiler.memory import address_of, aligned, call, floats, integers, keep, record_at
from engine.kernels.compiler.parallel import kernels_at, loop_for
from engine.kernels.products import MATRIX, block_rows, row_bytes, row_of, row_scale_bytes, vector_bytes, write
from engine.kernels.stored.float_types import FLOATS_OF_MATRIX, WHOLE_ROWS, floats_of_matrix_at
from engine.kernels.stored.forms import form_at, form_of, scales_of

EXPERT = np.dtype(
    [
        *((name, MATRIX) for name in ("gate", "up", "down")),
        *((name, np.int64) for name in ("gate_bias", "up_bias", "down_bias")),  # addresses; 0 for none
        ("width", np.int64),
    ]
)
"""Addresses of an expert's matrices (gate and up [F, D], down [D, F]) and of its biases, and its width F."""
expert_at = record_at(EXPERT)
EXPERT_BYTES = EXPERT.itemsize
EXPERTS = np.dtype(
    [
        ("kernels", np.int64),
        ("form", np.int64),
        ("x", np.int64),  # [T, D] bfloat16, or float32 as the form says
        ("tokens", np.int64),
        ("hidden", np.int64),
        ("experts", np.int64),  # EXPERT of each expert
        ("count", np.int64),
        ("chosen", np.int64),  # [T, S] int64, negative for an empty slot
        ("weights", np.int64),  # [T, S] float32
        ("scales", np.int64),  # [T, S] float32: factors of x; 0 for factors of one
        ("slots", np.int64),
        ("threads", np.int64),
        ("results", np.int64),  # [T, D], as x
        ("alpha", np.float32),  # α of a ClampedSwiglu
        ("limit", np.float32),  # 0 for a plain SwiGLU, that of GatedGelu below 0, NO_GATE for experts without a gate
        # The kernel computes the remaining fields, for its blocks.
        ("used", np.int64),  # numbers of the experts that have members
        ("used_count", np.int64),
        ("ends", np.int64),  # [N + 1] ends of each expert's members, beginning with 0
        ("places", np.int64),  # [T, S] the member of a slot, negative for an empty slot
        ("prepared", np.int64),
        ("unit_ends", np.int64),  # [used_count + 1] ends of the used experts' units, beginning with 0
        ("middle_begins", np.int64),  # [M + 1] where each member's hidden units begin
        ("middle", np.int64),  # float32
        ("prepared_middle", np.int64),
        ("members", np.int64),
        ("block_rows", np.int64),
        # For many tokens, whose members lie in panels (expert_panels.py):
        ("unit_blocks", np.int64),  # [K, 2] expert and first unit of each block of units
        ("panels", np.int64),
        ("panel_begins", np.int64),
        ("panel_vectors", np.int64),
        ("tokens_of_places", np.int64),
        ("weights_of_places", np.int64),
        ("scales_of_places", np.int64),
    ],
    align=True,
)
"""Arguments of the sum of the chosen experts' outputs, for some tokens."""
experts_at = record_at(EXPERTS)
_RECORD_WORDS = FLOATS_OF_MATRIX.itemsize // 8
NO_GATE = np.float32(-2.0)
"""The limit of experts without a gate."""


@inline
def unit(gate: Any, up: Any, alpha: Any, limit: Any) -> Any:
    """Return silu(gate) · up; the ClampedSwiglu if the limit is above 0, the GatedGelu below 0, and relu(up)² at NO_GATE."""
    if limit == NO_GATE:
        positive = max(up, np.float32(0.0))
        return positive * positive
    if limit > np.float32(0.0):
        gate, up = min(gate, limit), max(-limit, min(up, limit)) + np.float32(1.0)
    inner = gate
    if limit < np.float32(0.0):
        inner = gate + np.float32(0.044715) * gate * gate * gate
    return gate / (np.float32(1.0) + exp(-alpha * inner)) * up


@helper
def _add_bias(address: Any, first: Any, count: Any, y_TW: Any) -> None:
    """Add `count` of the bfloat16 values at an address, starting with number `first`, to each row."""
    bias_W = wide_vector(address + 2 * first, count)
    for row in range(y_TW.shape[0]):
        for index in range(count):
            y_TW[row, index] += bias_W[index]


@helper
def _sort(chosen_TS: Any, ends_N: Any) -> Any:
    """Write the cumulative counts of the experts' members to `ends_N`. Returns the numbers of the experts that have any."""
    for token in range(chosen_TS.shape[0]):
        for slot in range(chosen_TS.shape[1]):
            ends_N[chosen_TS[token, slot] + 1] += chosen_TS[token, slot] >= 0
    experts, used = ends_N.shape[0] - 1, 0
    for expert in range(experts):
        used += ends_N[expert + 1] > 0
        ends_N[expert + 1] += ends_N[expert]
    used_N = np.empty(used, np.int64)
    place = 0
    for expert in range(experts):
        if ends_N[expert + 1] > ends_N[expert]:
            used_N[place] = expert
            place += 1
    return used_N


@inline
def up_vectors(job: Any, own: Any, members: Any, size: Any) -> Any:
    """Return how many bytes after an expert's vectors for gate those for up begin: 0 if they are the same.

    size: of the largest prepared vector, in bytes.
    """
    if job.limit == NO_GATE:
        return 0
    gate, up = form_at(form_of(job.form, own.gate)), form_at(form_of(job.form, own.up))
    return 0 if gate.prepare == up.prepare else members * size


@helper
def _prepare_members(job: Any, chosen_TS: Any, ends_N: Any, place_TS: Any, target: Any) -> None:
    """Write each member's prepared vector to its place, and its number to `place_TS`.

    With vectors for each matrix, those of an expert's members for gate lie one after another, and then those for up.
    """
    form, hidden, begins_N = form_at(job.form), job.hidden, ends_N.copy()
    size = vector_bytes(hidden, form)
    has_gate = job.limit != NO_GATE
    scales_TS = numba.carray(floats(job.scales), (job.tokens, job.slots))
    scaled_D = np.empty(hidden, np.float32)
    for token in range(job.tokens):
        own_D = row_of(job.x, token, hidden, form)
        for slot in range(job.slots):
            expert = chosen_TS[token, slot]
            place_TS[token, slot] = -1
            if expert < 0:
                continue
            member = begins_N[expert]
            place_TS[token, slot] = member
            if job.scales != 0:
                for index in range(hidden):
                    scaled_D[index] = own_D[index] * scales_TS[token, slot]
            given = address_of(scaled_D) if job.scales != 0 else address_of(own_D)
            if form.own_vectors:
                own, first = expert_at(job.experts + expert * EXPERT_BYTES), ends_N[expert]
                up, place = form_at(form_of(job.form, own.up)), member - first
                x = target + 2 * first * size
                if has_gate:
                    gate = form_at(form_of(job.form, own.gate))
                    call(gate.prepare, (given, hidden, x + place * vector_bytes(hidden, gate)))
                x += up_vectors(job, own, ends_N[expert + 1] - first, size)
                if not has_gate or up.prepare != form_at(form_of(job.form, own.gate)).prepare:
                    call(up.prepare, (given, hidden, x + place * vector_bytes(hidden, up)))
            else:
                call(form.prepare, (given, hidden, target + member * size))
            begins_N[expert] += 1
        keep(own_D)
    keep(scaled_D)


@helper
def _place_units(job: Any, used_N: Any, ends_N: Any, unit_ends: Any, middle_begins_M: Any) -> None:
    """Write the cumulative widths of the used experts, and where the hidden units of each member begin."""
    unit_ends[0] = middle_begins_M[0] = 0
    for place, expert in enumerate(used_N):
        width = expert_at(job.experts + expert * EXPERT_BYTES).width
        unit_ends[place + 1] = unit_ends[place] + width
        for member in range(ends_N[expert], ends_N[expert + 1]):
            middle_begins_M[member + 1] = middle_begins_M[member] + width


@kernel(JOB, calls=("parallel_for", "serial_for", "units_block", "middle_block", "down_block"))
def swiglu(address: Any) -> None:
    """Compute `swiglu` for a few tokens: prepare members, multiply by gate and up, prepare the units, multiply by down."""
    job = experts_at(address)
    form, table = form_at(job.form), kernels_at(job.kernels)
    chosen_TS = numba.carray(integers(job.chosen), (job.tokens, job.slots))
    ends_N, place_TS = np.zeros(job.count + 1, np.int64), np.empty((job.tokens, job.slots), np.int64)
    used_N = _sort(chosen_TS, ends_N)
    members, used = ends_N[-1], used_N.shape[0]
    x_M = aligned(members * vector_bytes(job.hidden, form) * (2 if form.own_vectors else 1))
    _prepare_members(job, chosen_TS, ends_N, place_TS, address_of(x_M))
    unit_ends, middle_begins_M = np.empty(used + 1, np.int64), np.empty(members + 1, np.int64)
    _place_units(job, used_N, ends_N, unit_ends, middle_begins_M)
    units = unit_ends[-1]
    middle = np.empty(middle_begins_M[-1], np.float32)
    prepared_middle = aligned(vector_bytes(middle_begins_M[-1], form))
    job.used, job.used_count, job.ends, job.places = address_of(used_N), used, address_of(ends_N), address_of(place_TS)
    job.unit_ends, job.middle_begins = address_of(unit_ends), address_of(middle_begins_M)
    job.prepared, job.middle, job.prepared_middle = address_of(x_M), address_of(middle), address_of(prepared_middle)
    size = block_rows(units, job.threads, form.bits)
    job.members, job.block_rows = members, size
    loop = loop_for(table, units * row_bytes(job.hidden, form))
    call(loop, (table.units_block, address, (units + size - 1) // size))
    call(loop, (table.middle_block, address, members))
    size = block_rows(job.hidden, job.threads, form.bits)
    job.block_rows = size
    call(loop, (table.down_block, address, (job.hidden + size - 1) // size))
    keep(used_N)
    keep(ends_N)
    keep(place_TS)
    keep(x_M)
    keep(unit_ends)
    keep(middle_begins_M)
    keep(middle)
    keep(prepared_middle)


@kernel(BLOCK)
def units_block(address: Any, place: Any) -> None:
    """Compute some hidden units, counted through the used experts, for all members of each expert.

    A block may end one expert and begin the next, so that threads get equal numbers of rows whatever the widths are.
    """
    job = experts_at(address)
    used_N = numba.carray(integers(job.used), (job.used_count,))
    unit_ends = numba.carray(integers(job.unit_ends), (job.used_count + 1,))
    first, last = place * job.block_rows, min((place + 1) * job.block_rows, unit_ends[-1])
    own = 0
    while first < last:
        end = min(last, unit_ends[own + 1])
        if first < end:
            _compute_units(job, used_N[own], first - unit_ends[own], end - first)
            first = end
        own += 1


@helper
def _multiply(form_address: Any, matrix: Any, first: Any, given: Any) -> None:
    """Multiply matrix rows from `first` on. given: the arguments of `MULTIPLY` after those about the weights."""
    form, inputs = form_at(form_of(form_address, matrix)), given[1]
    values, scales = matrix.values + first * row_bytes(inputs, form), scales_of(form_address, matrix)
    call(form.multiply, (values, scales + first * row_scale_bytes(inputs, form.group), form.group, *given))


@inline
def _rows_alternate(form: Any, own: Any, inputs: Any) -> Any:
    """Return whether the rows of gate and up lie in turns, as those of published stacks of packed floats do."""
    if form.group != WHOLE_ROWS or form.by_matrix or own.gate.values == 0:
        return False
    gate, up, size = floats_of_matrix_at(own.gate.scales), floats_of_matrix_at(own.up.scales), row_bytes(inputs, form)
    apart = abs(own.up.values - own.gate.values) == size and gate.row == up.row == 2 * size
    return (
        apart and gate.scaled_rows == up.scaled_rows == 1 and gate.divisor == up.divisor and gate.scale_row == up.scale_row
    )


@helper
def _multiply_both(form: Any, own: Any, first: Any, given: Any, results: Any) -> None:
    """Multiply alternating rows of gate and up as one matrix: memory is read in order, and every line of it once.

    given: rows of each, inputs, prepared vectors and how many they are. results: arrays [vectors, rows] of gate and up.
    """
    count, inputs, x, rows = given
    is_up_first = own.up.values < own.gate.values
    both = own.up if is_up_first else own.gate
    source_W = numba.carray(integers(both.scales), (_RECORD_WORDS,))
    copied_W = source_W.copy()
    matrix = floats_of_matrix_at(address_of(copied_W))
    matrix.row, matrix.scale_row = matrix.row // 2, matrix.scale_row // 2
    made = np.empty((rows, 2 * count), np.float32)
    place = both.values + 2 * first * row_bytes(inputs, form)
    call(form.multiply, (place, address_of(copied_W), form.group, 2 * count, inputs, x, rows, address_of(made), 2 * count))
    gate, up = results
    for row in range(rows):
        for index in range(count):
            pair = made[row, 2 * index], made[row, 2 * index + 1]
            gate[row, index], up[row, index] = (pair[1], pair[0]) if is_up_first else pair
    keep(copied_W)


@helper
def _compute_units(job: Any, expert: Any, first: Any, count: Any) -> None:
    """Compute `count` hidden units of one expert, for all its members."""
    hidden, ends_N = job.hidden, numba.carray(integers(job.ends), (job.count + 1,))
    begin, rows = ends_N[expert], ends_N[expert + 1] - ends_N[expert]
    size, own = vector_bytes(hidden, form_at(job.form)), expert_at(job.experts + expert * EXPERT_BYTES)
    gate, up = np.empty((rows, count), np.float32), np.empty((rows, count), np.float32)
    x_gate = x_up = job.prepared + begin * size
    if form_at(job.form).own_vectors:
        x_gate = job.prepared + 2 * begin * size
        x_up = x_gate + up_vectors(job, own, rows, size)
    if _rows_alternate(form_at(job.form), own, hidden):
        _multiply_both(form_at(job.form), own, first, (count, hidden, x_gate, rows), (gate, up))
    else:
        if job.limit != NO_GATE:
            _multiply(job.form, own.gate, first, (count, hidden, x_gate, rows, address_of(gate), count))
        _multiply(job.form, own.up, first, (count, hidden, x_up, rows, address_of(up), count))
    if own.gate_bias != 0:
        _add_bias(own.gate_bias, first, count, gate)
        _add_bias(own.up_bias, first, count, up)
    middle_begins_M = numba.carray(integers(job.middle_begins), (job.members + 1,))
    middle_MF = numba.carray(floats(job.middle + 4 * middle_begins_M[begin]), (rows, own.width))
    alpha, limit = job.alpha, job.limit
    for row in range(rows):
        for index in range(count):
            middle_MF[row, first + index] = unit(gate[row, index], up[row, index], alpha, limit)


@kernel(BLOCK)
def middle_block(address: Any, member: Any) -> None:
    """Prepare one member's hidden units for the down projection."""
    job = experts_at(address)
    form = form_at(job.form)
    middle_begins_M = numba.carray(integers(job.middle_begins), (job.members + 1,))
    begin, end = middle_begins_M[member], middle_begins_M[member + 1]
    if form.own_vectors:
        used_N = numba.carray(integers(job.used), (job.used_count,))
        ends_N = numba.carray(integers(job.ends), (job.count + 1,))
        place = 0
        while ends_N[used_N[place] + 1] <= member:
            place += 1
        first, width = ends_N[used_N[place]], end - begin
        own = expert_at(job.experts + used_N[place] * EXPERT_BYTES)
        down = form_at(form_of(job.form, own.down))
        target = job.prepared_middle + vector_bytes(middle_begins_M[first], form)
        call(down.prepare, (job.middle + 4 * begin, width, target + (member - first) * vector_bytes(width, down)))
    else:
        call(form.prepare, (job.middle + 4 * begin, end - begin, job.prepared_middle + vector_bytes(begin, form)))


@kernel(BLOCK)
def down_block(address: Any, place: Any) -> None:
    """Compute some outputs of all experts, and sum them for each token with the weights of its slots."""
    job = experts_at(address)
    form, hidden, wide = form_at(job.form), job.hidden, job.block_rows
    used_N, ends_N = numba.carray(integers(job.used), (job.used_count,)), numba.carray(integers(job.ends), (job.count + 1,))
    middle_begins_M = numba.carray(integers(job.middle_begins), (job.members + 1,))
    first = place * wide
    count = min(wide, hidden - first)
    down_MW = np.empty((job.members, wide), np.float32)
    for chosen in used_N:
        begin, rows = ends_N[chosen], ends_N[chosen + 1] - ends_N[chosen]
        own = expert_at(job.experts + chosen * EXPERT_BYTES)
        width, middle = own.width, job.prepared_middle + vector_bytes(middle_begins_M[begin], form)
        given = (count, width, middle, rows, address_of(down_MW) + 4 * begin * wide, wide)
        _multiply(job.form, own.down, first, given)
        if own.down_bias != 0:
            _add_bias(own.down_bias, first, count, down_MW[begin : begin + rows])
    places_TS = numba.carray(integers(job.places), (job.tokens, job.slots))
    weights_TS = numba.carray(floats(job.weights), (job.tokens, job.slots))
    total_W = np.empty(count, np.float32)
    for token in range(job.tokens):
        for index in range(count):
            total = np.float32(0.0)
            for slot in range(job.slots):
                if places_TS[token, slot] >= 0:
                    total += weights_TS[token, slot] * down_MW[places_TS[token, slot], index]
            total_W[index] = total
        write(job.results, token * hidden + first, total_W, form)
