"""Routings (engine/decoder/routing.py) as ONNX nodes: router logits to (experts, weights), each [T, S].

`SELECTIONS` has one function for each kind of Routing that reads only the logits. An empty slot has the weight zero.

Shape suffixes: T tokens, N routed experts of the layer, S slots, K the model's top-k, J slots after the first, G
groups, M experts of one group, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from engine.decoder.routing import BiasedTopK, GroupedTopK, Routing, SigmoidTopK, Skipping, SparseMixer, TopK
from engine.errors import UnsupportedError
from engine.onnx.graph import FLOAT, Graph
from engine.onnx.layers import cast, float32

_END = 2**31 - 1
NEVER = -1e30
"""Replacement of −∞, because 0 · ∞ is NaN."""


class Selected(NamedTuple):
    """Result of a Routing, as names of values."""

    experts_TS: str
    weights_TS: str
    """float32; zero in an empty slot."""


def select(graph: Graph, routing: Routing, logits_TN: str, experts: int, x_TD: str | None = None) -> Selected:
    """Add the nodes of a Routing; logits are float32. Raises UnsupportedError for a Routing without an ONNX form.

    x_TD: the router's input, which only Skipping with protected tokens needs.
    """
    if isinstance(routing, Skipping):
        return _skipping(graph, routing, logits_TN, experts, x_TD)
    own = SELECTIONS.get(type(routing))
    if own is None:
        raise UnsupportedError(f"routing {type(routing).__name__} has no ONNX form; export the model with its own routing")
    return own(graph, routing, logits_TN, experts)


def expert_weights(graph: Graph, selected: Selected, logits_TN: str) -> str:
    """Return the weight of each expert for each token, [T, N]; zero for unused experts."""
    zeros_TN = graph.node("ConstantOfShape", graph.node("Shape", logits_TN))
    return graph.node("ScatterElements", zeros_TN, selected.experts_TS, selected.weights_TS, axis=1)


def _top_k(graph: Graph, routing: TopK, logits_TN: str, experts: int) -> Selected:
    probabilities_TN = graph.node("Softmax", logits_TN, axis=-1)
    weights_TK, experts_TK = _largest(graph, probabilities_TN, min(routing.experts_per_token, experts))
    if routing.normalise:
        weights_TK = graph.node("Div", weights_TK, _sum(graph, weights_TK))
    if routing.scale != 1.0:
        weights_TK = graph.node("Mul", weights_TK, float32(graph, routing.scale))
    return Selected(experts_TK, weights_TK)


def _sigmoid_top_k(graph: Graph, routing: SigmoidTopK, logits_TN: str, experts: int) -> Selected:
    slots = min(routing.experts_per_token, experts)
    scores_TN = graph.node("Sigmoid", logits_TN)
    choice_TN = graph.node("Add", scores_TN, float32(graph, routing.bias_N.tolist()))
    if routing.groups:
        choice_TN = _of_best_groups(graph, routing, choice_TN, judged_by=2)
    best_TK, experts_TK = _largest(graph, choice_TN, slots)
    weights_TK = graph.node("GatherElements", scores_TN, experts_TK, axis=1)
    empty_TK = graph.node("Equal", best_TK, float32(graph, -np.inf))
    weights_TK = graph.node("Where", empty_TK, float32(graph, 0.0), weights_TK)
    if routing.normalise:
        weights_TK = graph.node("Div", weights_TK, graph.node("Add", _sum(graph, weights_TK), float32(graph, 1e-20)))
    weights_TK = graph.node("Mul", weights_TK, float32(graph, routing.scale))
    # Sorted by weight, as wrapping Routings expect.
    weights_TK, order_TK = _largest(graph, weights_TK, slots)
    return Selected(graph.node("GatherElements", experts_TK, order_TK, axis=1), weights_TK)


def _biased_top_k(graph: Graph, routing: BiasedTopK, logits_TN: str, experts: int) -> Selected:
    slots = min(routing.experts_per_token, experts)
    probabilities_TN = graph.node("Softmax", logits_TN, axis=-1)
    _, experts_TK = _largest(graph, graph.node("Add", probabilities_TN, float32(graph, routing.bias_N.tolist())), slots)
    weights_TK = graph.node("GatherElements", probabilities_TN, experts_TK, axis=1)
    weights_TK = graph.node("Div", weights_TK, graph.node("Max", _sum(graph, weights_TK), float32(graph, routing.least_sum)))
    weights_TK, order_TK = _largest(graph, weights_TK, slots)
    return Selected(graph.node("GatherElements", experts_TK, order_TK, axis=1), weights_TK)


def _sparse_mixer(graph: Graph, routing: SparseMixer, logits_TN: str, experts: int) -> Selected:
    left_TN, chosen, weights = logits_TN, [], []
    size_TN = graph.node("Abs", logits_TN)
    nothing = float32(graph, NEVER)
    for _ in range(min(routing.experts_per_token, experts)):
        best_T1, expert_T1 = _largest(graph, left_TN, 1)
        behind_TN = graph.node("Sub", best_T1, logits_TN)
        # Not as a quotient, which would be 0 / 0 if all logits are zero.
        allowed_TN = graph.node("Mul", graph.node("Max", size_TN, best_T1), float32(graph, 2.0 * routing.jitter))
        near_TN = graph.node("Where", graph.node("Greater", behind_TN, allowed_TN), nothing, left_TN)
        weights.append(graph.node("GatherElements", graph.node("Softmax", near_TN, axis=-1), expert_T1, axis=1))
        chosen.append(expert_T1)
        never_T1 = graph.node("Add", graph.node("Mul", best_T1, float32(graph, 0.0)), nothing)
        left_TN = graph.node("ScatterElements", left_TN, expert_T1, never_T1, axis=1)
    weights_TS, order_TS = _largest(graph, graph.node("Concat", *weights, axis=1), len(weights))
    experts_TS = graph.node("Concat", *chosen, axis=1)
    return Selected(graph.node("GatherElements", experts_TS, order_TS, axis=1), weights_TS)


def _grouped_top_k(graph: Graph, routing: GroupedTopK, logits_TN: str, experts: int) -> Selected:
    probabilities_TN = _of_best_groups(graph, routing, graph.node("Softmax", logits_TN, axis=-1), judged_by=1)
    weights_TK, experts_TK = _largest(graph, probabilities_TN, min(routing.experts_per_token, experts))
    weights_TK = graph.node("Mul", graph.node("Max", weights_TK, float32(graph, 0.0)), float32(graph, routing.scale))
    return Selected(experts_TK, weights_TK)


def _of_best_groups(graph: Graph, routing: SigmoidTopK | GroupedTopK, choice_TN: str, judged_by: int) -> str:
    """Return the choice scores [T, N] with −∞ for experts whose group is not among the token's best."""
    in_best_TN = _in_best_groups(graph, routing, choice_TN, judged_by)
    return graph.node("Where", in_best_TN, choice_TN, float32(graph, -np.inf))


def _in_best_groups(graph: Graph, routing: SigmoidTopK | GroupedTopK, choice_TN: str, judged_by: int) -> str:
    """Return bool [T, N]: whether the expert's group is among the token's best."""
    groups = [group for group in routing.groups if group]
    scores_TG = graph.node("Concat", *(_group_score(graph, choice_TN, group, judged_by) for group in groups), axis=1)
    _, best = _largest(graph, scores_TG, min(routing.groups_per_token, len(groups)))
    zeros_TG = graph.node("ConstantOfShape", graph.node("Shape", scores_TG))
    ones = graph.node("Add", graph.node("ConstantOfShape", graph.node("Shape", best)), float32(graph, 1.0))
    best_TG = graph.node("ScatterElements", zeros_TG, best, ones, axis=1)
    group_of = {expert: index for index, group in enumerate(groups) for expert in group}
    best_TN = graph.node("Gather", best_TG, graph.integers(*(group_of[expert] for expert in sorted(group_of))), axis=1)
    return graph.node("Greater", best_TN, float32(graph, 0.5))


def _group_score(graph: Graph, choice_TN: str, group: tuple[int, ...], judged_by: int) -> str:
    """Return the sum of the best scores in a group, [T, 1]."""
    own_TM = graph.node("Gather", choice_TN, graph.integers(*group), axis=1)
    return _sum(graph, _largest(graph, own_TM, min(judged_by, len(group)))[0])


def _skipping(graph: Graph, routing: Skipping, logits_TN: str, experts: int, x_TD: str | None) -> Selected:
    base = select(graph, routing.base, logits_TN, experts)
    gamma1_J = routing.gamma1_K.tolist()
    if routing.threshold == 0 or len(gamma1_J) < routing.keep:
        return base
    first, rest = ((graph.integers(begin), graph.integers(end), graph.integers(1)) for begin, end in ((0, 1), (1, _END)))
    place_TJ = graph.node("Mul", graph.node("Slice", base.experts_TS, *first), graph.integers(experts))
    place_TJ = graph.node("Add", place_TJ, graph.node("Slice", base.experts_TS, *rest))
    gamma2_TJ = graph.node("Gather", float32(graph, routing.gamma2_NN.flatten().tolist()), place_TJ)
    # A slot that is never skipped has the threshold zero, and no weight is below it.
    scaled_J = [routing.threshold * gamma if slot >= routing.keep else 0.0 for slot, gamma in enumerate(gamma1_J, start=1)]
    gamma_TJ = graph.node("Mul", gamma2_TJ, float32(graph, scaled_J))
    if routing.importance_1 is not None:
        assert x_TD is not None, "the rule reads the tokens"
        norm_T1 = _sum(graph, graph.node("Abs", cast(graph, x_TD, graph.element_type, FLOAT)))
        protected_T1 = graph.node("Greater", norm_T1, float32(graph, routing.importance_1.tolist()))
        gamma_TJ = graph.node("Where", protected_T1, float32(graph, 0.0), gamma_TJ)
    least_TJ = graph.node("Mul", gamma_TJ, graph.node("Slice", base.weights_TS, *first))
    rest_TJ = graph.node("Slice", base.weights_TS, *rest)
    left_TJ = graph.node("Where", graph.node("Less", rest_TJ, least_TJ), float32(graph, 0.0), rest_TJ)
    left_TS = graph.node("Concat", graph.node("Slice", base.weights_TS, *first), left_TJ, axis=1)
    if routing.normalise:
        kept = graph.node("Div", _sum(graph, base.weights_TS), _sum(graph, left_TS))
        left_TS = graph.node("Mul", left_TS, kept)
    return Selected(base.experts_TS, left_TS)


SELECTIONS: dict[type, Callable[[Graph, Any, str, int], Selected]] = {
    TopK: _top_k,
    SigmoidTopK: _sigmoid_top_k,
    GroupedTopK: _grouped_top_k,
    BiasedTopK: _biased_top_k,
    SparseMixer: _sparse_mixer,
}


def _largest(graph: Graph, values: str, count: int) -> tuple[str, str]:
    """Return the largest values of each row, in descending order, and their indices."""
    found, indices = graph.nodes("TopK", values, graph.integers(count), outputs=["", ""], axis=-1)
    return found, indices


def _sum(graph: Graph, values: str) -> str:
    return graph.node("ReduceSum", values, graph.integers(-1), keepdims=1)
