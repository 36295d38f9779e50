"""Attention within a compiled step, from the projections on: norms of heads, rotation, attention, and gates of outputs."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from engine.kernels.attention.grouped import attention_at
from engine.kernels.compiler.arithmetic import exp, narrow, widen
from engine.kernels.compiler.compiling import helper, kernel
from engine.kernels.compiler.memory import address_of, call, halves, keep
from engine.kernels.compiler.parallel import kernels_at
from engine.kernels.step.layers import HEAD_NORM, NO_NORM, arrange, layer_at, move, step_at


@kernel("void(int64, int64, int64, int64)", calls=("attend", "norm_columns", "gate_outputs"))
def attend_steps(address: Any, place: Any, made: Any, mixed: Any) -> None:
    """Attend for all tokens. place: address of LAYER. made: projections [T, columns]; mixed: results [T, H·E], bfloat16."""
    job, layer = step_at(address), layer_at(place)
    own, table = attention_at(layer.attention), kernels_at(job.kernels)
    queries, keys = own.heads * own.size, own.groups * own.size
    arranged = np.empty(job.tokens * layer.parts if layer.sources != 0 else 0, np.uint16)
    projected = made
    if layer.sources != 0:
        projected = address_of(arranged)
        arrange(job.tokens, made, layer.columns, layer.sources, layer.parts, projected)
    if layer.head_norms != NO_NORM:
        by_head = layer.head_norms == HEAD_NORM
        size, whole = (own.size, own.size) if by_head else (queries, keys)
        kind = table.centered_norm if job.zero_centered != 0 else table.rms_norm
        call(table.norm_columns, (address, projected, layer.parts, 0, queries, size, layer.query_norm, kind))
        call(table.norm_columns, (address, projected, layer.parts, queries, keys, whole, layer.key_norm, kind))
    if layer.value_norm != 0:
        first, kind = queries + keys, table.rms_norm
        call(table.norm_columns, (address, projected, layer.parts, first, keys, own.size, layer.value_norm, kind))
    _attend(job, layer, projected, mixed)
    if layer.is_gated != 0:
        call(table.gate_outputs, (mixed, projected + 2 * (queries + 2 * keys), job.tokens, queries, layer.parts))
    keep(arranged)


@helper
def _attend(job: Any, layer: Any, projected: Any, mixed: Any) -> None:
    """Attend with one call for a batch, or with one call for each of several positions of one sequence."""
    own = attention_at(layer.attention)
    before, past = own.past, np.empty(own.sequences, np.int64)
    cosine, sine = own.cosine, own.sine
    own.query_stride, own.key_stride, own.value_stride = layer.parts, layer.parts, layer.parts
    for step in range(job.tokens // own.sequences):
        move(own, step, before, cosine, sine, past)
        own.query = projected + 2 * step * layer.parts
        own.key = own.query + 2 * own.heads * own.size
        own.value = own.key + 2 * own.groups * own.size
        own.results = mixed + 2 * step * own.heads * own.size
        call(kernels_at(job.kernels).attend, (layer.attention,))
    own.past, own.cosine, own.sine = before, cosine, sine
    keep(past)


@kernel("void(int64, int64, int64, int64, int64, int64, int64, int64)", calls=("rms_norm", "centered_norm"))
def norm_columns(address: Any, y: Any, width: Any, first: Any, count: Any, size: Any, weight: Any, kind: Any) -> None:
    """Norm `count` columns of y [T, width] from `first` on, in pieces of `size`. kind: address of a norm's kernel."""
    job, own_C = step_at(address), np.empty(size, np.uint16)
    y_TO = numba.carray(halves(y), (job.tokens, width))
    for token in range(job.tokens):
        for part in range(count // size):
            begin = first + part * size
            call(kind, (y + 2 * (token * width + begin), weight, job.epsilon, 1, size, address_of(own_C)))
            for index in range(size):
                y_TO[token, begin + index] = own_C[index]
    keep(own_C)


@kernel("void(int64, int64, int64, int64, int64)")
def gate_outputs(mixed: Any, gates: Any, tokens: Any, count: Any, stride: Any) -> None:
    """Multiply `mixed` [T, count] by the sigmoids of gates. stride: columns from one token's gates to the next one's."""
    mixed_TX = numba.carray(halves(mixed), (tokens, count))
    for token in range(tokens):
        gates_X = numba.carray(halves(gates + 2 * token * stride), (count,))
        for index in range(count):
            share = widen(narrow(np.float32(1.0) / (np.float32(1.0) + exp(-widen(gates_X[index])))))
            mixed_TX[token, index] = narrow(share * widen(mixed_TX[token, index]))
