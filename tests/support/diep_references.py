"""Gradients of DiEP's scores: those of a step of the search, and those of a whole model of transformers by autograd."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from compress.methods.diep import DiepState, SearchInputs, full_hidden_states, gradients, new_state
from compress.options.prune import DiepOptions
from engine.adapted.adapted_checkpoint import AdaptedCheckpoint
from engine.adapted.expert_layers import replaced_forwards
from engine.passes.layerwise import AnyDecoder
from engine.passes.memory_budget import MemoryBudget

RELAXATIONS = ("paper", "routed", "gated")


def options_of(relaxation: str) -> DiepOptions:
    """Return the options of a search whose loss has both parts, without the penalty on gates."""
    return DiepOptions(relaxation, reconstruction_weight=0.1, pressure=0.0).filled()


def some_state(counts: tuple[int, ...], options: DiepOptions) -> DiepState:
    """Return scores that differ from the start of the search. counts: of the experts of each layer."""
    generator = torch.Generator().manual_seed(2)
    state = new_state([0.3 * torch.randn(count, generator=generator) for count in counts], options)
    state.betas = [torch.tensor(0.8 + 0.3 * layer, requires_grad=True) for layer in range(len(counts))]
    return state


def gradients_of_steps(
    decoder: AnyDecoder, tokens_SL: Tensor, relaxation: str, budget: MemoryBudget
) -> tuple[Tensor, Tensor]:
    """Return the losses of a step of α and of one of β, [2], and the gradients of all scores, one after the other."""
    options, rows = options_of(relaxation), list(reversed(range(len(tokens_SL))))
    return gradients_at(some_state(decoder.config.experts_per_layer, options), decoder, tokens_SL, rows, options, budget)


def gradients_at(
    state: DiepState, decoder: AnyDecoder, tokens_SL: Tensor, rows: list[int], options: DiepOptions, budget: MemoryBudget
) -> tuple[Tensor, Tensor]:
    """Return what `gradients_of_steps` returns, at these scores and over these sequences."""
    with full_hidden_states(decoder, tokens_SL, budget=budget) as full:
        inputs = SearchInputs(decoder, tokens_SL, full, options, budget)
        losses = [gradients(inputs, rows, state, is_alpha=True)]
        grads = [alpha.grad.clone() for alpha in state.alphas]
        losses.append(gradients(inputs, rows, state, is_alpha=False))
        grads += [beta.grad.clone()[None] for beta in state.betas]
    return torch.tensor(losses), torch.cat(grads)


def gradients_of_whole_model(
    model: Any, checkpoint: AdaptedCheckpoint, tokens_SL: Tensor, relaxation: str
) -> tuple[Tensor, Tensor]:
    """Return the loss and the gradients of all scores, straight from the definitions."""
    seen: list[Tensor] = []
    options = options_of(relaxation)
    state = some_state(checkpoint.config.experts_per_layer, options)
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    with torch.no_grad():
        model(input_ids=tokens_SL, use_cache=False)
    with _relaxed(model, checkpoint, relaxation, state), torch.enable_grad():
        logits_SLV = model(input_ids=tokens_SL, use_cache=False).logits
        entropy = F.cross_entropy(logits_SLV[:, :-1].flatten(0, 1), tokens_SL[:, 1:].flatten())
        norms_S = (seen[1] - seen[0]).square().sum((1, 2)).sqrt()
        loss = entropy + options.reconstruction_weight * norms_S.mean()
        loss.backward()
    handle.remove()
    return loss.detach(), torch.cat([*(each.grad for each in state.alphas), *(each.grad[None] for each in state.betas)])


@contextmanager
def _relaxed(model: Any, checkpoint: AdaptedCheckpoint, relaxation: str, state: DiepState) -> Iterator[None]:
    """Relax the layers of a whole model of transformers during the body."""
    with ExitStack() as stack:
        for layer, alpha_N, beta in zip(checkpoint.found.experts, state.alphas, state.betas, strict=True):
            experts, router = model.get_submodule(layer.experts), model.get_submodule(layer.router)
            place = f"{checkpoint.found.layers}.{layer.index}."
            further = max(axis.further for name, axis in checkpoint.count_key.axes.items() if name.startswith(place))
            modules = {experts: partial(_experts, relaxation, experts, alpha_N, beta)}
            if relaxation == "routed":
                modules[router] = partial(_router, router, F.pad(alpha_N, (0, further)))
            stack.enter_context(replaced_forwards(modules))
        yield


def _experts(
    relaxation: str, own: Any, alpha_N: Tensor, beta: Tensor, hidden: Tensor, indices: Tensor, weights: Tensor
) -> Any:
    forward, count = type(own).forward.__wrapped__, len(alpha_N)
    if relaxation == "paper":
        tokens = hidden.reshape(-1, hidden.shape[-1]).shape[0]
        shares_TN = (beta * alpha_N.softmax(0)).expand(tokens, -1).to(weights.dtype)
        return forward(own, hidden, torch.arange(count).expand(tokens, -1), shares_TN)
    is_empty = (indices < 0) | (indices >= count)
    gates_N = torch.sigmoid(alpha_N + 2.0) if relaxation == "gated" else torch.ones(count)
    factors = gates_N[indices.clamp(0, count - 1)].masked_fill(is_empty, 0.0)
    return forward(own, hidden, indices, beta * weights * factors)


class _Shifted(TorchFunctionMode):
    """Adds numbers to the router's first product with an entry for each expert."""

    def __init__(self, shift_N: Tensor) -> None:
        super().__init__()
        self.shift_N, self.is_done = shift_N, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        products = (F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__)
        if not self.is_done and func in products and made.shape[-1] == len(self.shift_N):
            self.is_done, made = True, made + self.shift_N
        return made


def _router(own: Any, shift_N: Tensor, *given: Any, **options: Any) -> Any:
    with _Shifted(shift_N) as mode:
        made = type(own).forward(own, *given, **options)
    assert mode.is_done, "the router's logits are no product of its input"
    return made
