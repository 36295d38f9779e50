"""Parts of a family that follow the layers: the head, and the tensors for multi-token prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.families.values import above_zero, natural

_FURTHER = "model.layers.{number}."


@dataclass(frozen=True)
class Head:
    """The matrix that maps hidden states to logits."""

    bias: bool | str = False
    """True, False, or the config key of the flag."""
    cap: str | None = None
    """Config key of c, if logits l become c · tanh(l / c); they stay as they are if the config has no c."""

    def logit_cap(self, family: Any) -> float | None:
        """Return c, or None. Raises CheckpointError unless it is a positive number."""
        return None if self.cap is None or getattr(family, self.cap) is None else above_zero(family, self.cap)


@dataclass(frozen=True)
class PredictionLayers:
    """Layers for multi-token prediction. They follow the last layer in a checkpoint and are not part of the decoder."""

    count: str = "num_nextn_predict_layers"
    """Config key of their number; it is 0 in results that leave these layers out."""
    prefix: str | None = None
    """Prefix of the names of their tensors, if these are not named as further layers."""
    layer: str = _FURTHER
    """Beginning of the names of the first one's tensors. number: that of the decoder's layers."""
    norms: tuple[str, str, str] = (
        f"{_FURTHER}enorm.weight",
        f"{_FURTHER}hnorm.weight",
        f"{_FURTHER}shared_head.norm.weight",
    )
    """Names of its norms: of the embedding, of the hidden state, and before the head."""
    projection: str = f"{_FURTHER}eh_proj.weight"
    """Name of the matrix by which both become the input of its layer."""

    def number(self, family: Any) -> int:
        """Return the number of these layers, by the config."""
        return natural(family, self.count)
