"""Several matrices times a few vectors, and the root mean square norm. Blocks of matrix rows are shared among threads."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from engine.kernels.compiler.arithmetic import narrow, wide_vector, widen
from engine.kernels.compiler.compiling import BLOCK, JOB, helper, inline, kernel
from engine.kernels.compiler.memory import address_of, aligned, call, floats, halves, integers, keep, record_at
from engine.kernels.compiler.parallel import kernels_at, loop_for
from engine.kernels.stored.forms import form_at, form_of

MOST_ROWS, FEWEST_ROWS = 128, 32
"""Numbers of matrix rows that one thread multiplies with all vectors before it goes on. Memory delivers a matrix faster the
longer a thread stays with it. Low-bit matrices have up to twice as many rows, which are still fewer bytes."""
BLOCKS_OF_A_THREAD = 8
"""Minimum number of blocks of each thread, if rows suffice, so that threads end together."""
MATRIX = np.dtype([("values", np.int64), ("scales", np.int64)])
"""Addresses of a matrix. Plain matrices have no scales (0), and matrices in blocks their own FORM in this place."""
matrix_at = record_at(MATRIX)
MATRIX_BYTES = MATRIX.itemsize
PRODUCTS = np.dtype(
    [
        ("kernels", np.int64),
        ("form", np.int64),
        ("x", np.int64),  # [T, I] bfloat16, or float32 as the form says
        ("rows", np.int64),
        ("inputs", np.int64),
        ("matrices", np.int64),  # MATRIX of each matrix
        ("ends", np.int64),  # where each matrix's rows end in a row of the results
        ("count", np.int64),
        ("threads", np.int64),
        ("results", np.int64),  # [T, O], as x
        # The kernel computes the remaining fields, for its blocks.
        ("prepared", np.int64),
        ("block_rows", np.int64),
        ("panel_begins", np.int64),
        ("panel_vectors", np.int64),
        ("panels", np.int64),
    ]
)
"""Arguments of [x·W_0ᵀ, x·W_1ᵀ, …], side by side."""
products_at = record_at(PRODUCTS)


@inline
def vector_bytes(inputs: Any, form: Any) -> Any:
    """Return the bytes of a vector that is prepared for weights of this form."""
    return inputs * form.vector // 4


@inline
def row_bytes(inputs: Any, form: Any) -> Any:
    """Return the bytes of a matrix row's weights."""
    return inputs // form.numbers * form.bytes


@inline
def row_scale_bytes(inputs: Any, group: Any) -> Any:
    """Return the bytes of a matrix row's scales."""
    return inputs // group * 2


@inline
def block_rows(rows: Any, threads: Any, bits: Any) -> Any:
    """Return the matrix rows of a block, where all matrices together have `rows`."""
    size = MOST_ROWS if bits >= 16 else 2 * MOST_ROWS
    while size > FEWEST_ROWS and rows < size * BLOCKS_OF_A_THREAD * threads:
        size //= 2
    return size


@helper
def row_of(x: Any, row: Any, size: Any, form: Any) -> Any:
    """Return a float32 copy of row number `row` of x [T, `size`], in a call with this form."""
    if form.takes_floats:
        return numba.carray(floats(x + 4 * row * size), (size,)).copy()
    return wide_vector(x + 2 * row * size, size)


@helper
def write(results: Any, place: Any, values_W: Any, form: Any) -> None:
    """Write float32 values to the results from a place on, in a call with this form."""
    count = values_W.shape[0]
    if form.takes_floats:
        float_W = numba.carray(floats(results + 4 * place), (count,))
        for index in range(count):
            float_W[index] = values_W[index]
    else:
        half_W = numba.carray(halves(results + 2 * place), (count,))
        for index in range(count):
            half_W[index] = narrow(values_W[index])


@kernel(JOB, calls=("parallel_for", "serial_for", "products_block"))
def products(address: Any) -> None:
    """Prepare the vectors and multiply them block by block."""
    job = products_at(address)
    form, table = form_at(job.form), kernels_at(job.kernels)
    own = vector_bytes(job.inputs, form)
    prepared = aligned(job.rows * own)
    for row in range(job.rows):
        wide_I = row_of(job.x, row, job.inputs, form)
        call(form.prepare, (address_of(wide_I), job.inputs, address_of(prepared) + row * own))
        keep(wide_I)
    ends_M = numba.carray(integers(job.ends), (job.count,))
    size = block_rows(ends_M[-1], job.threads, form.bits)
    begin, blocks = 0, 0
    for end in ends_M:
        blocks += (end - begin + size - 1) // size
        begin = end
    job.prepared, job.block_rows = address_of(prepared), size
    loop = loop_for(table, ends_M[-1] * row_bytes(job.inputs, form))
    call(loop, (table.products_block, address, blocks))
    keep(prepared)


@kernel(BLOCK)
def products_block(address: Any, block: Any) -> None:
    """Multiply some rows of one matrix with all vectors."""
    job = products_at(address)
    size, inputs = job.block_rows, job.inputs
    ends_M = numba.carray(integers(job.ends), (job.count,))
    matrix, begin, before = 0, 0, 0
    while block >= before + (ends_M[matrix] - begin + size - 1) // size:
        before += (ends_M[matrix] - begin + size - 1) // size
        begin = ends_M[matrix]
        matrix += 1
    first = begin + (block - before) * size
    count = min(size, ends_M[matrix] - first)
    wide_TW = np.empty((job.rows, size), np.float32)
    own = matrix_at(job.matrices + matrix * MATRIX_BYTES)
    form = form_at(form_of(job.form, own))
    weights = own.values + (first - begin) * row_bytes(inputs, form)
    scales = own.scales + (first - begin) * row_scale_bytes(inputs, form.group)
    given = (weights, scales, form.group, count, inputs, job.prepared, job.rows, address_of(wide_TW), size)
    call(form.multiply, given)
    for row in range(job.rows):
        write(job.results, row * ends_M[-1] + first, wide_TW[row, :count], form_at(job.form))


@inline
def _over_root(x_D: Any, epsilon: Any) -> Any:
    """Return 1 / rms(x)."""
    size, squares = x_D.shape[0], np.float32(0.0)
    for index in range(size):
        squares += x_D[index] * x_D[index]
    return np.float32(1.0) / np.sqrt(squares / np.float32(size) + epsilon)


@kernel("void(int64, int64, float32, int64, int64, int64)")
def centered_norm(x: Any, weight: Any, epsilon: Any, rows: Any, size: Any, results: Any) -> None:
    """Write y = x / rms(x) · (1 + weight), rounded once."""
    y_TD = numba.carray(halves(results), (rows, size))
    weight_D = wide_vector(weight, size)
    for row in range(rows):
        x_D = wide_vector(x + 2 * row * size, size)
        scale = _over_root(x_D, epsilon)
        for index in range(size):
            y_TD[row, index] = narrow(x_D[index] * scale * (np.float32(1.0) + weight_D[index]))


@kernel("void(int64, int64, float32, int64, int64, int64)")
def rms_norm(x: Any, weight: Any, epsilon: Any, rows: Any, size: Any, results: Any) -> None:
    """Write y = weight · bfloat16(x / rms(x)), rounded where torch's own steps round."""
    y_TD = numba.carray(halves(results), (rows, size))
    weight_D = wide_vector(weight, size)
    for row in range(rows):
        x_D = wide_vector(x + 2 * row * size, size)
        scale = _over_root(x_D, epsilon)
        for index in range(size):
            y_TD[row, index] = narrow(weight_D[index] * widen(narrow(x_D[index] * scale)))
