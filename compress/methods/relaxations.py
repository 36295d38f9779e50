"""DiEP's relaxed layers (Bai et al.).

A relaxed layer depends smoothly on one score α for each expert and one β for the layer, so that both can be trained. With
w the router's own weights:

- `paper`: y = β Σ_i ᾱ_i FFN_i(x), ᾱ = softmax(α): every expert runs on every token (DiEP eq. 6).
- `routed`: the model's own top-k of the logits ζ + α, times β. At α = 0, β = 1 it is the full model.
- `gated`: y = β Σ_{i ∈ top-k} w_i · σ(α_i + 2) · FFN_i(x), with a pressure on the mean gate in the loss.

The last two are not the paper's. Shape suffixes: N experts of a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.decoder.routing import Gated, MixedExperts, Routing, ShiftedLogits


@dataclass(frozen=True)
class Relaxation:
    """One row of RELAXATIONS."""

    routing: Callable[[Routing, Tensor, Tensor], Routing]
    """(the model's own rule, α_N, β) to the relaxed layer's Routing."""
    is_shift_invariant: bool = True
    """A constant added to all α of a layer changes nothing, so their mean is kept at zero."""
    mixes_all: bool = False
    """Every expert runs on every token, and not only those that the router chooses."""


def gate(alpha_N: Tensor) -> Tensor:
    """The gate of the `gated` relaxation: σ(α + 2), 0.88 at α = 0."""
    return torch.sigmoid(alpha_N + 2.0)


RELAXATIONS: dict[str, Relaxation] = {
    "paper": Relaxation(lambda base, alpha, beta: MixedExperts(alpha, beta), mixes_all=True),
    "routed": Relaxation(ShiftedLogits),
    "gated": Relaxation(lambda base, alpha, beta: Gated(base, gate(alpha), beta), is_shift_invariant=False),
}
"""One row for each row of SEARCH_DEFAULTS (compress/options/prune.py), which has their numbers."""
