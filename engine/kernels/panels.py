"""Matrices times many vectors, as prompts need them.

Prompts are bound by arithmetic. The inputs of 16 tokens lie side by side: the same two of all of them in 64 bytes, or one in
float32. Several such groups are a panel. A thread takes a block of matrix rows and multiplies it with all panels
(panel_tiles.py). Low-bit weights are widened to bfloat16 first, one block of rows at a time.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.kernels.compiler.arithmetic import as_float, narrow_pair
from engine.kernels.compiler.compiling import BLOCK, JOB, helper, inline, kernel
from engine.kernels.compiler.instructions import FLOATS, INDEX, INTS, LANES, at, load
from engine.kernels.compiler.memory import address_of, aligned, call, floats, halves, integers, keep, pairs
from engine.kernels.compiler.parallel import kernels_at, loop_of
from engine.kernels.panel_tiles import PANEL_VECTORS
from engine.kernels.products import MATRIX_BYTES, matrix_at, products_at, row_bytes, write
from engine.kernels.stored.forms import form_at, form_of, scales_of
from engine.kernels.stored.low_bit import MULTIPLE_OF_OUTPUTS

_PANEL_ROWS = 128
"""Maximum number of matrix rows that one thread takes before it goes on to the next expert."""


def multiplies_many(outputs: int, inputs: int) -> bool:
    """Return whether there is a kernel for many rows of such a matrix."""
    return outputs % MULTIPLE_OF_OUTPUTS == 0 and inputs % MULTIPLE_OF_OUTPUTS == 0


@intrinsic  # type: ignore[untyped-decorator]
def _turn(context: Any, square: Any, stride: Any, turned: Any, turned_stride: Any) -> Any:
    """Write the transpose of 16 · 16 float32. Rows begin `stride` values apart, and rows of the result `turned_stride`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, stride, target, target_stride = arguments
        rows = [load(builder, at(builder, address, builder.mul(stride, INDEX(r)), 4), FLOATS) for r in range(LANES)]
        half = LANES // 2
        while half:
            # Blocks of `half` lanes beside the diagonal are swapped with the blocks below it.
            low = [lane if not lane & half else LANES + lane - half for lane in range(LANES)]
            high = [lane + half if not lane & half else LANES + lane for lane in range(LANES)]
            for r in (row for row in range(LANES) if not row & half):
                pair = rows[r], rows[r + half]
                rows[r], rows[r + half] = (builder.shuffle_vector(*pair, ir.Constant(INTS, lanes)) for lanes in (low, high))
            half //= 2
        for r, row in enumerate(rows):
            place = at(builder, target, builder.mul(target_stride, INDEX(r)), 4)
            builder.store(row, builder.inttoptr(place, FLOATS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@helper
def turned(made_WZ: Any) -> Any:
    """Return the transpose. Both sizes are multiples of 16."""
    rows, places = made_WZ.shape
    made_ZW = np.empty((places, rows), np.float32)
    source, target = address_of(made_WZ), address_of(made_ZW)
    for row in range(0, rows, LANES):
        for place in range(0, places, LANES):
            _turn(source + 4 * (row * places + place), places, target + 4 * (place * rows + row), rows)
    return made_ZW


@helper
def panels(members_N: Any) -> Any:
    """Return how the members of N experts lie in panels. Each expert has its own panels.

    The result is the first panel of each expert [N + 1], and for each panel its first place, counted through all panels, and
    its number of vectors.
    """
    panels_N = np.zeros(members_N.shape[0] + 1, np.int64)
    for each, members in enumerate(members_N):
        vectors = (members + LANES - 1) // LANES
        panels_N[each + 1] = panels_N[each] + (vectors + PANEL_VECTORS - 1) // PANEL_VECTORS
    begins_P, vectors_P = np.empty(panels_N[-1] + 1, np.int64), np.empty(panels_N[-1], np.int64)
    begins_P[0] = 0
    for each, members in enumerate(members_N):
        vectors = (members + LANES - 1) // LANES
        for panel in range(panels_N[each], panels_N[each + 1]):
            left = panels_N[each + 1] - panel
            vectors_P[panel] = (vectors + left - 1) // left
            vectors -= vectors_P[panel]
            begins_P[panel + 1] = begins_P[panel] + LANES * vectors_P[panel]
    return panels_N, begins_P, vectors_P


@inline
def _scaled(pair: Any, scale: Any) -> Any:
    low, high = as_float(pair << np.uint32(16)) * scale, as_float(pair & np.uint32(0xFFFF0000)) * scale
    return narrow_pair(low, high)


@inline
def value_bytes(form: Any) -> Any:
    """Return the bytes of a value of a panel, in a call with this form: 4 for float32, 2 for bfloat16."""
    return 4 if form.takes_floats else 2


@helper
def pack_floats(x: Any, inputs: Any, tokens_Z: Any, scales_Z: Any, panel: Any) -> None:
    """Write rows of float32, times their scales if any, into a panel of Z places. A negative token is an empty place."""
    panel_IZ = numba.carray(floats(panel), (inputs, tokens_Z.shape[0]))
    for start in range(0, inputs, LANES):  # a cache line of each row
        end = min(start + LANES, inputs)
        for place, token in enumerate(tokens_Z):
            row_I = numba.carray(floats(x + 4 * max(token, 0) * inputs), (inputs,))
            scale = np.float32(0.0) if token < 0 else scales_Z[place] if scales_Z.shape[0] else np.float32(1.0)
            for index in range(start, end):
                panel_IZ[index, place] = row_I[index] * scale if token >= 0 else scale


@helper
def pack(x: Any, inputs: Any, tokens_Z: Any, scales_Z: Any, panel: Any) -> None:
    """Write rows of bfloat16, times their scales if any, into a panel of Z places. A negative token is an empty place."""
    count = inputs // 2
    panel_CZ = numba.carray(pairs(panel), (count, tokens_Z.shape[0]))
    for start in range(0, count, LANES):  # a cache line of each row
        end = min(start + LANES, count)
        for place, token in enumerate(tokens_Z):
            if token < 0:
                for pair in range(start, end):
                    panel_CZ[pair, place] = np.uint32(0)
                continue
            row_C = numba.carray(pairs(x + 2 * token * inputs), (count,))
            if scales_Z.shape[0]:
                for pair in range(start, end):
                    panel_CZ[pair, place] = _scaled(row_C[pair], scales_Z[place])
            else:
                for pair in range(start, end):
                    panel_CZ[pair, place] = row_C[pair]


@helper
def plain_rows(form_address: Any, matrix: Any, first: Any, count: Any, inputs: Any) -> Any:
    """Return `count` matrix rows, contiguous: those of float32 or bfloat16 in place, or a copy in bfloat16 for low-bit rows.

    form_address: the FORM of the call.
    """
    form = form_at(form_of(form_address, matrix))
    if form.takes_floats or form.bits == 16:
        size = row_bytes(inputs, form)
        return numba.carray(halves(matrix.values + first * size), (count * size // 2,))
    rows = np.empty(count * inputs, np.uint16)
    scales = scales_of(form_address, matrix)
    call(form.widen, (matrix.values, scales, form.group, first, count, inputs, address_of(rows)))
    return rows


@inline
def panel_rows(rows: Any, threads: Any) -> Any:
    """Return the number of matrix rows that one thread takes at once, for so many rows in all."""
    size = _PANEL_ROWS
    while size > LANES and rows < size * threads:
        size //= 2
    return size


@kernel(JOB, calls=("parallel_for", "serial_for", "pack_block", "panel_products_block"))
def panel_products(address: Any) -> None:
    """Compute `products` for many rows."""
    job = products_at(address)
    table = kernels_at(job.kernels)
    _, begins_P, vectors_P = panels(np.full(1, job.rows))
    x = aligned(value_bytes(form_at(job.form)) * job.inputs * begins_P[-1])
    ends_M = numba.carray(integers(job.ends), (job.count,))
    job.prepared, job.panel_begins, job.panel_vectors = address_of(x), address_of(begins_P), address_of(vectors_P)
    job.panels, job.block_rows = vectors_P.shape[0], panel_rows(ends_M[-1], job.threads)
    loop = loop_of(table, job.threads)
    call(loop, (table.pack_block, address, vectors_P.shape[0]))
    blocks = (ends_M[-1] + job.block_rows - 1) // job.block_rows
    call(loop, (table.panel_products_block, address, blocks))
    keep(x)
    keep(begins_P)
    keep(vectors_P)


@helper
def pack_tokens(job: Any, inputs: Any, first: Any, tokens_Z: Any, scales_Z: Any) -> None:
    """Pack these rows of x, of `inputs` values, into the panel that begins with place `first` of all panels."""
    form = form_at(job.form)
    panel = job.prepared + value_bytes(form) * inputs * first
    if form.takes_floats:
        pack_floats(job.x, inputs, tokens_Z, scales_Z, panel)
    else:
        pack(job.x, inputs, tokens_Z, scales_Z, panel)


@kernel(BLOCK)
def pack_block(address: Any, panel: Any) -> None:
    """Pack one panel."""
    job = products_at(address)
    begins_P = numba.carray(integers(job.panel_begins), (job.panels + 1,))
    first, last = begins_P[panel], begins_P[panel + 1]
    tokens_Z = np.full(last - first, -1)
    for place in range(min(last, job.rows) - first):
        tokens_Z[place] = first + place
    pack_tokens(job, job.inputs, first, tokens_Z, np.empty(0, np.float32))


@kernel(BLOCK)
def panel_products_block(address: Any, block: Any) -> None:
    """Multiply some rows of the matrices, counted through all matrices, with all panels."""
    job = products_at(address)
    size, inputs = job.block_rows, job.inputs
    ends_M = numba.carray(integers(job.ends), (job.count,))
    first, begin = block * size, 0
    for matrix, end in enumerate(ends_M):
        last = min(end, (block + 1) * size)
        if first < last:
            count, own = last - first, matrix_at(job.matrices + matrix * MATRIX_BYTES)
            weights = plain_rows(job.form, own, first - begin, count, inputs)
            _multiply_panels(job, weights, count, first)
            first = last
        begin = end


@helper
def _multiply_panels(job: Any, weights: Any, count: Any, first: Any) -> None:
    """Multiply `count` matrix rows, which give the outputs from `first` on, with all panels."""
    form, size, inputs = form_at(job.form), job.block_rows, job.inputs
    outputs = numba.carray(integers(job.ends), (job.count,))[-1]
    begins_P = numba.carray(integers(job.panel_begins), (job.panels + 1,))
    vectors_P = numba.carray(integers(job.panel_vectors), (job.panels,))
    for panel in range(job.panels):
        place, vectors = begins_P[panel], vectors_P[panel]
        made_WZ = np.zeros((size, LANES * vectors), np.float32)
        x = job.prepared + value_bytes(form) * inputs * place
        call(form.multiply_panel, (address_of(weights), count, inputs, x, vectors, address_of(made_WZ)))
        made_ZW = turned(made_WZ)
        for row in range(min(LANES * vectors, job.rows - place)):
            write(job.results, (place + row) * outputs + first, made_ZW[row, :count], form)
    keep(weights)
