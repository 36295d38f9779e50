"""All layers of a decoder in one call, for the next position of each sequence or the next few positions of one sequence.

Each layer is computed as in `DecoderLayer`, and rounded where torch's own steps round. The step calls the kernels of
products, experts and attention with a record for each. Where a layer's attention or its choice of experts is none that these
kernels know, the step calls a function outside of compiled code for that part alone.
"""

from __future__ import annotations

from ctypes import CFUNCTYPE, c_int64
from typing import Any

import numba
import numpy as np

from engine.kernels.attention.grouped import attention_at
from engine.kernels.compiler.arithmetic import exp, narrow, wide_vector, widen
from engine.kernels.compiler.compiling import BLOCK, JOB, helper, kernel
from engine.kernels.compiler.memory import address_of, call, floats, halves, integers, keep, record_at
from engine.kernels.compiler.parallel import kernels_at
from engine.kernels.experts import EXPERTS, experts_at
from engine.kernels.products import MATRIX, MATRIX_BYTES, PRODUCTS, matrix_at, products_at
from engine.kernels.stored.forms import form_at

NO_NORM, HEAD_NORM, WHOLE_NORM = 0, 1, 2
"""Kinds of norms of queries and keys: no norm, one for each head, or one for all heads together."""
ATTENDS, OUTSIDE, RECURS, LATENT = 1, 2, 3, 4
"""Kinds of layers' attention beside none (0): grouped queries (attention.py), the function MIX, a state
(recurrence.py), or latent vectors (latent.py)."""
MIX = CFUNCTYPE(None, *(c_int64,) * 3)
"""The type of the function that computes the attention of a layer. Its arguments: the layer, and the addresses of the normed
hidden states and of the result, [T, D] bfloat16."""
CHOOSE = CFUNCTYPE(None, *(c_int64,) * 6)
"""The type of the function that chooses a layer's experts. Its arguments: the layer, the addresses of the experts' input
[T, D] (bfloat16) and of the chosen experts [T, S] (int64) and their weights (float32), which it writes, T and S."""
LAYER = np.dtype(
    [
        *((name, MATRIX) for name in ("query", "key", "value", "output", "router", "shared_gate")),
        *((name, np.int64) for name in ("attention_norm", "ffn_norm")),
        # 0 for none: norms of what attention and the feed-forward block add, of the router's input, of the input and the
        # output of the shared expert and of the output of the routed experts, and the layer's factor, a bfloat16.
        *((name, np.int64) for name in ("attention_output_norm", "ffn_output_norm", "router_norm")),
        *((name, np.int64) for name in ("shared_norm", "shared_output_norm", "routed_output_norm", "factor")),
        *((f"{name}_bias", np.int64) for name in ("query", "key", "value", "output", "router")),  # 0 for none, as below
        *((name, np.int64) for name in ("query_norm", "key_norm", "value_norm", "gamma1", "gamma2")),
        *((name, np.int64) for name in ("form", "expert_form", "shared_form")),  # addresses of FORM
        # If `mixes` is ATTENDS: ATTENTION, in which all is filled in but the projections and results; the kind of norms of
        # queries and keys; the number of columns of the projections, and of queries, keys, values and gates; which column of
        # the projections each of these is, [parts] int64, 0 if they are the same; whether outputs are gated. If it is
        # LATENT: a record of that name, and as columns the dimensions of the query's latent vector, 0 for none.
        *((name, np.int64) for name in ("attention", "head_norms", "columns", "parts", "sources", "is_gated")),
        ("experts", np.int64),  # EXPERT of each routed expert
        ("expert_count", np.int64),  # 0 for a dense layer, whose FFN is the shared expert
        ("slots", np.int64),
        ("shared", np.int64),  # EXPERT; 0 for none
        ("keep", np.int64),  # slots that remain after adaptive skipping
        ("normalizes", np.int64),  # whether the top-k weights are normalized to a sum of one
        ("restores", np.int64),  # whether the weights left by skipping are rescaled to their sum before skipping
        ("mixes", np.int64),  # 0, ATTENDS, OUTSIDE, RECURS or LATENT
        ("recurrent", np.int64),  # RECURRENT of a layer with a state
        ("feeds", np.int64),  # whether there are experts or a dense FFN
        ("chooses_outside", np.int64),  # whether the function CHOOSE chooses the experts
        ("selection_bias", np.int64),  # [N] float32, added to the scores for the choice; 0 for none
        ("by_sigmoid", np.int64),  # whether the scores that it is added to are sigmoids; otherwise they are a softmax
        ("expert_factors", np.int64),  # 0, or factors of the experts' weights [N], float32
        *((name, np.int64) for name in ("groups", "groups_per_token", "group_of")),  # numbers, 0 for none; each expert's [N]
        ("added_to_sum", np.float32),  # added to the divisor of normalized weights where there is a bias
        ("least_sum", np.float32),  # the least that this divisor may be
        ("is_wide", np.int64),  # whether the router is multiplied in float32, in this FORM
        ("router_form", np.int64),
        ("weight_scale", np.float32),
        ("alpha", np.float32),  # α of a ClampedSwiglu
        ("limit", np.float32),  # as in experts.EXPERTS
        ("shared_alpha", np.float32),  # those of the shared expert or the dense FFN
        ("shared_limit", np.float32),
        ("importance", np.float32),  # 1-norm of a token above which it skips nothing; infinity if all tokens skip
        # Only where experts may be absent (experts.py), integers: where each is [N], whether predictions are awaited
        # [1], and the next layers whose choices can be predicted [DISTANCES], -1 where one cannot.
        *((name, np.int64) for name in ("places", "awaits", "following")),
    ],
    align=True,
)
"""One layer. Fields are addresses unless stated otherwise."""
layer_at = record_at(LAYER)
LAYER_BYTES = LAYER.itemsize
_FIELDS: Any = LAYER.fields
QUERY, KEY, OUTPUT, ROUTER, _SHARED_GATE = (_FIELDS[name][1] for name in ("query", "key", "output", "router", "shared_gate"))
"""Offsets of matrices in the record of a layer."""
STEP = np.dtype(
    [
        ("kernels", np.int64),
        ("plain_form", np.int64),  # FORM of bfloat16
        ("x", np.int64),  # [T, D] bfloat16, overwritten
        ("tokens", np.int64),
        ("hidden", np.int64),
        ("layers", np.int64),  # LAYER of each layer
        ("layer_count", np.int64),
        ("threads", np.int64),
        ("thresholds", np.int64),  # [T] float32, of adaptive skipping
        ("zero_centered", np.int64),  # whether norms of layers are
        *((name, np.int64) for name in ("mix", "choose")),  # addresses of functions MIX and CHOOSE, or 0
        ("before_experts", np.int64),  # 0, or the address of a function BEFORE_EXPERTS (experts.py), and then
        ("asked", np.int64),  # the calls of that function so far,
        ("used", np.int64),  # of the chosen experts [layers, T, U], integers,
        ("used_slots", np.int64),  # U, the most slots of a layer
        ("seen_chosen", np.int64),  # 0, or the addresses of choices and weights [layers, T, S],
        ("seen_weights", np.int64),
        ("seen_inputs", np.int64),  # of the experts' inputs [layers, T, D] and of the logits [layers, T, N]
        ("seen_logits", np.int64),
        ("seen_slots", np.int64),  # S
        ("seen_experts", np.int64),  # N
        # Scratch, which the kernel allocates: bfloat16 [T, D] each.
        *((name, np.int64) for name in ("normed", "added", "shared_out")),
        *((name, np.float32) for name in ("epsilon", "residual")),  # of norms, of residual additions
    ],
    align=True,
)
"""Arguments of a decoder's steps. The record stays; fields that differ from step to step are written before each."""
step_at = record_at(STEP)
_PRODUCTS_BYTES, _EXPERTS_BYTES = PRODUCTS.itemsize, EXPERTS.itemsize


@kernel(JOB, calls=("attention_layer", "mix_layer", "feed_forward_layer"))
def decode(address: Any) -> None:
    """Compute layer after layer. The result overwrites x."""
    job = step_at(address)
    table, size = kernels_at(job.kernels), job.tokens * job.hidden
    normed, added, shared = np.empty(size, np.uint16), np.empty(size, np.uint16), np.empty(size, np.uint16)
    job.normed, job.added, job.shared_out = address_of(normed), address_of(added), address_of(shared)
    for index in range(job.layer_count):
        layer = layer_at(job.layers + index * LAYER_BYTES)
        if layer.mixes == ATTENDS:
            call(table.attention_layer, (address, np.int64(index)))
        elif layer.mixes == OUTSIDE:
            call(table.mix_layer, (address, np.int64(index)))
        elif layer.mixes == LATENT:
            call(table.latent_layer, (address, np.int64(index)))
        elif layer.mixes == RECURS:
            call(table.recurrent_layer, (address, np.int64(index)))
        if layer.feeds != 0:
            call(table.feed_forward_layer, (address, np.int64(index)))
    keep(normed)
    keep(added)
    keep(shared)


@helper
def write_normed(job: Any, weight: Any) -> None:
    """Write the norm of x to `normed`."""
    table = kernels_at(job.kernels)
    kind = table.centered_norm if job.zero_centered != 0 else table.rms_norm
    call(kind, (job.x, weight, job.epsilon, job.tokens, job.hidden, job.normed))


@helper
def _norm_output(job: Any, weight: Any, y: Any) -> None:
    """Norm [T, D] at `y` in place. weight: address; 0 for no norm."""
    if weight != 0:
        call(kernels_at(job.kernels).rms_norm, (y, weight, job.epsilon, job.tokens, job.hidden, y))


@helper
def add_mixed(job: Any, layer: Any) -> None:
    """Add the output of a layer's attention, which lies at `added`, to x."""
    _norm_output(job, layer.attention_output_norm, job.added)
    call(kernels_at(job.kernels).add_to_residual, (job.x, job.added, job.tokens * job.hidden, job.residual))


@kernel(BLOCK, calls=("rms_norm", "centered_norm", "add_to_residual"))
def mix_layer(address: Any, index: Any) -> None:
    """Compute the norm, let the attention be computed outside, and add its output to x."""
    job = step_at(address)
    layer = layer_at(job.layers + index * LAYER_BYTES)
    write_normed(job, layer.attention_norm)
    call(job.mix, (index, job.normed, job.added))
    add_mixed(job, layer)


@kernel(BLOCK, calls=("rms_norm", "products", "attend_steps", "add_columns", "add_to_residual"))
def attention_layer(address: Any, index: Any) -> None:
    """Compute the norm, the projections, the attention of each step and the output, and add the output to x."""
    job, place = step_at(address), step_at(address).layers + index * LAYER_BYTES
    layer, own = layer_at(place), attention_at(layer_at(place).attention)
    queries = own.heads * own.size
    write_normed(job, layer.attention_norm)
    made, mixed = np.empty(job.tokens * layer.columns, np.uint16), np.empty(job.tokens * queries, np.uint16)
    _project(job, place, address_of(made))
    call(kernels_at(job.kernels).attend_steps, (address, place, address_of(made), address_of(mixed)))
    ends = np.empty(1, np.int64)
    ends[0] = job.hidden
    multiply(job, layer.form, place + OUTPUT, address_of(ends), 1, queries, address_of(mixed), job.added)
    keep(ends)
    keep(made)
    keep(mixed)
    if layer.output_bias != 0:
        call(kernels_at(job.kernels).add_columns, (job.added, job.tokens, job.hidden, 0, job.hidden, layer.output_bias))
    add_mixed(job, layer)


@helper
def _project(job: Any, place: Any, made: Any) -> None:
    """Write the projections with their biases, [T, columns]."""
    layer, table, own = layer_at(place), kernels_at(job.kernels), attention_at(layer_at(place).attention)
    ends, keys = np.empty(3, np.int64), own.groups * own.size
    values = layer.columns - keys if layer.value.values != 0 else layer.columns
    ends[0], ends[1], ends[2] = values - keys, values, layer.columns
    count = 3 if layer.value.values != 0 else 2
    multiply(job, layer.form, place + QUERY, address_of(ends), count, job.hidden, job.normed, made)
    if layer.query_bias != 0:
        call(table.add_columns, (made, job.tokens, layer.columns, 0, ends[0], layer.query_bias))
    if layer.key_bias != 0:
        call(table.add_columns, (made, job.tokens, layer.columns, ends[0], keys, layer.key_bias))
    if layer.value_bias != 0:
        call(table.add_columns, (made, job.tokens, layer.columns, values, keys, layer.value_bias))
    keep(ends)


@helper
def arrange(tokens: Any, x: Any, width: Any, sources: Any, count: Any, results: Any) -> None:
    """Write column sources[i] of x [T, width] to column i of the results [T, count]. All but the numbers are addresses."""
    x_TW, results_TC = numba.carray(halves(x), (tokens, width)), numba.carray(halves(results), (tokens, count))
    sources_C = numba.carray(integers(sources), (count,))
    for token in range(tokens):
        for index in range(count):
            results_TC[token, index] = x_TW[token, sources_C[index]]


@helper
def move(own: Any, step: Any, before: Any, cosine: Any, sine: Any, past: Any) -> None:
    """Let a record of attention stand at a later position, `step` after those whose numbers and angles are given.

    before, cosine, sine: addresses. past: int64 [sequences], which must live while the record is used.
    """
    before_B = numba.carray(integers(before), (own.sequences,))
    for sequence in range(own.sequences):
        past[sequence] = before_B[sequence] + step
    own.past = address_of(past)
    own.cosine, own.sine = cosine + 2 * step * own.rotated, sine + 2 * step * own.rotated


@helper
def multiply(job: Any, form: Any, matrices: Any, ends: Any, count: Any, inputs: Any, x: Any, results: Any) -> None:
    """Multiply matrices, whose records are contiguous, with all tokens. All but `count` and `inputs` are addresses."""
    if form_at(form).own_vectors != 0:
        _multiply_each(job, matrices, ends, count, inputs, x, results)
    else:
        _multiply_all(job, form, matrices, ends, count, inputs, x, results)


@helper
def _multiply_all(job: Any, form: Any, matrices: Any, ends: Any, count: Any, inputs: Any, x: Any, results: Any) -> None:
    """Multiply matrices of one form in one call."""
    record = np.zeros(_PRODUCTS_BYTES, np.uint8)
    own = products_at(address_of(record))
    own.kernels, own.form, own.x, own.rows, own.inputs = job.kernels, form, x, job.tokens, inputs
    own.matrices, own.ends, own.count = matrices, ends, count
    own.threads, own.results = job.threads, results
    call(kernels_at(job.kernels).products, (address_of(record),))
    keep(record)


@helper
def _multiply_each(job: Any, matrices: Any, ends: Any, count: Any, inputs: Any, x: Any, results: Any) -> None:
    """Multiply matrices of the form MIXED one by one, each in its own form."""
    ends_M, begin = numba.carray(integers(ends), (count,)), 0
    results_TO = numba.carray(halves(results), (job.tokens, ends_M[count - 1]))
    single, width = np.empty(2, np.int64), np.empty(1, np.int64)
    for number in range(count):
        own = matrix_at(matrices + number * MATRIX_BYTES)
        single[0], single[1], width[0] = own.values, form_at(own.scales).scales, ends_M[number] - begin
        made_TW = np.empty((job.tokens, width[0]), np.uint16)
        _multiply_all(job, own.scales, address_of(single), address_of(width), 1, inputs, x, address_of(made_TW))
        for token in range(job.tokens):
            for index in range(width[0]):
                results_TO[token, begin + index] = made_TW[token, index]
        keep(made_TW)
        begin = ends_M[number]
    keep(single)
    keep(width)


@kernel(BLOCK, calls=("rms_norm", "centered_norm", "routed_experts", "swiglu", "add_to_residual"))
def feed_forward_layer(address: Any, index: Any) -> None:
    """Compute the norm, the routed experts, and the shared expert or a dense FFN, and add their output to x."""
    job, place = step_at(address), step_at(address).layers + index * LAYER_BYTES
    layer, table, count = layer_at(place), kernels_at(job.kernels), job.tokens * job.hidden
    write_normed(job, layer.ffn_norm)
    if layer.expert_count > 0:
        call(table.routed_experts, (address, index))
        _norm_output(job, layer.routed_output_norm, job.added)
    if layer.shared != 0:
        if layer.shared_norm != 0:
            call(table.rms_norm, (job.x, layer.shared_norm, job.epsilon, job.tokens, job.hidden, job.normed))
        results = job.added if layer.expert_count == 0 else job.shared_out
        chosen_T, weights_T = np.empty(job.tokens, np.int64), np.empty(job.tokens, np.float32)
        for token in range(job.tokens):
            chosen_T[token], weights_T[token] = 0, np.float32(1.0)
        where, clamp = (layer.shared, 1, layer.shared_form), (layer.shared_alpha, layer.shared_limit)
        _experts(job, where, address_of(chosen_T), address_of(weights_T), 1, clamp, results)
        keep(chosen_T)
        keep(weights_T)
        if layer.shared_gate.values != 0:
            call(table.gate_shared, (address, place, results))
        _norm_output(job, layer.shared_output_norm, results)
        if layer.expert_count > 0:
            call(table.add_to_residual, (job.added, results, count, np.float32(1.0)))
    _norm_output(job, layer.ffn_output_norm, job.added)
    call(table.add_to_residual, (job.x, job.added, count, job.residual))
    if layer.factor != 0:
        x_C, factor = numba.carray(halves(job.x), (count,)), widen(numba.carray(halves(layer.factor), (1,))[0])
        for index in range(count):
            x_C[index] = narrow(widen(x_C[index]) * factor)


@kernel(BLOCK, calls=("products", "add_columns", "choose_experts", "swiglu"))
def routed_experts(address: Any, index: Any) -> None:
    """Compute the router logits, the choice, the skipping, and the sum of the chosen experts; ask for absent experts."""
    job, place = step_at(address), step_at(address).layers + index * LAYER_BYTES
    layer, table, tokens, slots = layer_at(place), kernels_at(job.kernels), job.tokens, layer_at(place).slots
    chosen, weights = np.empty(tokens * slots, np.int64), np.empty(tokens * slots, np.float32)
    if layer.chooses_outside != 0:
        for number in range(tokens * slots):  # no expert, should the function not write
            chosen[number], weights[number] = -1, np.float32(0.0)
        call(job.choose, (index, job.normed, address_of(chosen), address_of(weights), tokens, slots))
    else:
        _choose(address, index, address_of(chosen), address_of(weights))
    if job.before_experts != 0:
        call(table.require_experts, (address, index, address_of(chosen), address_of(weights)))
    where, clamp = (layer.experts, layer.expert_count, layer.expert_form), (layer.alpha, layer.limit)
    _experts(job, where, address_of(chosen), address_of(weights), slots, clamp, job.added)
    keep(chosen)
    keep(weights)


@helper
def _choose(address: Any, index: Any, chosen: Any, weights: Any) -> None:
    """Write the chosen experts and their weights, and tell them to observers."""
    job, place = step_at(address), step_at(address).layers + index * LAYER_BYTES
    layer, table, tokens = layer_at(place), kernels_at(job.kernels), job.tokens
    count, slots = layer.expert_count, layer.slots
    logits, wide = np.empty(tokens * count, np.uint16), np.empty(tokens * count, np.float32)
    if layer.is_wide != 0:
        _wide_logits(job, place, address_of(wide))
    else:
        _logits(job, place, address_of(logits))
        for number in range(tokens * count):
            wide[number] = widen(logits[number])
    thresholds_T = numba.carray(floats(job.thresholds), (tokens,))
    for token in range(tokens):
        own = chosen + 8 * token * slots, weights + 4 * token * slots
        if layer.selection_bias != 0:
            call(table.choose_with_bias, (place, address_of(wide) + 4 * token * count, *own))
        else:
            call(table.choose_experts, (place, address_of(wide) + 4 * token * count, *own))
        if layer.expert_factors != 0:
            call(table.scale_chosen, (place, *own))
        if layer.gamma1 != 0 and slots > layer.keep and thresholds_T[token] > np.float32(0.0):
            call(table.skip_slots, (place, thresholds_T[token], *own, job.normed + 2 * token * job.hidden, job.hidden))
    if job.seen_chosen != 0:
        call(table.tell_observers, (address, index, chosen, weights, address_of(logits)))
    keep(logits)
    keep(wide)


@helper
def _logits(job: Any, place: Any, logits: Any) -> None:
    """Write the router's logits, [T, N] bfloat16."""
    layer, table, ends = layer_at(place), kernels_at(job.kernels), np.empty(1, np.int64)
    count = layer.expert_count
    ends[0] = count
    own = np.empty(job.tokens * job.hidden if layer.router_norm != 0 else 0, np.uint16)
    x = job.normed
    if layer.router_norm != 0:
        x = address_of(own)
        call(table.rms_norm, (job.x, layer.router_norm, job.epsilon, job.tokens, job.hidden, x))
        root = np.float32(1.0 / np.sqrt(np.float64(job.hidden)))
        for index in range(own.shape[0]):
            own[index] = narrow(widen(own[index]) * root)
    multiply(job, layer.router_form, place + ROUTER, address_of(ends), 1, job.hidden, x, logits)
    keep(own)
    keep(ends)
    if layer.router_bias != 0:
        call(table.add_columns, (logits, job.tokens, count, 0, count, layer.router_bias))


@helper
def _wide_logits(job: Any, place: Any, logits: Any) -> None:
    """Write the router's logits, [T, N] float32."""
    layer, ends = layer_at(place), np.empty(1, np.int64)
    ends[0] = layer.expert_count
    wide = wide_vector(job.normed, job.tokens * job.hidden)
    multiply(job, layer.router_form, place + ROUTER, address_of(ends), 1, job.hidden, address_of(wide), logits)
    keep(ends)
    keep(wide)
    if layer.router_bias != 0:
        bias_N = wide_vector(layer.router_bias, layer.expert_count)
        logits_TN = numba.carray(floats(logits), (job.tokens, layer.expert_count))
        for token in range(job.tokens):
            for expert in range(layer.expert_count):
                logits_TN[token, expert] += bias_N[expert]


@helper
def _experts(job: Any, where: Any, chosen: Any, weights: Any, slots: Any, clamp: Any, results: Any) -> None:
    """Compute the chosen experts. where: address of the EXPERT records, their number and form."""
    record = np.zeros(_EXPERTS_BYTES, np.uint8)
    own = experts_at(address_of(record))
    own.kernels, own.x, own.tokens, own.hidden = job.kernels, job.normed, job.tokens, job.hidden
    own.experts, own.count, own.form = where
    own.chosen, own.weights, own.slots = chosen, weights, slots
    own.threads, own.results = job.threads, results
    own.alpha, own.limit = clamp
    call(kernels_at(job.kernels).swiglu, (address_of(record),))
    keep(record)


@kernel("void(int64, int64, int64)", calls=("products",))
def gate_shared(address: Any, place: Any, results: Any) -> None:
    """Multiply the shared expert's output by sigmoid(gate · x)."""
    job = step_at(address)
    gate_T, ends = np.empty(job.tokens, np.uint16), np.empty(1, np.int64)
    ends[0] = 1
    multiply(job, job.plain_form, place + _SHARED_GATE, address_of(ends), 1, job.hidden, job.normed, address_of(gate_T))
    keep(ends)
    shared_TD = numba.carray(halves(results), (job.tokens, job.hidden))
    for token in range(job.tokens):
        share = widen(narrow(np.float32(1.0) / (np.float32(1.0) + exp(-widen(gate_T[token])))))
        for index in range(job.hidden):
            shared_TD[token, index] = narrow(share * widen(shared_TD[token, index]))


@kernel("void(int64, int64, int64, int64, int64)")
def tell_observers(address: Any, index: Any, chosen: Any, weights: Any, logits: Any) -> None:
    """Copy the values that observers receive to the layer's part of their arrays."""
    job = step_at(address)
    layer, tokens, hidden = layer_at(job.layers + index * LAYER_BYTES), job.tokens, job.hidden
    slots, count, row = layer.slots, layer.expert_count, index * tokens
    chosen_TS, weights_TS = numba.carray(integers(chosen), (tokens, slots)), numba.carray(floats(weights), (tokens, slots))
    logits_TN, normed_TD = numba.carray(halves(logits), (tokens, count)), numba.carray(halves(job.normed), (tokens, hidden))
    all_chosen = numba.carray(integers(job.seen_chosen + 8 * row * job.seen_slots), (tokens, job.seen_slots))
    all_weights = numba.carray(floats(job.seen_weights + 4 * row * job.seen_slots), (tokens, job.seen_slots))
    all_logits = numba.carray(halves(job.seen_logits + 2 * row * job.seen_experts), (tokens, job.seen_experts))
    all_inputs = numba.carray(halves(job.seen_inputs + 2 * row * hidden), (tokens, hidden))
    for token in range(tokens):
        for slot in range(slots):
            all_chosen[token, slot], all_weights[token, slot] = chosen_TS[token, slot], weights_TS[token, slot]
        for expert in range(count):
            all_logits[token, expert] = logits_TN[token, expert]
        for place in range(hidden):
            all_inputs[token, place] = normed_TD[token, place]


@kernel("void(int64, int64, int64, float32)")
def add_to_residual(x: Any, y: Any, count: Any, factor: Any) -> None:
    """Compute x += factor · y for `count` bfloat16 values, rounded where torch's own steps round."""
    x_C, y_C = numba.carray(halves(x), (count,)), numba.carray(halves(y), (count,))
    for index in range(count):
        added = widen(y_C[index])
        if factor != np.float32(1.0):
            added = widen(narrow(added * factor))
        x_C[index] = narrow(widen(x_C[index]) + added)


@kernel("void(int64, int64, int64, int64, int64, int64)")
def add_columns(y: Any, tokens: Any, width: Any, first: Any, count: Any, bias: Any) -> None:
    """Add the bfloat16 values at an address to `count` columns of [T, width]."""
    y_TO, bias_W = numba.carray(halves(y), (tokens, width)), wide_vector(bias, count)
    for token in range(tokens):
        for index in range(count):
            y_TO[token, first + index] = narrow(widen(y_TO[token, first + index]) + bias_W[index])
