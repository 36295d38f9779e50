"""A layer's chosen experts on a GPU, in two or three launches. All decisions are made on the GPU.

Experts stay where they were loaded: a table holds the addresses of their matrices, so nothing is copied together. A slot is
one expert that one token chose. The program of an empty slot ends before it reads anything. Sums are accumulated in float32,
each by one program in one order, so that equal inputs give bit-identical results.

A few tokens (decoding) are bound by the bytes of the experts that they chose: each program multiplies a few rows of one
matrix with one vector. Some tokens (decoding of several sequences) share experts: each program multiplies some rows of one
expert's matrix with all tokens that chose it, which it finds itself. Many tokens (prompts) are sorted by expert and cut into
tiles of slots of one expert, which are multiplied together.

Experts may differ in width. The grids are then made for the widest expert, and programs beyond an expert's own width end at
once. Only rows of hidden units h have one size, F. MULTIPLE is a divisor of all widths, by which the compiler knows which
reads are aligned, or None if all experts are F wide.

`engine/decoder/gpu/triton_experts.py` checks the arguments and launches the kernels. Triton is optional: CUDA builds of
torch include it, and without it torch computes the experts.

Shape suffixes: T tokens, D hidden, F expert width, N experts, A tensors of an expert (families.experts.GATE, UP, DOWN, then
biases if any), R slots of all tokens, M tiles. A row of the table has A addresses and the expert's width.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _matrix(table_NA, expert, part: tl.constexpr, A: tl.constexpr, like):
    """Return the pointer to an expert's matrix, in `like`'s dtype."""
    # The guarantee of 16-byte alignment lets the compiler read 16 bytes at once.
    return tl.multiple_of(tl.load(table_NA + expert * (A + 1) + part).to(like.dtype), 16)


@triton.jit
def _width(table_NA, expert, A: tl.constexpr, F: tl.constexpr, MULTIPLE: tl.constexpr):
    """Return an expert's width."""
    return F if MULTIPLE is None else tl.multiple_of(tl.load(table_NA + expert * (A + 1) + A).to(tl.int32), MULTIPLE)


@triton.jit
def _biased(y, table_NA, expert, part: tl.constexpr, A: tl.constexpr, like, outputs, mask):
    """Return y plus the bias of these outputs, if experts have one. The outputs lie along y's last dimension."""
    if A == 6:
        bias = tl.load(table_NA + expert * (A + 1) + 3 + part).to(like.dtype)
        y += tl.load(bias + outputs, mask=mask, other=0.0).to(tl.float32)
    return y


@triton.jit
def _gated(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Return silu(g)·u, or with a limit (u + 1)·g·σ(α·g) of the clamped values (families.layer_config.ClampedSwiglu).

    With a limit below 0, it is the GatedGelu.
    """
    if LIMIT is None:
        h = gate * tl.sigmoid(gate) * up
    elif LIMIT < 0.0:
        h = gate * tl.sigmoid(ALPHA * (gate + 0.044715 * gate * gate * gate)) * up
    else:
        gate = tl.where(gate > LIMIT, LIMIT, gate)  # unlike minimum and maximum, this keeps NaN
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        h = (up + 1.0) * gate * tl.sigmoid(ALPHA * gate)
    return h


@triton.jit
def gate_up_of_few(
    x_TD,
    table_NA,
    experts_R,
    h_RF,
    slots,
    D: tl.constexpr,
    F: tl.constexpr,
    MULTIPLE: tl.constexpr,
    A: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute h = swiglu(gate·x, up·x) in float32, for ROWS of one slot's F. `slots` consecutive slots share a row of x."""
    slot = tl.program_id(0)
    expert = tl.load(experts_R + slot)
    if expert < 0:
        return
    width = _width(table_NA, expert, A, F, MULTIPLE)
    if tl.program_id(1) * ROWS >= width:
        return
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    x_D = x_TD + slot // slots * D
    gate_FD, up_FD = _matrix(table_NA, expert, 0, A, x_TD), _matrix(table_NA, expert, 1, A, x_TD)
    gates = tl.zeros((ROWS, COLUMNS), tl.float32)
    ups = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, D, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        x = tl.load(x_D + columns, mask=columns < D, other=0.0).to(tl.float32)[None, :]
        places, mask = rows[:, None] * D + columns[None, :], (rows[:, None] < width) & (columns[None, :] < D)
        gates += tl.load(gate_FD + places, mask=mask, other=0.0).to(tl.float32) * x
        ups += tl.load(up_FD + places, mask=mask, other=0.0).to(tl.float32) * x
    gate = _biased(tl.sum(gates, axis=1), table_NA, expert, 0, A, x_TD, rows, rows < width)
    up = _biased(tl.sum(ups, axis=1), table_NA, expert, 1, A, x_TD, rows, rows < width)
    tl.store(h_RF + slot * F + rows, _gated(gate, up, ALPHA, LIMIT), mask=rows < width)


@triton.jit
def down_of_few(
    h_RF,
    table_NA,
    experts_R,
    weights_R,
    residual_TD,
    y_TD,
    factor,
    D: tl.constexpr,
    F: tl.constexpr,
    MULTIPLE: tl.constexpr,
    A: tl.constexpr,
    SLOTS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute y = Σ_slots weight · down·h, or residual + factor · y, for ROWS of one token's D."""
    token = tl.program_id(0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    y = tl.zeros((ROWS,), tl.float32)
    for number in tl.static_range(SLOTS):  # unrolled, so that the next slot's reads do not wait for this one's
        slot = token * SLOTS + number
        expert = tl.load(experts_R + slot)
        if expert >= 0:
            down_DF, width = _matrix(table_NA, expert, 2, A, y_TD), _width(table_NA, expert, A, F, MULTIPLE)
            sums = tl.zeros((ROWS, COLUMNS), tl.float32)
            for start in range(0, width, COLUMNS):
                columns = start + tl.arange(0, COLUMNS)
                h = tl.load(h_RF + slot * F + columns, mask=columns < width, other=0.0)[None, :]
                mask = (rows[:, None] < D) & (columns[None, :] < width)
                places = rows[:, None] * width + columns[None, :]
                sums += tl.load(down_DF + places, mask=mask, other=0.0).to(tl.float32) * h
            down = _biased(tl.sum(sums, axis=1), table_NA, expert, 2, A, y_TD, rows, rows < D)
            y += tl.load(weights_R + slot) * down
    if HAS_RESIDUAL:
        y = tl.load(residual_TD + token * D + rows, mask=rows < D, other=0.0).to(tl.float32) + y * factor
    tl.store(y_TD + token * D + rows, y.to(y_TD.dtype.element_ty), mask=rows < D)


@triton.jit
def _units_of_tile(
    x_TD,
    table_NA,
    expert,
    tokens,
    exists,
    outputs,
    width,
    D: tl.constexpr,
    A: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Return h of ROWS tokens, those that exist, for OUTPUTS of one expert's F, in float32."""
    gate_FD, up_FD = _matrix(table_NA, expert, 0, A, x_TD), _matrix(table_NA, expert, 1, A, x_TD)
    gate = tl.zeros((ROWS, OUTPUTS), tl.float32)
    up = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, D, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        mask = exists[:, None] & (columns[None, :] < D)
        x = tl.load(x_TD + tokens[:, None] * D + columns[None, :], mask=mask, other=0.0)
        places, mask = outputs[None, :] * D + columns[:, None], (outputs[None, :] < width) & (columns[:, None] < D)
        gate = tl.dot(x, tl.load(gate_FD + places, mask=mask, other=0.0), gate, input_precision="ieee")
        up = tl.dot(x, tl.load(up_FD + places, mask=mask, other=0.0), up, input_precision="ieee")
    gate = _biased(gate, table_NA, expert, 0, A, x_TD, outputs[None, :], outputs[None, :] < width)
    up = _biased(up, table_NA, expert, 1, A, x_TD, outputs[None, :], outputs[None, :] < width)
    return _gated(gate, up, ALPHA, LIMIT)


@triton.jit
def _outputs_of_tile(
    h_RF,
    table_NA,
    expert,
    rows,
    exists,
    outputs,
    width,
    D: tl.constexpr,
    F: tl.constexpr,
    A: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Return down·h of ROWS rows of h, those that exist, for OUTPUTS of D, in float32."""
    down_DF = _matrix(table_NA, expert, 2, A, h_RF)
    y = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, width, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        mask = exists[:, None] & (columns[None, :] < width)
        h = tl.load(h_RF + rows[:, None] * F + columns[None, :], mask=mask, other=0.0)
        places, mask = outputs[None, :] * width + columns[:, None], (outputs[None, :] < D) & (columns[:, None] < width)
        y = tl.dot(h, tl.load(down_DF + places, mask=mask, other=0.0), y, input_precision="ieee")
    return _biased(y, table_NA, expert, 2, A, h_RF, outputs[None, :], outputs[None, :] < D)


@triton.jit
def gate_up_of_many(
    x_TD,
    table_NA,
    order_R,
    tiles_M3,
    h_RF,
    slots,
    D: tl.constexpr,
    F: tl.constexpr,
    MULTIPLE: tl.constexpr,
    A: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute h of a tile's slots, OUTPUTS of F, in the order of experts. A tile: an expert, its first and last slot."""
    tile = tiles_M3 + tl.program_id(0) * 3
    expert, first, last = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if expert < 0:
        return
    width = _width(table_NA, expert, A, F, MULTIPLE)
    if tl.program_id(1) * OUTPUTS >= width:
        return
    rows = first + tl.arange(0, ROWS)
    tokens = tl.load(order_R + rows, mask=rows < last, other=0) // slots
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    exists = rows < last
    h = _units_of_tile(x_TD, table_NA, expert, tokens, exists, outputs, width, D, A, ALPHA, LIMIT, ROWS, OUTPUTS, COLUMNS)
    mask = exists[:, None] & (outputs[None, :] < width)
    tl.store(h_RF + rows[:, None] * F + outputs[None, :], h.to(h_RF.dtype.element_ty), mask=mask)


@triton.jit
def down_of_many(
    h_RF,
    table_NA,
    order_R,
    tiles_M3,
    weights_R,
    y_RD,
    D: tl.constexpr,
    F: tl.constexpr,
    MULTIPLE: tl.constexpr,
    A: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute weight · down·h of a tile's slots, for OUTPUTS of D, each written back to its slot's place."""
    tile = tiles_M3 + tl.program_id(0) * 3
    expert, first, last = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if expert < 0:
        return
    rows = first + tl.arange(0, ROWS)
    slots = tl.load(order_R + rows, mask=rows < last, other=0)
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    width, exists = _width(table_NA, expert, A, F, MULTIPLE), rows < last
    y = _outputs_of_tile(h_RF, table_NA, expert, rows, exists, outputs, width, D, F, A, ROWS, OUTPUTS, COLUMNS)
    y *= tl.load(weights_R + slots, mask=rows < last, other=0.0)[:, None]
    mask = (rows[:, None] < last) & (outputs[None, :] < D)
    tl.store(y_RD + slots[:, None] * D + outputs[None, :], y.to(y_RD.dtype.element_ty), mask=mask)


@triton.jit
def _slots_of(experts_R, expert, R, WIDE: tl.constexpr, ROWS: tl.constexpr):
    """Return the slots of an expert in order, [ROWS], and which of them exist. At most ROWS slots have one expert."""
    every = tl.arange(0, WIDE)
    is_own = tl.load(experts_R + every, mask=every < R, other=-1) == expert
    rank = tl.cumsum(is_own.to(tl.int32), axis=0) - 1
    rows = tl.arange(0, ROWS)
    is_row = is_own[None, :] & (rank[None, :] == rows[:, None])
    slots = tl.sum(tl.where(is_row, every[None, :], 0), axis=1)
    return slots, rows < tl.sum(is_own.to(tl.int32), axis=0)


@triton.jit
def gate_up_of_some(
    x_TD,
    table_NA,
    experts_R,
    h_RF,
    slots,
    R,
    D: tl.constexpr,
    F: tl.constexpr,
    MULTIPLE: tl.constexpr,
    A: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute h of all slots of one expert, OUTPUTS of F. `slots` consecutive slots share a row of x."""
    expert = tl.program_id(0)
    width = _width(table_NA, expert, A, F, MULTIPLE)
    if tl.program_id(1) * OUTPUTS >= width:
        return
    own, exists = _slots_of(experts_R, expert, R, WIDE, ROWS)
    if tl.max(exists.to(tl.int32), axis=0) == 0:
        return
    tokens = own // slots
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    h = _units_of_tile(x_TD, table_NA, expert, tokens, exists, outputs, width, D, A, ALPHA, LIMIT, ROWS, OUTPUTS, COLUMNS)
    mask = exists[:, None] & (outputs[None, :] < width)
    tl.store(h_RF + own[:, None] * F + outputs[None, :], h.to(h_RF.dtype.element_ty), mask=mask)


@triton.jit
def down_of_some(
    h_RF,
    table_NA,
    experts_R,
    weights_R,
    y_RD,
    R,
    D: tl.constexpr,
    F: tl.constexpr,
    MULTIPLE: tl.constexpr,
    A: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute weight · down·h in float32 of all slots of one expert, for OUTPUTS of D."""
    expert = tl.program_id(0)
    own, exists = _slots_of(experts_R, expert, R, WIDE, ROWS)
    if tl.max(exists.to(tl.int32), axis=0) == 0:
        return
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    width = _width(table_NA, expert, A, F, MULTIPLE)
    y = _outputs_of_tile(h_RF, table_NA, expert, own, exists, outputs, width, D, F, A, ROWS, OUTPUTS, COLUMNS)
    y *= tl.load(weights_R + own, mask=exists, other=0.0)[:, None]
    tl.store(y_RD + own[:, None] * D + outputs[None, :], y, mask=exists[:, None] & (outputs[None, :] < D))


@triton.jit
def add_slots(y_RD, experts_R, residual_TD, y_TD, factor, D: tl.constexpr, SLOTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Compute residual + factor · Σ_slots y of one token, for COLUMNS of D. Empty slots are not read."""
    token, columns = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for number in tl.static_range(SLOTS):
        slot = token * SLOTS + number
        is_read = (tl.load(experts_R + slot) >= 0) & (columns < D)
        total += tl.load(y_RD + slot * D + columns, mask=is_read, other=0.0)
    total = tl.load(residual_TD + token * D + columns, mask=columns < D, other=0.0).to(tl.float32) + total * factor
    tl.store(y_TD + token * D + columns, total.to(y_TD.dtype.element_ty), mask=columns < D)
