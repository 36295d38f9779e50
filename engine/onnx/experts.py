"""The MoE block as ONNX nodes, in two forms that compute only the experts that a token chose.

The mixture operators of onnxruntime: com.microsoft::MoE takes the softmax of the logits that it is given, keeps the k
largest and rescales them to sum to one (without the rescaling, onnxruntime issue 33866, its output may silently be zero). A
Routing that does the same needs nothing else; of any other it is given the logarithms of the weights, and its output is
multiplied by what they add up to. Experts of weight zero are not computed.

Standard operators only: each expert is a branch that is taken where a token chose it; there it gathers its tokens, and its
output is put where they were.

Shape suffixes: B batch, L new positions, T tokens (B·L), D hidden, F expert width, N routed experts of the layer, S slots,
R tokens of one expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.architectures import (
    DOWN,
    DOWN_BIAS,
    GATE,
    GATE_BIAS,
    UP,
    UP_BIAS,
    MoeConfig,
    dense_tensor,
    expert_parts,
    expert_tensor,
    gate_hidden_tensor,
    logit_bias_tensor,
    router_tensor,
    shared_gate_tensor,
    shared_tensor,
)
from engine.decoder.routing import Routing, Skipping, TopK
from engine.onnx.graph import FLOAT, INT64, MICROSOFT, Graph
from engine.onnx.layers import ROUNDED_ACTIVATIONS, Parts, cast, float32, in_turns
from engine.onnx.quantize import block_size
from engine.onnx.routing import Selected, expert_weights, select

ROUTER_WEIGHTS = 14
"""Place among QMoE's inputs of the weights that outputs are multiplied by."""
NOT_CHOSEN = -6e4
"""In place of log 0: its exponential is zero, and float16 can hold it."""


def feed_forward(parts: Parts, layer: int, x_BLD: str, routing: Routing | None) -> str:
    """[B, L, D] to [B, L, D]; `routing` is the layer's rule, None where it is dense."""
    moe, graph = parts.config.layers[layer].moe, parts.graph
    x_TD = graph.node("Reshape", x_BLD, graph.integers(-1, parts.config.hidden_size))
    if moe is None or routing is None:
        y_TD = parts.feed_forward(x_TD, [dense_tensor(layer, projection) for projection in range(3)])
    else:
        y_TD = _routed(parts, layer, moe, x_TD, routing)
        y_TD = graph.node("Add", y_TD, _shared(parts, layer, x_TD)) if moe.shared_width else y_TD
    return graph.node("Reshape", y_TD, graph.node("Shape", x_BLD))


def _routed(parts: Parts, layer: int, moe: MoeConfig, x_TD: str, routing: Routing) -> str:
    graph = parts.graph
    if moe.experts == 1 and isinstance(routing, TopK):
        y_TD = _expert(parts, layer, moe, 0, x_TD)
        return y_TD if routing.scale == 1.0 else graph.node("Mul", y_TD, graph.number(routing.scale))
    logits_TN = _router_logits(parts, layer, x_TD)
    form = _standard if parts.portable else _mixture if parts.bits is None else _quantised_mixture
    return form(parts, layer, moe, x_TD, logits_TN, routing)


def _selected(parts: Parts, layer: int, moe: MoeConfig, logits_TN: str, routing: Routing) -> Selected:
    """The Routing's choice; how many slots a rule that skips left empty is noted."""
    graph = parts.graph
    selected = select(graph, routing, logits_TN, moe.experts)
    if isinstance(routing, Skipping):
        empty_TS = graph.node("Cast", graph.node("Equal", selected.weights_TS, float32(graph, 0.0)), to=INT64)
        parts.skipped[layer] = graph.node("ReduceSum", empty_TS, graph.integers(1), keepdims=1)
    return selected


def _router_logits(parts: Parts, layer: int, x_TD: str) -> str:
    """[T, N] in float32."""
    row, graph = parts.config.architecture, parts.graph
    if row.gate_network is not None:
        x_TD = graph.node("Tanh", parts.linear(x_TD, gate_hidden_tensor(row, layer), exact=True))
    bias = None if row.logit_bias is None else logit_bias_tensor(row, layer)
    return cast(graph, parts.linear(x_TD, router_tensor(row, layer), bias, exact=True), graph.element_type, FLOAT)


def _shared(parts: Parts, layer: int, x_TD: str) -> str:
    """The shared expert, scaled by its gate where it has one."""
    row = parts.config.architecture
    y_TD = parts.feed_forward(x_TD, [shared_tensor(row, layer, p) for p in range(3)])
    if (name := shared_gate_tensor(row, layer)) is None:
        return y_TD
    return parts.graph.node("Mul", parts.graph.node("Sigmoid", parts.linear(x_TD, name, exact=True)), y_TD)


def _mixture(parts: Parts, layer: int, moe: MoeConfig, x_TD: str, logits_TN: str, routing: Routing) -> str:
    """[T, D] by one com.microsoft::MoE node."""
    graph = parts.graph
    logits_TN, total_T1 = _as_softmax(parts, layer, moe, logits_TN, routing)
    y_TD = graph.node(
        "MoE",
        x_TD,
        cast(graph, logits_TN, FLOAT, graph.element_type),
        _stacked(parts, layer, moe, "gate_up"),
        _stacked_biases(parts, layer, moe, "gate_up"),
        _stacked(parts, layer, moe, "down"),
        _stacked_biases(parts, layer, moe, "down"),
        domain=MICROSOFT,
        k=moe.experts_per_token,
        normalize_routing_weights=1,
        **_swiglu(moe),
    )
    return y_TD if total_T1 is None else graph.node("Mul", y_TD, cast(graph, total_T1, FLOAT, graph.element_type))


def _swiglu(moe: MoeConfig) -> dict[str, Any]:
    """The attributes of a mixture for G · σ(α·G) · (U + β), with the rows of both projections in turns."""
    if moe.swiglu is None:
        values = {"activation_alpha": 1.0, "activation_beta": 0.0}
    else:
        values = {"activation_alpha": moe.swiglu.alpha, "activation_beta": 1.0, "swiglu_limit": moe.swiglu.limit}
    return {"activation_type": "swiglu", "swiglu_fusion": 1} | values


def _as_softmax(parts: Parts, layer: int, moe: MoeConfig, logits_TN: str, routing: Routing) -> tuple[str, str | None]:
    """Logits whose k largest, as a softmax among themselves, are the Routing's weights but for a factor; that factor.

    The factor is [T, 1], or None where it is one.
    """
    graph = parts.graph
    if isinstance(routing, TopK) and routing.normalise:
        return logits_TN, None if routing.scale == 1.0 else float32(graph, [[routing.scale]])
    selected = _selected(parts, layer, moe, logits_TN, routing)
    total_T1 = graph.node("ReduceSum", selected.weights_TS, graph.integers(-1), keepdims=1)
    if isinstance(routing, TopK):
        return logits_TN, total_T1
    weights_TN = expert_weights(graph, selected, logits_TN)
    return graph.node("Max", graph.node("Log", weights_TN), float32(graph, NOT_CHOSEN)), total_T1


def _quantised_mixture(parts: Parts, layer: int, moe: MoeConfig, x_TD: str, logits_TN: str, routing: Routing) -> str:
    """[T, D] by one com.microsoft::QMoE node, which takes the weights of all experts as they are."""
    graph, hidden, bits = parts.graph, parts.config.hidden_size, parts.bits
    assert bits is not None
    weights_TN = expert_weights(graph, _selected(parts, layer, moe, logits_TN, routing), logits_TN)
    block = block_size(hidden, moe.expert_width)
    assert block is not None, f"{hidden} and {moe.expert_width} inputs"
    gate_up, gate_up_scales = _stacked_in_bits(parts, layer, moe, "gate_up", bits, block)
    down, down_scales = _stacked_in_bits(parts, layer, moe, "down", bits, block)
    return graph.node(
        "QMoE",
        *(x_TD, weights_TN, gate_up, gate_up_scales, _stacked_biases(parts, layer, moe, "gate_up")),
        *(down, down_scales, _stacked_biases(parts, layer, moe, "down")),
        *[""] * (ROUTER_WEIGHTS - 8),
        weights_TN,
        domain=MICROSOFT,
        k=moe.experts_per_token,
        normalize_routing_weights=0,
        expert_weight_bits=bits,
        block_size=block,
        accuracy_level=ROUNDED_ACTIVATIONS,
        **_swiglu(moe),
    )


def _stacked(parts: Parts, layer: int, moe: MoeConfig, what: str) -> str:
    """All experts' `gate_up` [N, 2F, D] or `down` [N, D, F], written expert by expert."""
    hidden, width = parts.config.hidden_size, moe.expert_width
    shape = (moe.experts, hidden, width) if what == "down" else (moe.experts, 2 * width, hidden)
    name = f"{parts.config.architecture.block.format(layer=layer)}.experts.{what}"
    return parts.stacked(name, shape, _experts(parts, layer, moe, what))


def _experts(parts: Parts, layer: int, moe: MoeConfig, what: str) -> Iterator[Tensor]:
    """Each expert's `gate_up` [2F, D], rows of gate and up in turns, or `down` [D, F]."""
    for names in _names(parts, layer, moe, what):
        yield in_turns([parts.source(name) for name in names])


def _names(parts: Parts, layer: int, moe: MoeConfig, what: str) -> Iterator[list[str]]:
    """Of each expert's weights in them."""
    row, projections = parts.config.architecture, (DOWN,) if what == "down" else (GATE, UP)
    for expert in range(moe.experts):
        yield [expert_tensor(row, layer, expert, projection) for projection in projections]


def _stacked_biases(parts: Parts, layer: int, moe: MoeConfig, what: str) -> str:
    """Of the same products, [N, 2F] or [N, D]; nothing where experts have none."""
    row = parts.config.architecture
    if not row.expert_biases:
        return ""

    def made() -> Tensor:
        each = [
            [parts.source(expert_tensor(row, layer, expert, part)) for part in (GATE_BIAS, UP_BIAS, DOWN_BIAS)]
            for expert in range(moe.experts)
        ]
        if what == "down":
            return torch.stack([down for _, _, down in each])
        return torch.stack([torch.stack((gate, up), dim=1).flatten() for gate, up, _ in each])

    return parts.graph.weight(f"{row.block.format(layer=layer)}.experts.{what}.biases", made)


def _stacked_in_bits(parts: Parts, layer: int, moe: MoeConfig, what: str, bits: int, block: int) -> tuple[str, str]:
    """The same in few bits: values and scales."""
    row, hidden, width = parts.config.architecture, parts.config.hidden_size, moe.expert_width
    shape = (moe.experts, hidden, width) if what == "down" else (moe.experts, 2 * width, hidden)
    name = f"{row.block.format(layer=layer)}.experts.{what}"
    rounded = ([parts.rounded(weight, bits, block) for weight in names] for names in _names(parts, layer, moe, what))
    return parts.stacked_in_bits(name, shape, rounded, bits)


def _standard(parts: Parts, layer: int, moe: MoeConfig, x_TD: str, logits_TN: str, routing: Routing) -> str:
    """[T, D] by standard operators."""
    graph = parts.graph
    weights_TN = expert_weights(graph, _selected(parts, layer, moe, logits_TN, routing), logits_TN)
    sizes = moe.experts, parts.config.hidden_size
    return branches(graph, x_TD, weights_TN, sizes, partial(_expert, parts, layer, moe))


def _expert(parts: Parts, layer: int, moe: MoeConfig, expert: int, x_RD: str) -> str:
    row = parts.config.architecture
    tensors = [expert_tensor(row, layer, expert, part) for part in expert_parts(row)]
    return parts.feed_forward(x_RD, tensors[:3], biases=tensors[3:], clamp=moe.swiglu)


def branches(graph: Graph, x_TD: str, weights_TN: str, sizes: tuple[int, int], run: Callable[[int, str], str]) -> str:
    """[T, D] by standard operators: what `run` makes of each expert's tokens [R, D], times their weights, a branch for each.

    `sizes`: N and D.
    """
    experts, hidden = sizes
    largest_N = graph.node("ReduceMax", weights_TN, axes=[0], keepdims=0)
    used_N = graph.nodes("Split", graph.node("Greater", largest_N, float32(graph, 0.0)), outputs=[""] * experts, axis=0)
    none = np.zeros((0, 1), dtype=np.int64), np.zeros((0, hidden), dtype=graph.numpy_dtype)
    rows, outputs = [], []
    for expert, used in enumerate(used_N):
        with graph.scope(f"expert.{expert}"):
            rows_R1, outputs_RD = graph.either(
                used,
                partial(_expert_tokens, graph, expert, x_TD, weights_TN, run),
                lambda: [graph.node("Identity", graph.constant(each)) for each in none],
            )
            rows.append(rows_R1)
            outputs.append(outputs_RD)
    zeros_TD = cast(graph, graph.node("ConstantOfShape", graph.node("Shape", x_TD)), FLOAT, graph.element_type)
    rows_R1, outputs_RD = graph.node("Concat", *rows, axis=0), graph.node("Concat", *outputs, axis=0)
    return graph.node("ScatterND", zeros_TD, rows_R1, outputs_RD, reduction="add")


def _expert_tokens(graph: Graph, expert: int, x_TD: str, weights_TN: str, run: Callable[[int, str], str]) -> list[str]:
    """The tokens that chose an expert, [R, 1], and what it adds to them, [R, D]."""
    weights_T = graph.node("Gather", weights_TN, graph.integer(expert), axis=1)
    rows_R1 = graph.node("Transpose", graph.node("NonZero", weights_T), perm=[1, 0])
    weights_R1 = graph.node("Unsqueeze", graph.node("GatherND", weights_T, rows_R1), graph.integers(1))
    output_RD = run(expert, graph.node("GatherND", x_TD, rows_R1))
    return [rows_R1, graph.node("Mul", output_RD, cast(graph, weights_R1, FLOAT, graph.element_type))]
