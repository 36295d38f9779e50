"""The gated delta rule for one new position of each sequence (engine/decoder/gated_delta.py), in float32.

One call does everything between the projections: the convolution, the norms of queries and keys, the recurrence, the norm
of the outputs and their gates. The states are updated in place. Each is read twice, head by head, so that the second time
it comes from the processor's cache.
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

GATED_DELTA = np.dtype(
    [
        # Inputs [T, C + H·V + 2H]: queries, keys and values of all heads, their gates, and the logits of β and of the decay.
        # States [H, E, V]. Results [T, H, V].
        *FIELDS,
        ("filters", np.int64),  # [C, K] bfloat16
        ("decay_bias", np.int64),  # [H] float32
        ("log_rate", np.int64),  # [H] float32
        ("norm", np.int64),  # [V] bfloat16
        ("heads", np.int64),  # H
        ("key_heads", np.int64),  # G
        ("key_size", np.int64),  # E
        ("value_size", np.int64),  # V
        ("filter_size", np.int64),  # K
        ("epsilon", np.float32),  # of the norm of the outputs
        ("key_epsilon", np.float32),  # of the norms of queries and keys
    ],
    align=True,
)
"""Arguments of the gated delta rule of one new position of each sequence."""
delta_at = record_at(GATED_DELTA)


@kernel(JOB, calls=("parallel_for", "serial_for", "gated_delta_block"))
def gated_delta(address: Any) -> None:
    """Compute the heads of all sequences, which are shared among threads."""
    job = delta_at(address)
    table = kernels_at(job.kernels)
    loop = loop_for(table, 4 * job.tokens * job.heads * job.key_size * job.value_size)
    call(loop, (table.gated_delta_block, address, job.tokens * job.key_heads))


@helper
def _normalize(x_E: Any, epsilon: Any, factor: Any) -> None:
    squares = np.float32(0.0)
    for index in range(x_E.shape[0]):
        squares += x_E[index] * x_E[index]
    scale = factor / np.sqrt(squares + epsilon)
    for index in range(x_E.shape[0]):
        x_E[index] *= scale


@helper
def _recur(state: Any, kept: Any, strength: Any, query_E: Any, key_E: Any, value_V: Any, mixed_V: Any) -> None:
    """Update one head's state, and write its output. The values are overwritten."""
    state_EV = numba.carray(floats(state), (key_E.shape[0], value_V.shape[0]))
    mixed_V[:] = np.float32(0.0)
    for row in range(key_E.shape[0]):
        key = key_E[row]
        for index in range(value_V.shape[0]):
            left = kept * state_EV[row, index]
            state_EV[row, index] = left
            mixed_V[index] += key * left
    for index in range(value_V.shape[0]):
        value_V[index] = strength * (value_V[index] - mixed_V[index])
        mixed_V[index] = np.float32(0.0)
    for row in range(key_E.shape[0]):
        key, query = key_E[row], query_E[row]
        for index in range(value_V.shape[0]):
            left = state_EV[row, index] + key * value_V[index]
            state_EV[row, index] = left
            mixed_V[index] += query * left


@helper
def _kept(address: Any, logit: Any, head: Any) -> Any:
    """Return α of one head, given the logit of its decay."""
    job = delta_at(address)
    decay = softplus(logit + numba.carray(floats(job.decay_bias), (job.heads,))[head])
    return exp(-exp(numba.carray(floats(job.log_rate), (job.heads,))[head]) * decay)


@kernel(BLOCK)
def gated_delta_block(address: Any, block: Any) -> None:
    """Compute the heads of values of one sequence that share one head of queries and keys."""
    job = delta_at(address)
    token, group = block // job.key_heads, block % job.key_heads
    keys, size, shared = job.key_heads * job.key_size, job.value_size, job.heads // job.key_heads
    query_E, key_E = np.empty(job.key_size, np.float32), np.empty(job.key_size, np.float32)
    value_V, mixed_V = np.empty(size, np.float32), np.empty(size, np.float32)
    channels, values = 2 * keys + job.heads * size, job.heads * size
    inputs = job.inputs + 2 * token * (channels + values + 2 * job.heads)
    last = numba.carray(integers(job.lasts), (job.tokens,))[token]
    states = numba.carray(integers(job.states), (job.tokens,))[token]
    gates, numbers_2H = inputs + 2 * channels, numba.carray(halves(inputs + 2 * (channels + values)), (2, job.heads))
    shape, unbiased = (job.filter_size, channels), 0
    convolve(inputs, job.filters, unbiased, last, shape, group * job.key_size, query_E)
    convolve(inputs, job.filters, unbiased, last, shape, keys + group * job.key_size, key_E)
    _normalize(query_E, job.key_epsilon, np.float32(1.0) / np.sqrt(np.float32(job.key_size)))
    _normalize(key_E, job.key_epsilon, np.float32(1.0))
    norm_V = numba.carray(halves(job.norm), (size,))
    for head in range(group * shared, (group + 1) * shared):
        place = token * job.heads + head
        convolve(inputs, job.filters, unbiased, last, shape, 2 * keys + head * size, value_V)
        strength = np.float32(1.0) / (np.float32(1.0) + exp(-widen(numbers_2H[0, head])))
        state, kept = states + 4 * head * job.key_size * size, _kept(address, widen(numbers_2H[1, head]), head)
        _recur(state, kept, strength, query_E, key_E, value_V, mixed_V)
        gate_V = numba.carray(halves(gates + 2 * head * size), (size,))
        results_V = numba.carray(halves(job.results + 2 * place * size), (size,))
        _normalize(mixed_V, job.epsilon * np.float32(size), np.sqrt(np.float32(size)))
        for index in range(size):
            results_V[index] = narrow(mixed_V[index] * widen(norm_V[index]) * silu(widen(gate_V[index])))
