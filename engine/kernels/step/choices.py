"""The choice of a token's experts within a compiled step: by a softmax or by sigmoids, and adaptive skipping."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from engine.kernels.compiler.arithmetic import exp, place_of_largest, widen
from engine.kernels.compiler.compiling import helper, kernel
from engine.kernels.compiler.memory import floats, halves, integers
from engine.kernels.step.layers import layer_at


@helper
def _exponentials(logits_N: Any) -> Any:
    """Return e^(logit − largest) of each logit, and their sum: the parts of a softmax."""
    shares_N, largest, total = np.empty(logits_N.shape[0], np.float32), np.float32(-np.inf), np.float32(0.0)
    for expert in range(logits_N.shape[0]):
        largest = max(largest, logits_N[expert])
    for expert in range(logits_N.shape[0]):
        shares_N[expert] = exp(logits_N[expert] - largest)
        total += shares_N[expert]
    return shares_N, total


@kernel("void(int64, int64, int64, int64)")
def choose_experts(place: Any, logits: Any, chosen: Any, weights: Any) -> None:
    """Write a token's experts by the softmax of its float32 logits, largest first, and their weights.

    With groups, experts are chosen as in `routing.GroupedTopK`, and else as in `routing.TopK`.
    """
    layer, none = layer_at(place), np.float32(-np.inf)
    experts, slots, normalizes, scale = layer.expert_count, layer.slots, layer.normalizes, layer.weight_scale
    logits_N, chosen_S = numba.carray(floats(logits), (experts,)), numba.carray(integers(chosen), (slots,))
    weights_S = numba.carray(floats(weights), (slots,))
    shares_N, total = _exponentials(logits_N)
    if layer.groups > 0:
        for expert in range(experts):
            if logits_N[expert] == none:
                shares_N[expert] = none
        _keep_best_groups(layer, shares_N, 1)
    of_chosen = np.float32(0.0)
    for slot in range(slots):
        best = place_of_largest(shares_N)
        is_empty = shares_N[best] == none and layer.groups > 0
        chosen_S[slot] = -1 if is_empty else best
        weights_S[slot] = np.float32(0.0) if is_empty else shares_N[best] / total
        of_chosen += weights_S[slot]
        shares_N[best] = none
    for slot in range(slots):
        if normalizes:
            weights_S[slot] /= of_chosen
        weights_S[slot] *= scale


@kernel("void(int64, int64, int64)")
def scale_chosen(place: Any, chosen: Any, weights: Any) -> None:
    """Multiply the weights of a token's experts by the experts' own factors, and sort them, largest first."""
    layer = layer_at(place)
    chosen_S, weights_S = numba.carray(integers(chosen), (layer.slots,)), numba.carray(floats(weights), (layer.slots,))
    factors_N = numba.carray(floats(layer.expert_factors), (layer.expert_count,))
    for slot in range(layer.slots):
        expert, place_now = chosen_S[slot], slot
        weight = weights_S[slot] * factors_N[expert]
        while place_now > 0 and weights_S[place_now - 1] < weight:
            chosen_S[place_now], weights_S[place_now] = chosen_S[place_now - 1], weights_S[place_now - 1]
            place_now -= 1
        chosen_S[place_now], weights_S[place_now] = expert, weight


@helper
def _scores(layer: Any, logits_N: Any) -> Any:
    """Return the sigmoids of the logits, or their softmax."""
    if layer.by_sigmoid != 0:
        scores_N = np.empty(layer.expert_count, np.float32)
        for expert in range(layer.expert_count):
            scores_N[expert] = np.float32(1.0) / (np.float32(1.0) + exp(-logits_N[expert]))
        return scores_N
    scores_N, total = _exponentials(logits_N)
    for expert in range(layer.expert_count):
        scores_N[expert] /= total
    return scores_N


@kernel("void(int64, int64, int64, int64)")
def choose_with_bias(place: Any, logits: Any, chosen: Any, weights: Any) -> None:
    """Write a token's experts by the scores of its float32 logits and a selection bias, largest weight first.

    The scores are sigmoids, as in `routing.SigmoidTopK`, or a softmax, as in `routing.BiasedTopK`.
    """
    layer = layer_at(place)
    experts, slots, none = layer.expert_count, layer.slots, np.float32(-np.inf)
    logits_N, bias_N = numba.carray(floats(logits), (experts,)), numba.carray(floats(layer.selection_bias), (experts,))
    chosen_S, weights_S = numba.carray(integers(chosen), (slots,)), numba.carray(floats(weights), (slots,))
    scores_N, choice_N = _scores(layer, logits_N), np.empty(experts, np.float32)
    for expert in range(experts):
        choice_N[expert] = scores_N[expert] + bias_N[expert] if logits_N[expert] > none else none
    if layer.groups > 0:
        _keep_best_groups(layer, choice_N, 2)
    total = np.float32(0.0)
    for slot in range(slots):
        best = place_of_largest(choice_N)
        is_empty = choice_N[best] == none
        chosen_S[slot] = -1 if is_empty else best
        weights_S[slot] = np.float32(0.0) if is_empty else scores_N[best]
        total += weights_S[slot]
        choice_N[best] = none
    for slot in range(slots):
        if layer.normalizes:
            weights_S[slot] /= max(total + layer.added_to_sum, layer.least_sum)
        weights_S[slot] *= layer.weight_scale
        own, weight, place = chosen_S[slot], weights_S[slot], slot
        while place > 0 and weights_S[place - 1] < weight:  # the largest weight comes first
            chosen_S[place], weights_S[place] = chosen_S[place - 1], weights_S[place - 1]
            place -= 1
        chosen_S[place], weights_S[place] = own, weight


@helper
def _keep_best_groups(layer: Any, choice_N: Any, judged_by: Any) -> None:
    """Set the scores of all experts outside of the best groups to −∞. A group has the sum of its best one or two experts."""
    none, groups = np.float32(-np.inf), layer.groups
    group_N = numba.carray(integers(layer.group_of), (layer.expert_count,))
    best_G, second_G = np.full(groups, none), np.full(groups, none)
    for expert in range(layer.expert_count):
        group, score = group_N[expert], choice_N[expert]
        if score > best_G[group]:
            best_G[group], second_G[group] = score, best_G[group]
        elif score > second_G[group]:
            second_G[group] = score
    for group in range(groups):
        if judged_by == 2 and second_G[group] > none:
            best_G[group] += second_G[group]
    is_kept_G = np.zeros(groups, np.bool_)
    for _ in range(min(layer.groups_per_token, groups)):
        best = -1
        for group in range(groups):
            if not is_kept_G[group] and (best < 0 or best_G[group] > best_G[best]):
                best = group
        is_kept_G[best] = True
    for expert in range(layer.expert_count):
        if not is_kept_G[group_N[expert]]:
            choice_N[expert] = none


@kernel("void(int64, float32, int64, int64, int64, int64)")
def skip_slots(place: Any, threshold: Any, chosen: Any, weights: Any, x: Any, hidden: Any) -> None:
    """Apply adaptive skipping (DiEP §4.3) to a token with its input x, [D] bfloat16, as in `routing.Skipping`."""
    layer = layer_at(place)
    slots, experts = layer.slots, layer.expert_count
    x_D, norm = numba.carray(halves(x), (hidden,)), np.float64(0.0)
    for index in range(hidden):
        norm += abs(widen(x_D[index]))
    if norm > layer.importance:
        return
    chosen_S, weights_S = numba.carray(integers(chosen), (slots,)), numba.carray(floats(weights), (slots,))
    gamma1 = numba.carray(floats(layer.gamma1), (slots - 1,))
    gamma2 = numba.carray(floats(layer.gamma2), (experts, experts))
    before = left = np.float32(0.0)
    for slot in range(slots):
        before += weights_S[slot]
    first, is_skipped = chosen_S[0], False
    for slot in range(slots):
        if slot >= max(1, layer.keep) and chosen_S[slot] >= 0:
            gamma = gamma1[slot - 1] * gamma2[first, chosen_S[slot]]
            if weights_S[slot] < threshold * gamma * weights_S[0]:
                chosen_S[slot], weights_S[slot], is_skipped = -1, np.float32(0.0), True
        left += weights_S[slot]
    if layer.restores and is_skipped:
        for slot in range(slots):
            weights_S[slot] *= before / left
