"""Gradients of whole models of transformers by autograd, with gates on the weights of the routed experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.transformers_models.adapted_checkpoint import AdaptedCheckpoint
from engine.transformers_models.expert_layers import replaced_forwards


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
