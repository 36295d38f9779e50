"""DiEP's relaxed layers, and the options of its search (Bai et al.).

A relaxed layer depends smoothly on one score α for each expert and one β for the layer, so that both can be trained. With
w the router's own weights:

- `paper`: y = β Σ_i ᾱ_i FFN_i(x), ᾱ = softmax(α): every expert runs on every token (DiEP eq. 6).
- `routed`: the model's own top-k of the logits ζ + α, times β. At α = 0, β = 1 it is the full model.
- `gated`: y = β Σ_{i ∈ top-k} w_i · σ(α_i + 2) · FFN_i(x), with a pressure on the mean gate in the loss.

The last two are not the paper's. Shape suffixes: N experts of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from engine.decoder.routing import Gated, MixedExperts, Routing, ShiftedLogits
from engine.errors import OptionError


@dataclass(frozen=True)
class Relaxation:
    """A relaxed layer, and the settings of a search with it."""

    routing: Callable[[Routing, Tensor, Tensor], Routing]
    """(the model's own rule, α_N, β) to the relaxed layer's Routing."""
    learning_rate: float
    start: str
    """α starts at "zero" or from "fisher"."""
    score: str
    """"raw" α·β or "normalised" N·ᾱ·β."""
    is_shift_invariant: bool = True
    """A constant added to all α of a layer changes nothing, so their mean is kept at zero."""
    pressure: float = 0.0
    """μ: weight of the mean gate in the loss, which asks every expert to justify itself."""
    mixes_all: bool = False
    """Every expert runs on every token, and not only those that the router chooses."""


def gate(alpha_N: Tensor) -> Tensor:
    """The gate of the `gated` relaxation: σ(α + 2), 0.88 at α = 0."""
    return torch.sigmoid(alpha_N + 2.0)


RELAXATIONS: dict[str, Relaxation] = {
    "paper": Relaxation(lambda base, alpha, beta: MixedExperts(alpha, beta), 5e-3, "zero", "normalised", mixes_all=True),
    "routed": Relaxation(ShiftedLogits, 5e-3, "zero", "raw"),
    "gated": Relaxation(
        lambda base, alpha, beta: Gated(base, gate(alpha), beta),
        3e-2,
        "fisher",
        "raw",
        is_shift_invariant=False,
        pressure=0.5,
    ),
}


@dataclass(frozen=True)
class DiepOptions:
    """None stands for the relaxation's own default."""

    relaxation: str = "gated"
    epochs: int = 10
    batch_size: int = 16
    learning_rate: float | None = None
    reconstruction_weight: float = 0.01
    """λ."""
    pressure: float | None = None
    """μ."""
    start: str | None = None
    score: str | None = None
    seed: int = 0

    def check(self) -> None:
        """Raise OptionError for a number that no search can use."""
        filled = self.filled()
        for name in ("learning_rate", "reconstruction_weight", "pressure"):
            value = getattr(filled, name)
            if not 0.0 <= value < math.inf:
                raise OptionError(f"{name.replace('_', '-')} is {value}; it must be a number from 0")

    def filled(self) -> DiepOptions:
        """The same with every None replaced."""
        default = RELAXATIONS[self.relaxation]
        return DiepOptions(
            **asdict(self)
            | {
                name: getattr(default, name)
                for name in ("learning_rate", "pressure", "start", "score")
                if getattr(self, name) is None
            }
        )
