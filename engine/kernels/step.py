"""All layers of a decoder in one call, for the next position of each sequence or the next few positions of one sequence.

Each layer is computed as in `DecoderLayer`, and rounded where torch's own steps round. The step calls the kernels of
products, experts and attention with a record for each.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from engine.kernels.arithmetic import exp, narrow, wide_vector, widen
from engine.kernels.attention import ATTENTION, attention_at
from engine.kernels.compiling import JOB, helper, kernel
from engine.kernels.experts import EXPERTS, experts_at
from engine.kernels.memory import address_of, call, floats, halves, integers, keep, record_at
from engine.kernels.parallel import kernels_at
from engine.kernels.products import MATRIX, PRODUCTS, products_at

NO_NORM, HEAD_NORM, WHOLE_NORM = 0, 1, 2
"""Kinds of norms of queries and keys: no norm, one for each head, or one for all heads together."""
LAYER = np.dtype(
    [
        *((name, MATRIX) for name in ("query", "key", "value", "output", "router", "shared_gate")),
        *((name, np.int64) for name in ("attention_norm", "ffn_norm")),
        *((f"{name}_bias", np.int64) for name in ("query", "key", "value", "output", "router")),  # 0 for none, as below
        *((name, np.int64) for name in ("query_norm", "key_norm", "sinks", "gamma1", "gamma2")),
        *((name, np.int64) for name in ("form", "expert_form", "shared_form")),  # addresses of FORM
        ("window", np.int64),
        ("experts", np.int64),  # EXPERT of each routed expert
        ("expert_count", np.int64),  # 0 for a dense layer, whose FFN is the shared expert
        ("width", np.int64),
        ("slots", np.int64),
        ("shared", np.int64),  # EXPERT; 0 for none
        ("shared_width", np.int64),
        ("keep", np.int64),  # slots that remain after adaptive skipping
        ("normalizes", np.int64),  # whether the top-k weights are normalized to a sum of one
        ("restores", np.int64),  # whether the weights left by skipping are rescaled to their sum before skipping
        ("weight_scale", np.float32),
        ("alpha", np.float32),  # α of a ClampedSwiglu
        ("limit", np.float32),  # 0 for a plain SwiGLU
    ],
    align=True,
)
"""One layer. Fields are addresses unless stated otherwise."""
layer_at = record_at(LAYER)
LAYER_BYTES = LAYER.itemsize
_FIELDS: Any = LAYER.fields
_QUERY, _OUTPUT, _ROUTER, _SHARED_GATE = (_FIELDS[name][1] for name in ("query", "output", "router", "shared_gate"))
"""Offsets of matrices in the record of a layer."""
CACHE = np.dtype([("keys", np.int64), ("values", np.int64)])
"""Addresses of a layer's keys and values, [G, slots, E]."""
cache_at = record_at(CACHE)
_CACHE_BYTES = CACHE.itemsize
STEP = np.dtype(
    [
        ("kernels", np.int64),
        ("plain_form", np.int64),  # FORM of bfloat16
        ("x", np.int64),  # [T, D] bfloat16, overwritten
        ("tokens", np.int64),
        ("hidden", np.int64),
        ("layers", np.int64),  # LAYER of each layer
        ("layer_count", np.int64),
        ("caches", np.int64),  # CACHE of each layer
        *((name, np.int64) for name in ("cosine", "sine")),  # [T, E]
        *((name, np.int64) for name in ("blocks", "blocks_of_one", "past", "sequences", "block_size")),  # as in ATTENTION
        *((name, np.int64) for name in ("heads", "groups", "size", "group_stride")),
        ("head_norms", np.int64),  # NO_NORM, HEAD_NORM or WHOLE_NORM
        ("threads", np.int64),
        ("thresholds", np.int64),  # [T] float32, of adaptive skipping
        ("seen_chosen", np.int64),  # 0, or the addresses of choices and weights [layers, T, S],
        ("seen_weights", np.int64),
        ("seen_inputs", np.int64),  # of the experts' inputs [layers, T, D] and of the logits [layers, T, N]
        ("seen_logits", np.int64),
        ("seen_slots", np.int64),  # S
        ("seen_experts", np.int64),  # N
        # Scratch, which the kernel allocates: bfloat16 [T, D] each, [T, (H + 2G)·E] and [T, H·E].
        *((name, np.int64) for name in ("normed", "added", "shared_out", "projected", "mixed")),
        *((name, np.float32) for name in ("epsilon", "scale", "residual")),  # of norms, scores, residual additions
    ],
    align=True,
)
"""Arguments of one decoding step."""
step_at = record_at(STEP)
_PRODUCTS_BYTES, _EXPERTS_BYTES, _ATTENTION_BYTES = PRODUCTS.itemsize, EXPERTS.itemsize, ATTENTION.itemsize


@kernel(JOB, calls=("products", "swiglu", "attend", "rms_norm"))
def decode(address: Any) -> None:
    """Compute layer after layer. The result overwrites x."""
    job = step_at(address)
    rows, hidden, queries = job.tokens, job.hidden, job.heads * job.size
    normed, added, shared = (
        np.empty(rows * hidden, np.uint16),
        np.empty(rows * hidden, np.uint16),
        np.empty(rows * hidden, np.uint16),
    )
    projected = np.empty(rows * (queries + 2 * job.groups * job.size), np.uint16)
    mixed = np.empty(rows * queries, np.uint16)
    job.normed, job.added, job.shared_out = address_of(normed), address_of(added), address_of(shared)
    job.projected, job.mixed = address_of(projected), address_of(mixed)
    for index in range(job.layer_count):
        place = job.layers + index * LAYER_BYTES
        _attention(job, place, index)
        _feed_forward(job, place, index)
    keep(normed)
    keep(added)
    keep(shared)
    keep(projected)
    keep(mixed)


@helper
def _attention(job: Any, place: Any, index: Any) -> None:
    """Compute the norm, the projections, the attention of each step and the output, and add the output to x."""
    layer, table, hidden = layer_at(place), kernels_at(job.kernels), job.hidden
    queries, keys = job.heads * job.size, job.groups * job.size
    call(table.rms_norm, (job.x, layer.attention_norm, job.epsilon, job.tokens, hidden, job.normed))
    ends = np.empty(3, np.int64)
    ends[0], ends[1], ends[2] = queries, queries + keys, queries + 2 * keys
    _product(job, layer.form, place + _QUERY, ends, hidden, job.normed, job.projected)
    _correct(job, layer.query_bias, layer.query_norm, 0, queries)
    _correct(job, layer.key_bias, layer.key_norm, queries, keys)
    _correct(job, layer.value_bias, 0, queries + keys, keys)
    _attend(job, layer, index)
    ends = np.full(1, hidden)
    _product(job, layer.form, place + _OUTPUT, ends, queries, job.mixed, job.added)
    if layer.output_bias != 0:
        _add_to_part(job.added, job.tokens, hidden, 0, hidden, layer.output_bias)
    _add(job.x, job.added, job.tokens * hidden, job.residual)


@helper
def _product(job: Any, form: Any, matrices: Any, ends_M: Any, inputs: Any, x: Any, results: Any) -> None:
    """Multiply matrices, which are contiguous in the layer's record, with all tokens."""
    record = np.zeros(_PRODUCTS_BYTES, np.uint8)
    own = products_at(address_of(record))
    own.kernels, own.form, own.x, own.rows, own.inputs = job.kernels, form, x, job.tokens, inputs
    own.matrices, own.ends, own.count = matrices, address_of(ends_M), ends_M.shape[0]
    own.threads, own.results = job.threads, results
    call(kernels_at(job.kernels).products, (address_of(record),))
    keep(ends_M)
    keep(record)


@helper
def _correct(job: Any, bias: Any, weight: Any, first: Any, count: Any) -> None:
    """Add the bias to a part of the projections, and apply the norm; an address of 0 means that there is none."""
    width = (job.heads + 2 * job.groups) * job.size
    if bias != 0:
        _add_to_part(job.projected, job.tokens, width, first, count, bias)
    if weight != 0 and job.head_norms == HEAD_NORM:
        _norm_parts(job, width, first, count // job.size, job.size, weight)
    elif weight != 0 and job.head_norms == WHOLE_NORM:
        _norm_parts(job, width, first, 1, count, weight)


@helper
def _attend(job: Any, layer: Any, index: Any) -> None:
    """Attend with one call for a batch, or with one call for each of several positions of one sequence."""
    steps, width = job.tokens // job.sequences, (job.heads + 2 * job.groups) * job.size
    cache = cache_at(job.caches + index * _CACHE_BYTES)
    record, past = np.zeros(_ATTENTION_BYTES, np.uint8), np.empty(job.sequences, np.int64)
    before = numba.carray(integers(job.past), (job.sequences,))
    own = attention_at(address_of(record))
    own.kernels, own.query_stride, own.key_stride, own.value_stride = job.kernels, width, width, width
    own.keys, own.values, own.group_stride = cache.keys, cache.values, job.group_stride
    own.sequences, own.heads, own.groups, own.size = job.sequences, job.heads, job.groups, job.size
    own.blocks, own.blocks_of_one, own.block_size = job.blocks, job.blocks_of_one, job.block_size
    own.past, own.window, own.sinks, own.scale = address_of(past), layer.window, layer.sinks, job.scale
    for step in range(steps):
        for sequence in range(job.sequences):
            past[sequence] = before[sequence] + step
        own.query = job.projected + 2 * step * width
        own.key = own.query + 2 * job.heads * job.size
        own.value = own.key + 2 * job.groups * job.size
        own.cosine, own.sine = job.cosine + 2 * step * job.size, job.sine + 2 * step * job.size
        own.results = job.mixed + 2 * step * job.heads * job.size
        call(kernels_at(job.kernels).attend, (address_of(record),))
    keep(past)
    keep(record)


@helper
def _feed_forward(job: Any, place: Any, index: Any) -> None:
    """Compute the norm, the routed experts and the shared expert, or a dense FFN, and add the output to x."""
    layer, count = layer_at(place), job.tokens * job.hidden
    call(kernels_at(job.kernels).rms_norm, (job.x, layer.ffn_norm, job.epsilon, job.tokens, job.hidden, job.normed))
    if layer.expert_count > 0:
        _routed(job, layer, place, index)
    if layer.shared != 0:
        results = job.added if layer.expert_count == 0 else job.shared_out
        chosen_T, weights_T = np.zeros(job.tokens, np.int64), np.ones(job.tokens, np.float32)
        where = layer.shared, 1, layer.shared_width, layer.shared_form
        _experts(job, where, chosen_T, weights_T, 1, np.float32(1.0), np.float32(0.0), results)
        if layer.shared_gate.values != 0:
            _gate(job, place, results)
        if layer.expert_count > 0:
            _add(job.added, results, count, np.float32(1.0))
    _add(job.x, job.added, count, job.residual)


@helper
def _routed(job: Any, layer: Any, place: Any, index: Any) -> None:
    """Compute the router logits, the choice, the skipping, and the sum of the chosen experts."""
    tokens, experts, slots = job.tokens, layer.expert_count, layer.slots
    logits_TN = np.empty((tokens, experts), np.uint16)
    ends = np.full(1, experts)
    _product(job, job.plain_form, place + _ROUTER, ends, job.hidden, job.normed, address_of(logits_TN))
    if layer.router_bias != 0:
        _add_to_part(address_of(logits_TN), tokens, experts, 0, experts, layer.router_bias)
    chosen_TS, weights_TS = np.empty((tokens, slots), np.int64), np.empty((tokens, slots), np.float32)
    thresholds_T = numba.carray(floats(job.thresholds), (tokens,))
    for token in range(tokens):
        _choose(logits_TN[token], slots, layer.normalizes, layer.weight_scale, chosen_TS[token], weights_TS[token])
        if layer.gamma1 != 0 and slots > layer.keep and thresholds_T[token] > np.float32(0.0):
            _skip(layer, thresholds_T[token], chosen_TS[token], weights_TS[token])
    if job.seen_chosen != 0:
        _tell(job, index, chosen_TS, weights_TS, logits_TN)
    where = layer.experts, experts, layer.width, layer.expert_form
    _experts(job, where, chosen_TS, weights_TS, slots, layer.alpha, layer.limit, job.added)


@helper
def _experts(job: Any, where: Any, chosen: Any, weights: Any, slots: Any, alpha: Any, limit: Any, results: Any) -> None:
    """where: address of the EXPERT records, their number, width and form."""
    record = np.zeros(_EXPERTS_BYTES, np.uint8)
    own = experts_at(address_of(record))
    own.kernels, own.x, own.tokens, own.hidden = job.kernels, job.normed, job.tokens, job.hidden
    own.experts, own.count, own.width, own.form = where
    own.chosen, own.weights, own.slots = address_of(chosen), address_of(weights), slots
    own.threads, own.results, own.alpha, own.limit = job.threads, results, alpha, limit
    call(kernels_at(job.kernels).swiglu, (address_of(record),))
    keep(chosen)
    keep(weights)
    keep(record)


@helper
def _gate(job: Any, place: Any, results: Any) -> None:
    """Multiply the shared expert's output by sigmoid(gate · x)."""
    tokens, hidden = job.tokens, job.hidden
    gate_T, ends = np.empty(tokens, np.uint16), np.full(1, 1)
    _product(job, job.plain_form, place + _SHARED_GATE, ends, hidden, job.normed, address_of(gate_T))
    shared_TD = numba.carray(halves(results), (tokens, hidden))
    for token in range(tokens):
        share = widen(narrow(np.float32(1.0) / (np.float32(1.0) + exp(-widen(gate_T[token])))))
        for index in range(hidden):
            shared_TD[token, index] = narrow(share * widen(shared_TD[token, index]))


@helper
def _tell(job: Any, index: Any, chosen_TS: Any, weights_TS: Any, logits_TN: Any) -> None:
    """Copy the values that observers receive to the layer's part of their arrays."""
    (tokens, slots), experts, hidden = chosen_TS.shape, logits_TN.shape[1], job.hidden
    row = index * tokens
    all_chosen = numba.carray(integers(job.seen_chosen + 8 * row * job.seen_slots), (tokens, job.seen_slots))
    all_weights = numba.carray(floats(job.seen_weights + 4 * row * job.seen_slots), (tokens, job.seen_slots))
    all_logits = numba.carray(halves(job.seen_logits + 2 * row * job.seen_experts), (tokens, job.seen_experts))
    inputs = numba.carray(halves(job.seen_inputs + 2 * row * hidden), (tokens, hidden))
    normed = numba.carray(halves(job.normed), (tokens, hidden))
    for token in range(tokens):
        for slot in range(slots):
            all_chosen[token, slot], all_weights[token, slot] = chosen_TS[token, slot], weights_TS[token, slot]
        for expert in range(experts):
            all_logits[token, expert] = logits_TN[token, expert]
        for place in range(hidden):
            inputs[token, place] = normed[token, place]


@helper
def _add(x: Any, y: Any, count: Any, factor: Any) -> None:
    """Compute x += factor · y for `count` bfloat16 values, rounded where torch's own steps round."""
    x_C, y_C = numba.carray(halves(x), (count,)), numba.carray(halves(y), (count,))
    for index in range(count):
        added = widen(y_C[index])
        if factor != np.float32(1.0):
            added = widen(narrow(added * factor))
        x_C[index] = narrow(widen(x_C[index]) + added)


@helper
def _add_to_part(y: Any, tokens: Any, width: Any, first: Any, count: Any, bias: Any) -> None:
    """Add the bfloat16 values at an address to `count` columns of [T, width]."""
    y_TO, bias_W = numba.carray(halves(y), (tokens, width)), wide_vector(bias, count)
    for token in range(tokens):
        for index in range(count):
            y_TO[token, first + index] = narrow(widen(y_TO[token, first + index]) + bias_W[index])


@helper
def _norm_parts(job: Any, width: Any, first: Any, parts: Any, size: Any, weight: Any) -> None:
    """Apply the RMS norm in place to `parts` runs of `size` columns of the projections."""
    table, own = kernels_at(job.kernels), np.empty(size, np.uint16)
    y_TO = numba.carray(halves(job.projected), (job.tokens, width))
    for token in range(job.tokens):
        for part in range(parts):
            begin = first + part * size
            x = job.projected + 2 * (token * width + begin)
            call(table.rms_norm, (x, weight, job.epsilon, 1, size, address_of(own)))
            for index in range(size):
                y_TO[token, begin + index] = own[index]


@helper
def _choose(logits_N: Any, slots: Any, normalizes: Any, scale: Any, chosen_S: Any, weights_S: Any) -> None:
    """Write the slots' experts by softmax of bfloat16 logits, largest first, and their weights."""
    experts = logits_N.shape[0]
    shares_N = np.empty(experts, np.float32)
    largest = np.float32(-np.inf)
    for expert in range(experts):
        shares_N[expert] = widen(logits_N[expert])
        largest = max(largest, shares_N[expert])
    total = np.float32(0.0)
    for expert in range(experts):
        shares_N[expert] = exp(shares_N[expert] - largest)
        total += shares_N[expert]
    of_chosen = np.float32(0.0)
    for slot in range(slots):
        best = 0
        for expert in range(1, experts):
            if shares_N[expert] > shares_N[best]:
                best = expert
        chosen_S[slot], weights_S[slot] = best, shares_N[best] / total
        of_chosen += weights_S[slot]
        shares_N[best] = np.float32(-1.0)
    for slot in range(slots):
        if normalizes:
            weights_S[slot] /= of_chosen
        weights_S[slot] *= scale


@helper
def _skip(layer: Any, threshold: Any, chosen_S: Any, weights_S: Any) -> None:
    """Apply adaptive skipping (DiEP §4.3), as in `routing.Skipping`."""
    slots, experts = chosen_S.shape[0], layer.expert_count
    gamma1 = numba.carray(floats(layer.gamma1), (slots - 1,))
    gamma2 = numba.carray(floats(layer.gamma2), (experts, experts))
    before = left = np.float32(0.0)
    for slot in range(slots):
        before += weights_S[slot]
    first, is_skipped = chosen_S[0], False
    for slot in range(slots):
        if slot >= max(1, layer.keep):
            gamma = gamma1[slot - 1] * gamma2[first, chosen_S[slot]]
            if weights_S[slot] < threshold * gamma * weights_S[0]:
                chosen_S[slot], weights_S[slot], is_skipped = -1, np.float32(0.0), True
        left += weights_S[slot]
    if layer.restores and is_skipped:
        for slot in range(slots):
            weights_S[slot] *= before / left
