"""Experts that are not in memory: before a layer's experts run, the step asks for those that it lacks.

A function outside compiled code brings experts into memory (engine/expert_cache). It is called only where a chosen expert is
not there, or one that a later layer will probably choose is neither there nor on its way: in most layers neither is the
case. Those experts are the best ones of the later router on this layer's input.
"""

from __future__ import annotations

from ctypes import CFUNCTYPE, c_int64
from typing import Any

import numba
import numpy as np

from engine.kernels.compiler.arithmetic import place_of_largest, widen
from engine.kernels.compiler.compiling import helper, kernel
from engine.kernels.compiler.memory import address_of, call, halves, integers, keep
from engine.kernels.compiler.parallel import kernels_at
from engine.kernels.expert_places import ABSENT, DISTANCES, PRESENT
from engine.kernels.step.layers import LAYER_BYTES, ROUTER, layer_at, multiply, step_at

BEFORE_EXPERTS = CFUNCTYPE(None, *(c_int64,) * 7)
"""The type of the function that a step calls. Its arguments: the layer, addresses of the chosen experts [T, S] (int64),
of their weights (float32), which it may change, and of the experts' input [T, D] (bfloat16), T, S, and the address of the
predicted experts [DISTANCES, T, U], int64, -1 where nothing is predicted; U is that of the step."""


@kernel("void(int64, int64, int64, int64)", calls=("products", "add_columns"))
def require_experts(address: Any, index: Any, chosen: Any, weights: Any) -> None:
    """Note the layer's choices [T, S], and call the step's function where an expert of them or a predicted one is absent."""
    job = step_at(address)
    layer, tokens, width = layer_at(job.layers + index * LAYER_BYTES), job.tokens, job.used_slots
    chosen_TS = numba.carray(integers(chosen), (tokens, layer.slots))
    used_TS = numba.carray(integers(job.used + 8 * index * tokens * width), (tokens, width))
    places_N = numba.carray(integers(layer.places), (layer.expert_count,))
    is_needed = False
    for token in range(tokens):
        for slot in range(layer.slots):
            expert = chosen_TS[token, slot]
            used_TS[token, slot] = expert
            if expert >= 0 and places_N[expert] != PRESENT:
                is_needed = True
    predicted = np.full(DISTANCES * tokens * width, -1, np.int64)
    following = numba.carray(integers(layer.following), (DISTANCES,))
    for distance in range(DISTANCES):
        own = address_of(predicted) + 8 * distance * tokens * width
        if following[distance] >= 0 and _predict(job, following[distance], own):
            is_needed = True
    if is_needed:
        slots = layer.slots
        job.asked += 1
        call(job.before_experts, (index, chosen, weights, job.normed, tokens, slots, address_of(predicted)))
    keep(predicted)


@helper
def _predict(job: Any, index: Any, predicted: Any) -> Any:
    """Write the experts of another layer that have the largest logits on this layer's input; return whether one is absent.

    Where the layer awaits no prediction, nothing is written.
    """
    place, tokens, width = job.layers + index * LAYER_BYTES, job.tokens, job.used_slots
    layer = layer_at(place)
    if numba.carray(integers(layer.awaits), (1,))[0] == 0:
        return False
    count, table = layer.expert_count, kernels_at(job.kernels)
    logits, ends = np.empty(tokens * count, np.uint16), np.empty(1, np.int64)
    ends[0] = count
    multiply(job, job.plain_form, place + ROUTER, address_of(ends), 1, job.hidden, job.normed, address_of(logits))
    if layer.router_bias != 0:
        call(table.add_columns, (address_of(logits), tokens, count, 0, count, layer.router_bias))
    logits_TN = numba.carray(halves(address_of(logits)), (tokens, count))
    places_N = numba.carray(integers(layer.places), (count,))
    predicted_TS = numba.carray(integers(predicted), (tokens, width))
    left_N, is_absent = np.empty(count, np.float32), False
    for token in range(tokens):
        for expert in range(count):
            left_N[expert] = widen(logits_TN[token, expert])
        for slot in range(layer.slots):
            best = place_of_largest(left_N)
            left_N[best] = np.float32(-np.inf)
            predicted_TS[token, slot] = best
            if places_N[best] == ABSENT:
                is_absent = True
    keep(logits)
    keep(ends)
    return is_absent
