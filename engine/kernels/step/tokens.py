"""From tokens to logits in one call: embeddings, angles of positions, all layers, the last norm and the output head.

Between two steps, Python runs with caches that the weights have emptied, and takes up to ten times as long as otherwise.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from engine.kernels.compiler.arithmetic import narrow, widen
from engine.kernels.compiler.compiling import TABLE_OF_ADDRESSES, helper, kernel
from engine.kernels.compiler.crew import CREW, begin_crew, end_crew, own_table_at, serve
from engine.kernels.compiler.memory import address_of, aligned, call, halves, integers, keep, record_at
from engine.kernels.compiler.parallel import LINE_BYTES, kernels_at, threads_of_loops
from engine.kernels.products import MATRIX
from engine.kernels.step.layers import multiply, step_at
from engine.kernels.stored.forms import form_at

ANGLES = np.dtype([(name, np.int64) for name in ("cosines", "sines", "size", "cosine", "sine")])
"""Addresses of the cosines and sines of all positions [P, R] in bfloat16, R, and the addresses for those of a step's
positions [T, R]."""
angles_at = record_at(ANGLES)
_ANGLES_BYTES = ANGLES.itemsize
TEXT = np.dtype(
    [
        ("kernels", np.int64),  # the table of all kernels; STEP and the records in it have a copy
        ("step", np.int64),  # STEP
        ("crew", np.int64),  # CREW of the threads that compute the step; 0 for none
        ("embedding", MATRIX),  # a row for each token; zeros where x is in place
        ("embedding_form", np.int64),  # FORM
        ("embeddings", np.int64),  # number of the rows
        ("positions", np.int64),  # [T] int64
        ("angles", np.int64),  # ANGLES of each kind of layer; there are none where the step's angles are in place
        ("kinds", np.int64),
        ("norm", np.int64),  # the weight of the last norm
        ("head", MATRIX),
        ("head_form", np.int64),  # FORM
        ("vocabulary", np.int64),  # V, the number of the head's rows
        ("refused", np.int64),  # set to 1 where a token has no embedding; nothing is computed then
        ("embedding_factor", np.float32),
        ("hidden_factor", np.float32),
    ],
    align=True,
)
"""The arguments that all steps of one decoder have in common. Fields are addresses unless stated otherwise."""
text_at = record_at(TEXT)
_FIELDS: Any = TEXT.fields
_HEAD = _FIELDS["head"][1]
KERNEL_COUNT = len(TABLE_OF_ADDRESSES.names or ())
CREW_BYTES = CREW.itemsize
ARGUMENTS = "void(int64, int64, int64, int64, int64)"
"""The signature of the kernels below."""


@kernel(ARGUMENTS, calls=("decode", "products", "rms_norm", "centered_norm"))
def decode_tokens(address: Any, ids: Any, tokens: Any, hidden: Any, logits: Any) -> None:
    """Write the hidden states after the last norm [T, D], and the logits [T, V] unless their address is 0, both bfloat16.

    address: of TEXT. ids: address of the tokens [T], int64. tokens: T.
    """
    job, step = text_at(address), step_at(text_at(address).step)
    table = _own_table(job, step)
    step.tokens = tokens
    if job.embedding.values != 0:
        _embed(job, step, ids)
        if job.refused != 0:
            return
    for kind in range(job.kinds):
        _place(angles_at(job.angles + kind * _ANGLES_BYTES), job.positions, tokens)
    call(table.decode, (job.step,))
    norm = table.centered_norm if step.zero_centered != 0 else table.rms_norm
    call(norm, (step.x, job.norm, step.epsilon, tokens, step.hidden, hidden))
    _scale(hidden, tokens * step.hidden, job.hidden_factor)
    if logits != 0:
        ends = np.empty(1, np.int64)
        ends[0] = job.vocabulary
        multiply(step, job.head_form, address + _HEAD, address_of(ends), 1, step.hidden, hidden, logits)
        keep(ends)


@kernel(ARGUMENTS, calls=("decode_tokens", "crew_for"), is_parallel=True)
def decode_together(address: Any, ids: Any, tokens: Any, hidden: Any, logits: Any) -> None:
    """Do as `decode_tokens` does, with a crew of all threads."""
    threads, compute = threads_of_loops(), kernels_at(text_at(address).kernels).decode_tokens
    made = aligned(CREW_BYTES + threads * LINE_BYTES)
    crew = address_of(made)
    begin_crew(crew, threads, crew + CREW_BYTES)
    text_at(address).crew = crew
    for thread in numba.prange(threads):
        if thread == 0:  # it comes before any other that the same thread of OpenMP has
            call(compute, (address, ids, tokens, hidden, logits))
            end_crew(crew)
        else:
            serve(crew, thread)
    text_at(address).crew = 0
    keep(made)


@helper
def _own_table(job: Any, step: Any) -> Any:
    """Copy the table of all kernels for the records of this step, and return the copy. Its loops are those of the crew."""
    all_K = numba.carray(integers(job.kernels), (KERNEL_COUNT,))
    own_K = numba.carray(integers(step.kernels), (KERNEL_COUNT,))
    for index in range(KERNEL_COUNT):
        own_K[index] = all_K[index]
    table = kernels_at(step.kernels)
    if job.crew != 0:
        table.parallel_for, own_table_at(step.kernels).crew = table.crew_for, job.crew
    return table


@helper
def _embed(job: Any, step: Any, ids: Any) -> None:
    """Write the embeddings of the tokens to x, unless one of them has none."""
    ids_T, size = numba.carray(integers(ids), (step.tokens,)), step.hidden
    job.refused = 0
    for token in range(step.tokens):
        if ids_T[token] < 0 or ids_T[token] >= job.embeddings:
            job.refused = 1
            return
    x_TD, form = numba.carray(halves(step.x), (step.tokens, size)), form_at(job.embedding_form)
    for token in range(step.tokens):
        if form.widen != 0:
            place = np.int64(job.embedding.values), np.int64(job.embedding.scales), form.group
            call(form.widen, (*place, ids_T[token], np.int64(1), size, step.x + 2 * token * size))
        else:
            own_D = numba.carray(halves(job.embedding.values + 2 * ids_T[token] * size), (size,))
            for index in range(size):
                x_TD[token, index] = own_D[index]
    _scale(step.x, step.tokens * size, job.embedding_factor)


@helper
def _scale(x: Any, count: Any, factor: Any) -> None:
    """Multiply `count` bfloat16 values by a factor, and round them."""
    if factor == np.float32(1.0):
        return
    x_C = numba.carray(halves(x), (count,))
    for index in range(count):
        x_C[index] = narrow(widen(x_C[index]) * factor)


@helper
def _place(own: Any, positions: Any, tokens: Any) -> None:
    """Copy the cosines and sines of the step's positions."""
    positions_T, size = numba.carray(integers(positions), (tokens,)), own.size
    for token in range(tokens):
        for source, target in ((own.cosines, own.cosine), (own.sines, own.sine)):
            from_R = numba.carray(halves(source + 2 * positions_T[token] * size), (size,))
            to_R = numba.carray(halves(target + 2 * token * size), (size,))
            for index in range(size):
                to_R[index] = from_R[index]
