"""Mamba-2 for one new position of each sequence (engine/decoder/mamba2.py), in float32.

One call does everything between the projections: the convolution, the recurrence, the gates of the outputs and their norm.
The states are updated in place, and each is read once. Threads share the groups of heads of all sequences.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from engine.kernels.compiler.arithmetic import exp, narrow, widen
from engine.kernels.compiler.compiling import BLOCK, JOB, helper, kernel
from engine.kernels.compiler.memory import call, floats, halves, integers, record_at
from engine.kernels.compiler.parallel import kernels_at, loop_for
from engine.kernels.recurrences.convolution import convolve, silu, softplus
from engine.kernels.recurrences.recurrence import FIELDS

MAMBA2 = np.dtype(
    [
        # Inputs [T, X + C + H]: gates, then x, B and C of all groups, and then the logits of Δ. States [H, N, P].
        *FIELDS,
        ("filters", np.int64),  # [C, K] bfloat16
        ("filter_bias", np.int64),  # [C] bfloat16
        ("norm", np.int64),  # [X] bfloat16
        ("step_bias", np.int64),  # [H] float32
        ("log_rate", np.int64),  # [H] float32
        ("through", np.int64),  # [H] float32: D
        ("heads", np.int64),  # H
        ("groups", np.int64),  # G
        ("key_size", np.int64),  # N
        ("value_size", np.int64),  # P
        ("filter_size", np.int64),  # K
        ("least_step", np.float32),  # the minimum of Δ
        ("epsilon", np.float32),  # of the norm
    ],
    align=True,
)
"""Arguments of Mamba-2 for one new position of each sequence. X is H·P, and C is X + 2·G·N."""
mamba2_at = record_at(MAMBA2)


@kernel(JOB, calls=("parallel_for", "serial_for", "mamba2_block"))
def mamba2(address: Any) -> None:
    """Compute the groups of heads of all sequences, which are shared among threads."""
    job = mamba2_at(address)
    table = kernels_at(job.kernels)
    loop = loop_for(table, 4 * job.tokens * job.heads * job.key_size * job.value_size)
    call(loop, (table.mamba2_block, address, job.tokens * job.groups))


@helper
def _recur(state: Any, kept: Any, into_N: Any, out_N: Any, value_P: Any, y_P: Any) -> None:
    """Update one head's state, and add what it returns for C to the output."""
    state_NP = numba.carray(floats(state), (into_N.shape[0], value_P.shape[0]))
    for row in range(into_N.shape[0]):
        into, out = into_N[row], out_N[row]
        for index in range(value_P.shape[0]):
            now = kept * state_NP[row, index] + into * value_P[index]
            state_NP[row, index] = now
            y_P[index] += out * now


@helper
def _of_head(numbers: Any, head: Any) -> Any:
    """Return one head's number of a float32 vector."""
    return numba.carray(floats(numbers), (head + 1,))[head]


@kernel(BLOCK)
def mamba2_block(address: Any, block: Any) -> None:
    """Compute the heads of one group of one sequence."""
    job = mamba2_at(address)
    token, group = block // job.groups, block % job.groups
    size, keys, heads = job.value_size, job.key_size, job.heads // job.groups
    inner = job.heads * size
    channels = inner + 2 * job.groups * keys
    row = job.inputs + 2 * token * (inner + channels + job.heads)
    inputs, last = row + 2 * inner, numba.carray(integers(job.lasts), (job.tokens,))[token]
    states = numba.carray(integers(job.states), (job.tokens,))[token]
    shape = job.filter_size, channels
    into_N, out_N = np.empty(keys, np.float32), np.empty(keys, np.float32)
    x_P, value_P = np.empty(size, np.float32), np.empty(size, np.float32)
    y_RP = np.empty((heads, size), np.float32)
    convolve(inputs, job.filters, job.filter_bias, last, shape, inner + group * keys, into_N)
    convolve(inputs, job.filters, job.filter_bias, last, shape, inner + (job.groups + group) * keys, out_N)
    step_H = numba.carray(halves(inputs + 2 * channels), (job.heads,))
    gate_X = numba.carray(halves(row), (inner,))
    squares = np.float32(0.0)
    for own in range(heads):
        head = group * heads + own
        convolve(inputs, job.filters, job.filter_bias, last, shape, head * size, x_P)
        step = max(softplus(widen(step_H[head]) + _of_head(job.step_bias, head)), job.least_step)
        kept, through = exp(-exp(_of_head(job.log_rate, head)) * step), _of_head(job.through, head)
        y_P = y_RP[own]
        for index in range(size):
            value_P[index] = step * x_P[index]
            y_P[index] = through * x_P[index]
        _recur(states + 4 * head * keys * size, kept, into_N, out_N, value_P, y_P)
        for index in range(size):
            y = y_P[index] * silu(widen(gate_X[head * size + index]))
            y_P[index] = y
            squares += y * y
    scale = np.float32(1.0) / np.sqrt(squares / np.float32(heads * size) + job.epsilon)
    first = group * heads * size
    norm_Y = numba.carray(halves(job.norm + 2 * first), (heads, size))
    results_Y = numba.carray(halves(job.results + 2 * (token * inner + first)), (heads, size))
    for own in range(heads):
        for index in range(size):
            results_Y[own, index] = narrow(y_RP[own, index] * scale * widen(norm_Y[own, index]))
