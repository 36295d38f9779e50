"""Gradients of whole models of transformers by autograd, with gates on the weights of the routed experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.adapted.adapted_checkpoint import AdaptedCheckpoint
from engine.adapted.expert_layers import replaced_forwards


@contextmanager
def gates_on(model: Any, checkpoint: AdaptedCheckpoint, gates: dict[int, Tensor]) -> Iterator[None]:
    """Multiply the weight of each routed expert by its gate, [N] by decoder layer index, during the body."""

    def forward(own: Any, gate_N: Tensor, hidden: Tensor, indices: Tensor, weights: Tensor) -> Any:
        is_empty = (indices < 0) | (indices >= len(gate_N))
        factors = gate_N[indices.clamp(0, len(gate_N) - 1)].masked_fill(is_empty, 1.0)
        return type(own).forward.__wrapped__(own, hidden, indices, weights * factors)

    with ExitStack() as stack:
        for layer in checkpoint.found.experts:
            experts = model.get_submodule(layer.experts)
            stack.enter_context(replaced_forwards({experts: partial(forward, experts, gates[layer.index])}))
        yield


def text_gradients(
    model: Any, checkpoint: AdaptedCheckpoint, tokens_SL: Tensor
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Return the sums over sequences of ∂L/∂g and of its squares, [N] by layer, where L is of the text's next tokens."""
    first = {layer.index: torch.zeros(layer.count, dtype=torch.float64) for layer in checkpoint.found.experts}
    second = {layer: zeros.clone() for layer, zeros in first.items()}
    for tokens_L in tokens_SL:
        gates = {layer.index: torch.ones(layer.count, requires_grad=True) for layer in checkpoint.found.experts}
        with gates_on(model, checkpoint, gates), torch.enable_grad():
            logits_LV = model(input_ids=tokens_L[None], use_cache=False).logits[0]
            F.cross_entropy(logits_LV[:-1].float(), tokens_L[1:], reduction="sum").backward()
        for layer, gate_N in gates.items():
            own_N = torch.zeros(len(gate_N)) if gate_N.grad is None else gate_N.grad
            first[layer] += own_N.double()
            second[layer] += own_N.double().square()
    return first, second


def random_units(checkpoint: AdaptedCheckpoint, kept: int) -> dict[int, list[list[int]]]:
    """Return so many hidden units of every expert, ascending, other ones in each, by layer."""
    found: dict[int, list[list[int]]] = {}
    for layer in checkpoint.found.experts:
        generator = torch.Generator().manual_seed(layer.index)
        drawn = [torch.randperm(layer.width, generator=generator)[:kept] for _ in range(layer.count)]
        found[layer.index] = [sorted(own.tolist()) for own in drawn]
    return found


@contextmanager
def without_units(model: Any, checkpoint: AdaptedCheckpoint, kept: dict[int, list[list[int]]]) -> Iterator[None]:
    """Multiply all other hidden units by zero in the columns of the down projections, during the body."""
    before = []
    for layer in checkpoint.found.experts:
        module = model.get_submodule(layer.experts)
        factors_NF = torch.zeros(layer.count, layer.width)
        for row, units in zip(factors_NF, kept[layer.index], strict=True):
            row[units] = 1.0
        before.append((module.down_proj, module.down_proj.data.clone()))
        module.down_proj.data *= factors_NF[:, :, None] if module.is_transposed else factors_NF[:, None]
    try:
        yield
    finally:
        for weight, whole in before:
            weight.data.copy_(whole)


def naive_experts(module: Any, hidden: Tensor, indices: Tensor, weights: Tensor, factors: Any) -> tuple[Tensor, Any]:
    """Return the output of a module's experts, computed one token and slot after the other, and what each slot computes.

    factors: returns a factor of the hidden units of an expert, [F], by expert; called once for each slot. The second result
    has (hidden units [F], weight) of each slot by expert, in the order of the text.
    """
    x_TD, seen = hidden.reshape(-1, hidden.shape[-1]), {expert: [] for expert in range(module.down_proj.shape[0])}
    first = module.gate_up_proj if module.has_gate else module.up_proj
    rows = []
    for x_D, own_S, weight_S in zip(x_TD, indices.reshape(len(x_TD), -1), weights.reshape(len(x_TD), -1), strict=True):
        total_D = torch.zeros_like(x_D)
        for expert, weight in zip(own_S.tolist(), weight_S, strict=True):
            made_P = x_D @ first[expert] if module.is_transposed else first[expert] @ x_D
            if module.has_bias:
                made_P = made_P + (module.gate_up_proj_bias if module.has_gate else module.up_proj_bias)[expert]
            h_F = (module._apply_gate if module.has_gate else module.act_fn)(made_P[None])[0] * factors(expert)
            seen[expert].append((h_F, weight))
            y_D = h_F @ module.down_proj[expert] if module.is_transposed else module.down_proj[expert] @ h_F
            total_D = total_D + weight * (y_D + module.down_proj_bias[expert] if module.has_bias else y_D)
        rows.append(total_D)
    return torch.stack(rows).view_as(hidden), seen


@contextmanager
def naively(model: Any, checkpoint: AdaptedCheckpoint, factors: Any = None) -> Iterator[dict[int, Any]]:
    """Let all experts run by `naive_experts` during the body; yield what their slots compute, by layer.

    factors: returns a factor of hidden units, [F], by layer and expert; None for ones.
    """
    found: dict[int, Any] = {}

    def forward(index: int, module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        own = partial(factors, index) if factors is not None else lambda expert: 1.0
        made, found[index] = naive_experts(module, hidden, top_k_index, top_k_weights, own)
        return made

    modules = {layer.index: model.get_submodule(layer.experts) for layer in checkpoint.found.experts}
    with replaced_forwards({module: partial(forward, index, module) for index, module in modules.items()}):
        yield found
