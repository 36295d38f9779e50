"""The relaxed layers of DiEP (Bai et al., eq. 6), through which its scores are trained.

A relaxed layer is differentiable in one score α per expert and one score β per layer. With w the router's own weights:

- `paper`: y = β Σ_i ᾱ_i FFN_i(x), ᾱ = softmax(α): every expert runs on every token (DiEP eq. 6).
- `routed`: the model's own top-k of the logits ζ + α, times β. At α = 0, β = 1 it equals the full model.
- `gated`: y = β Σ_{i ∈ top-k} w_i · σ(α_i + 2) · FFN_i(x), with a penalty on the mean gate in the loss.

The last two are not in the paper. Shape suffixes: N experts of a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.options.prune import SEARCH_DEFAULTS
from engine.decoder.routing import Gated, MixedExperts, Routing, ShiftedLogits


@dataclass(frozen=True)
class Relaxation:
    """One row of RELAXATIONS."""

    routing: Callable[[Routing, Tensor, Tensor], Routing]
    """A function from (the model's own Routing, α_N, β) to the relaxed layer's Routing."""
    is_shift_invariant: bool = True
    """Whether a constant added to all α of a layer changes nothing; their mean is then kept at zero."""
    mixes_all: bool = False
    """Whether every expert runs on every token, and not only the experts that the router selects."""


def gate(alpha_N: Tensor) -> Tensor:
    """Return the gate of the `gated` relaxation: σ(α + 2), which is 0.88 at α = 0."""
    return torch.sigmoid(alpha_N + 2.0)


RELAXATIONS: dict[str, Relaxation] = {
    "paper": Relaxation(lambda base, alpha, beta: MixedExperts(alpha, beta), mixes_all=True),
    "routed": Relaxation(ShiftedLogits),
    "gated": Relaxation(lambda base, alpha, beta: Gated(base, gate(alpha), beta), is_shift_invariant=False),
}
"""The relaxed layers; SEARCH_DEFAULTS (compress/options/prune.py) has the default values of each."""
assert tuple(RELAXATIONS) == tuple(SEARCH_DEFAULTS)
