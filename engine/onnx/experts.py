"""The MoE block as ONNX nodes, in two forms that compute only the experts chosen by a token.

The first form uses onnxruntime's mixture operators. com.microsoft::MoE computes the softmax of its logits, keeps the k
largest values and rescales them to sum to one (without the rescaling, its output may silently be zero: onnxruntime
issue 33866). A Routing with this rule needs nothing else. For any other Routing, the operator receives the logarithms
of the weights, and its output is multiplied by the sum of the weights. Experts of weight zero are not computed.

The second form uses standard operators only: each expert is a branch that is executed if a token chose it. The branch
gathers its tokens, and its output is scattered to their rows.

In the second form, experts keep their different widths. The first form stacks experts, so narrower ones are filled up with
hidden units that are zero, which add nothing.

Shape suffixes: B batch, L new positions, T tokens (B·L), D hidden, F expert width, N routed experts of the layer, S
slots, R tokens of one expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.decoder.routing import Routing, Skipping, TopK
from engine.families.experts import DOWN, DOWN_BIAS, GATE, GATE_BIAS, UP, UP_BIAS
from engine.families.layer_config import ClampedSwiglu, MoeConfig
from engine.families.tensor_names import (
    block_prefix,
    dense_tensor,
    expert_parts,
    expert_tensor,
    gate_hidden_tensor,
    logit_bias_tensor,
    router_tensor,
    shared_gate_tensor,
    shared_tensor,
)
from engine.kernels.stored.quantized_weight import QuantizedWeight
from engine.onnx.graph import FLOAT, INT64, MICROSOFT, Graph
from engine.onnx.layers import ROUNDED_ACTIVATIONS, Parts, cast, float32, in_turns
from engine.onnx.quantize import block_size
from engine.onnx.routing import Selected, expert_weights, select

ROUTER_WEIGHTS = 14
"""Index of the QMoE input with the weights by which the experts' outputs are multiplied."""
NOT_CHOSEN = -6e4
"""Replacement of log 0 that float16 can represent and whose exponential is zero."""


def feed_forward(parts: Parts, layer: int, x_BLD: str, routing: Routing | None) -> str:
    """Add the feed-forward block, [B, L, D] to [B, L, D]. `routing`: the layer's Routing; None for a dense layer."""
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
    logits_TN = _router_logits(parts, layer, moe, x_TD)
    form = _standard if parts.portable else _mixture if parts.bits is None else _quantised_mixture
    return form(parts, layer, moe, x_TD, logits_TN, routing)


def _selected(parts: Parts, layer: int, moe: MoeConfig, x_TD: str, logits_TN: str, routing: Routing) -> Selected:
    """Add the Routing's nodes; for adaptive skipping, record the number of empty slots."""
    graph = parts.graph
    selected = select(graph, routing, logits_TN, moe.experts, x_TD)
    if isinstance(routing, Skipping):
        empty_TS = graph.node("Cast", graph.node("Equal", selected.weights_TS, float32(graph, 0.0)), to=INT64)
        parts.skipped[layer] = graph.node("ReduceSum", empty_TS, graph.integers(1), keepdims=1)
    return selected


def _router_logits(parts: Parts, layer: int, moe: MoeConfig, x_TD: str) -> str:
    """Return the router logits, [T, N] in float32."""
    row, graph = parts.config.architecture, parts.graph
    if moe.gate_network_width:
        x_TD = graph.node("Tanh", parts.linear(x_TD, gate_hidden_tensor(row, layer), exact=True))
    logits_TN = parts.linear(x_TD, router_tensor(row, layer), logit_bias_tensor(row, layer), exact=True)
    return cast(graph, logits_TN, graph.element_type, FLOAT)


def _shared(parts: Parts, layer: int, x_TD: str) -> str:
    """Add the shared expert, scaled by its gate if it has one."""
    row = parts.config.architecture
    y_TD = parts.feed_forward(x_TD, [shared_tensor(row, layer, p) for p in range(3)])
    if (name := shared_gate_tensor(row, layer)) is None:
        return y_TD
    return parts.graph.node("Mul", parts.graph.node("Sigmoid", parts.linear(x_TD, name, exact=True)), y_TD)


def _mixture(parts: Parts, layer: int, moe: MoeConfig, x_TD: str, logits_TN: str, routing: Routing) -> str:
    """Return the output [T, D] of one com.microsoft::MoE node."""
    graph = parts.graph
    logits_TN, total_T1 = _as_softmax(parts, layer, moe, x_TD, logits_TN, routing)
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


def _clamp(moe: MoeConfig) -> ClampedSwiglu | None:
    assert moe.swiglu is None or isinstance(moe.swiglu, ClampedSwiglu), "families with other activations are refused"
    return moe.swiglu


def _swiglu(moe: MoeConfig) -> dict[str, Any]:
    """Return the attributes of a mixture for G · σ(α·G) · (U + β), with interleaved rows of both projections."""
    if (clamp := _clamp(moe)) is None:
        values = {"activation_alpha": 1.0, "activation_beta": 0.0}
    else:
        values = {"activation_alpha": clamp.alpha, "activation_beta": 1.0, "swiglu_limit": clamp.limit}
    return {"activation_type": "swiglu", "swiglu_fusion": 1} | values


def _as_softmax(
    parts: Parts, layer: int, moe: MoeConfig, x_TD: str, logits_TN: str, routing: Routing
) -> tuple[str, str | None]:
    """Return logits for the MoE operator, and the factor [T, 1] for its output; None for a factor of one.

    The softmax of the k largest logits, multiplied by the factor, gives the Routing's weights.
    """
    graph = parts.graph
    if isinstance(routing, TopK) and routing.normalise:
        return logits_TN, None if routing.scale == 1.0 else float32(graph, [[routing.scale]])
    selected = _selected(parts, layer, moe, x_TD, logits_TN, routing)
    total_T1 = graph.node("ReduceSum", selected.weights_TS, graph.integers(-1), keepdims=1)
    if isinstance(routing, TopK):
        return logits_TN, total_T1
    weights_TN = expert_weights(graph, selected, logits_TN)
    return graph.node("Max", graph.node("Log", weights_TN), float32(graph, NOT_CHOSEN)), total_T1


def _quantised_mixture(parts: Parts, layer: int, moe: MoeConfig, x_TD: str, logits_TN: str, routing: Routing) -> str:
    """Return the output [T, D] of one com.microsoft::QMoE node, which receives the weights of all experts directly."""
    graph, hidden, bits = parts.graph, parts.config.hidden_size, parts.bits
    assert bits is not None
    weights_TN = expert_weights(graph, _selected(parts, layer, moe, x_TD, logits_TN, routing), logits_TN)
    block = block_size(hidden, *moe.widths)
    assert block is not None, f"{hidden} and {sorted(set(moe.widths))} inputs"
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
    """Write all experts' `gate_up` [N, 2F, D] or `down` [N, D, F], expert by expert."""
    hidden, width = parts.config.hidden_size, moe.expert_width
    shape = (moe.experts, hidden, width) if what == "down" else (moe.experts, 2 * width, hidden)
    name = f"{block_prefix(parts.config.architecture, layer)}.experts.{what}"
    return parts.stacked(name, shape, _experts(parts, layer, moe, what))


def _experts(parts: Parts, layer: int, moe: MoeConfig, what: str) -> Iterator[Tensor]:
    """Yield each expert's `gate_up` [2F, D], with interleaved rows of gate and up, or `down` [D, F]."""
    width = moe.expert_width
    for names in _names(parts, layer, moe, what):
        sources = (parts.source(name) for name in names)
        yield in_turns([_filled(source, columns=width) if what == "down" else _filled(source, width) for source in sources])


def _filled(tensor: Tensor, rows: int = 0, columns: int = 0) -> Tensor:
    """Return a tensor with zeros after its rows, or its columns, up to these numbers."""
    after = max(rows - tensor.shape[0], 0)
    if tensor.dim() == 1:
        return F.pad(tensor, (0, after)) if after else tensor
    across = max(columns - tensor.shape[1], 0)
    return F.pad(tensor, (0, across, 0, after)) if after or across else tensor


def _filled_in_bits(weight: QuantizedWeight, rows: int = 0, columns: int = 0) -> QuantizedWeight:
    """Return a low-bit weight with zeros after its rows, or its columns: their scales are zero."""
    columns = max(columns, weight.shape[1])
    packed = _filled(weight.packed_OB, rows, columns * weight.bits // 8)
    scales = _filled(weight.scales_OC, rows, columns // weight.group_size)
    return QuantizedWeight(packed, scales, weight.bits, columns)


def _names(parts: Parts, layer: int, moe: MoeConfig, what: str) -> Iterator[list[str]]:
    """Yield the names of each expert's weights in a stack."""
    row, projections = parts.config.architecture, (DOWN,) if what == "down" else (GATE, UP)
    for expert in range(moe.experts):
        yield [expert_tensor(row, layer, expert, projection) for projection in projections]


def _stacked_biases(parts: Parts, layer: int, moe: MoeConfig, what: str) -> str:
    """Write all experts' biases of these products, [N, 2F] or [N, D]; return an empty name if experts have none."""
    row = parts.config.architecture
    if DOWN_BIAS not in expert_parts(row):
        return ""

    def made() -> Tensor:
        each = [
            [parts.source(expert_tensor(row, layer, expert, part)) for part in (GATE_BIAS, UP_BIAS, DOWN_BIAS)]
            for expert in range(moe.experts)
        ]
        if what == "down":
            return torch.stack([down for _, _, down in each])
        filled = [(_filled(gate, moe.expert_width), _filled(up, moe.expert_width)) for gate, up, _ in each]
        return torch.stack([torch.stack(both, dim=1).flatten() for both in filled])

    return parts.graph.weight(f"{block_prefix(row, layer)}.experts.{what}.biases", made)


def _stacked_in_bits(parts: Parts, layer: int, moe: MoeConfig, what: str, bits: int, block: int) -> tuple[str, str]:
    """Write all experts' low-bit weights; return the names of values and scales."""
    row, hidden, width = parts.config.architecture, parts.config.hidden_size, moe.expert_width
    shape = (moe.experts, hidden, width) if what == "down" else (moe.experts, 2 * width, hidden)
    name = f"{block_prefix(row, layer)}.experts.{what}"
    size = {"columns": width} if what == "down" else {"rows": width}
    rounded = (
        [_filled_in_bits(parts.rounded(weight, bits, block), **size) for weight in names]
        for names in _names(parts, layer, moe, what)
    )
    return parts.stacked_in_bits(name, shape, rounded, bits)


def _standard(parts: Parts, layer: int, moe: MoeConfig, x_TD: str, logits_TN: str, routing: Routing) -> str:
    """Return the output [T, D] with standard operators only."""
    graph = parts.graph
    weights_TN = expert_weights(graph, _selected(parts, layer, moe, x_TD, logits_TN, routing), logits_TN)
    sizes = moe.experts, parts.config.hidden_size
    return branches(graph, x_TD, weights_TN, sizes, partial(_expert, parts, layer, moe))


def _expert(parts: Parts, layer: int, moe: MoeConfig, expert: int, x_RD: str) -> str:
    row = parts.config.architecture
    tensors = [expert_tensor(row, layer, expert, part) for part in expert_parts(row)]
    return parts.feed_forward(x_RD, tensors[:3], biases=tensors[3:], clamp=_clamp(moe))


def branches(graph: Graph, x_TD: str, weights_TN: str, sizes: tuple[int, int], run: Callable[[int, str], str]) -> str:
    """Return the output [T, D] with standard operators: one branch per expert computes `run` on its tokens [R, D].

    The results are multiplied by the tokens' weights. `sizes`: N and D.
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
    zeros_TD = graph.node("ConstantOfShape", graph.node("Shape", x_TD))
    rows_R1, outputs_RD = graph.node("Concat", *rows, axis=0), graph.node("Concat", *outputs, axis=0)
    # onnxruntime's ScatterND has no kernel that adds float16 on a CPU.
    outputs_RD = cast(graph, outputs_RD, graph.element_type, FLOAT)
    sums_TD = graph.node("ScatterND", zeros_TD, rows_R1, outputs_RD, reduction="add")
    return cast(graph, sums_TD, FLOAT, graph.element_type)


def _expert_tokens(graph: Graph, expert: int, x_TD: str, weights_TN: str, run: Callable[[int, str], str]) -> list[str]:
    """Return the tokens that chose an expert, [R, 1], and the expert's weighted output for them, [R, D]."""
    weights_T = graph.node("Gather", weights_TN, graph.integer(expert), axis=1)
    rows_R1 = graph.node("Transpose", graph.node("NonZero", weights_T), perm=[1, 0])
    weights_R1 = graph.node("Unsqueeze", graph.node("GatherND", weights_T, rows_R1), graph.integers(1))
    output_RD = run(expert, graph.node("GatherND", x_TD, rows_R1))
    return [rows_R1, graph.node("Mul", output_RD, cast(graph, weights_R1, FLOAT, graph.element_type))]
