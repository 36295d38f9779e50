"""What follows the layers, as parts of a family: the head, and tensors for multi-token prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.families.values import natural


@dataclass(frozen=True)
class Head:
    """The matrix that makes logits of hidden states."""

    bias: bool | str = False
    """True, False, or the config key that says."""


@dataclass(frozen=True)
class PredictionLayers:
    """Layers for multi-token prediction, which follow the last one in a checkpoint and are not read."""

    count: str = "num_nextn_predict_layers"
    """Config key of how many there are; results, which leave them out, have 0 there."""
    prefix: str | None = None
    """What the names of their tensors begin with, where these are not named as further layers."""

    def number(self, family: Any) -> int:
        """How many the config says there are."""
        return natural(family, self.count)
