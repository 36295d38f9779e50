"""The MoE block: any Routing over a list of SwiGLU experts, on two paths that compute the same function.

`grouped` sorts the slots by expert and runs one product per expert: prefill, calibration and everything that needs
gradients. `sparse` walks the few experts of a few tokens as views, copying nothing: decode. A test holds them equal.

Shape suffixes: T tokens, D hidden, F expert width, S slots, N experts, R real (not skipped) slots.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.linear import linear
from engine.routing import NO_EXPERT, Routing, Selection

ExpertObserver = Callable[[int, Tensor, Tensor], None]

SPARSE_MAX_TOKENS = 4
"""Up to this many tokens the sparse path is taken when no gradient is needed: with more, experts begin to be shared."""


class Expert(nn.Module):
    """One SwiGLU feed-forward network: down(silu(gate·x) ⊙ up·x). Also the dense FFN and the shared expert."""

    def __init__(self, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor) -> None:
        super().__init__()
        self.gate_FD = nn.Parameter(gate_FD, requires_grad=False)
        self.up_FD = nn.Parameter(up_FD, requires_grad=False)
        self.down_DF = nn.Parameter(down_DF, requires_grad=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        """[T, D] to [T, D]."""
        return swiglu(x_TD, self.gate_FD, self.up_FD, self.down_DF)


def swiglu(x_TD: Tensor, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor) -> Tensor:
    """down(silu(gate·x) ⊙ up·x), the FFN of every family here."""
    return linear(F.silu(linear(x_TD, gate_FD)) * linear(x_TD, up_FD), down_DF)


class MoeBlock(nn.Module):
    """Router, routed experts and, where the family has one, the shared expert scaled by its gate.

    `routing` is the layer's rule and may be replaced at any time by another Routing. `observer`, when set, is called
    with (x_TD, logits_TN, selection) on each forward: this is how calibration and reports watch the layer.
    """

    def __init__(
        self,
        router_ND: Tensor,
        experts: list[Expert],
        routing: Routing,
        shared: Expert | None = None,
        shared_gate_1D: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.router_ND = nn.Parameter(router_ND, requires_grad=False)
        self.experts = nn.ModuleList(experts)
        self.routing = routing
        self.shared = shared
        self.shared_gate_1D = None if shared_gate_1D is None else nn.Parameter(shared_gate_1D, requires_grad=False)
        self.observer: Callable[[Tensor, Tensor, Selection], None] | None = None
        self.expert_observer: ExpertObserver | None = None

    def forward(self, x_TD: Tensor) -> Tensor:
        """[T, D] to [T, D]."""
        logits_TN = linear(x_TD, self.router_ND)
        selection = self.routing(logits_TN)
        if self.observer is not None:
            self.observer(x_TD, logits_TN, selection)
        y_TD = route_through(x_TD, selection, self.experts, self.expert_observer)
        if self.shared is not None and self.shared_gate_1D is not None:
            y_TD = y_TD + torch.sigmoid(linear(x_TD, self.shared_gate_1D)) * self.shared(x_TD)
        return y_TD


def route_through(
    x_TD: Tensor, selection: Selection, experts: nn.ModuleList, observer: ExpertObserver | None = None
) -> Tensor:
    """The routed output Σ_slots weight · FFN_expert(x), [T, D]; empty slots cost nothing."""
    if x_TD.shape[0] <= SPARSE_MAX_TOKENS and observer is None and not torch.is_grad_enabled():
        return sparse(x_TD, selection, experts)
    return grouped(x_TD, selection, experts, observer)


def sparse(x_TD: Tensor, selection: Selection, experts: nn.ModuleList) -> Tensor:
    """Token by token, only the chosen experts' weights are touched."""
    weights_TS = selection.weights.to(x_TD.dtype)
    y_TD = torch.zeros_like(x_TD)
    for token, chosen in enumerate(selection.experts.tolist()):
        for slot, expert in enumerate(chosen):
            if expert != NO_EXPERT:
                y_TD[token] += weights_TS[token, slot] * experts[expert](x_TD[token : token + 1])[0]
    return y_TD


def grouped(x_TD: Tensor, selection: Selection, experts: nn.ModuleList, observer: ExpertObserver | None = None) -> Tensor:
    """One product per expert over its tokens.

    Slots are sorted by expert once and the results put back by the inverse permutation: gathers in both directions,
    whose backward is far cheaper than that of a scatter-add into the output.
    """
    tokens, slots = selection.experts.shape
    flat = selection.experts.reshape(-1)
    order = flat.argsort(stable=True)
    empty, *counts = torch.bincount(flat + 1, minlength=len(experts) + 1).tolist()
    order_R = order[empty:]
    pieces = x_TD[order_R // slots].split(counts)
    weights = selection.weights.reshape(-1)[order_R].to(x_TD.dtype).split(counts)
    outputs = [x_TD.new_zeros(empty, x_TD.shape[1])]
    for index, (piece, weight) in enumerate(zip(pieces, weights, strict=True)):
        if piece.shape[0]:
            output = experts[index](piece)
            if observer is not None:
                observer(index, output, weight)
            outputs.append(output * weight[:, None])
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return torch.cat(outputs)[inverse].view(tokens, slots, -1).sum(dim=1)
