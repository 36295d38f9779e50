"""Norms and residual connections as parts of a family: the input of a block, and how its output is added."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from engine.errors import CheckpointError
from engine.families.layer_config import Multipliers, Residual
from engine.families.values import number, positive

SANDWICH_NAMES = {
    "post_attention_layernorm": "pre_feedforward_layernorm_2",
    "attention_output_norm": "post_attention_layernorm",
    "feed_forward_output_norm": "post_feedforward_layernorm",
    "shared_input_norm": "pre_feedforward_layernorm",
    "shared_output_norm": "post_feedforward_layernorm_1",
    "routed_output_norm": "post_feedforward_layernorm_2",
}
"""Names on disk of norms around every part of a layer, by the engine's names. The engine's norm before a feed-forward block
is the one before the routed experts."""


@dataclass(frozen=True)
class RootMeanSquareNorms:
    """Norms that divide by the root mean square (arXiv 1910.07467)."""

    layer_norm: ClassVar[bool] = False
    zero_centered: ClassVar[bool] = False
    """Whether weights are stored as their differences from 1."""
    key: str = "rms_norm_eps"
    """Config key of the ε that is added under the root."""

    def epsilon(self, family: Any) -> float:
        """Return ε. Raises CheckpointError unless it is a small number."""
        if not (value := number(self.key, getattr(family, self.key))) <= 1:
            raise CheckpointError(f"config.json: {self.key} is {value}; it must be a small number")
        return value


@dataclass(frozen=True)
class LayerNorms(RootMeanSquareNorms):
    """Norms that are layer norms with a bias."""

    layer_norm: ClassVar[bool] = True


@dataclass(frozen=True)
class ZeroCenteredNorms(RootMeanSquareNorms):
    """Norms whose weights are stored as their differences from 1."""

    zero_centered: ClassVar[bool] = True


@dataclass(frozen=True)
class PlainResidual:
    """x + f(norm(x))."""

    has_output_norms: ClassVar[bool] = False
    """Whether the outputs of attention and of the feed-forward block are normed before they are added, and a number of
    each layer multiplies its output."""

    def multipliers(self, family: Any) -> Multipliers:
        """Return the factors that the model was trained with."""
        return Multipliers()

    def of_layer(self, family: Any, is_linear: bool) -> tuple[Residual, Residual] | None:
        """Return the rules of a layer's attention and of its feed-forward block, or None for x + f(norm(x))."""
        return None


@dataclass(frozen=True)
class ScaledResidual(PlainResidual):
    """The config has factors for embeddings, attention scores, additions to the residual, and logits."""

    def multipliers(self, family: Any) -> Multipliers:
        """Return the config's factors. Raises CheckpointError for numbers that are not positive."""
        keys = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
        values = [number(key, getattr(family, key)) for key in keys]
        if not all(values):
            raise CheckpointError(f"config.json: {', '.join(keys)} are {values}; they must be positive numbers")
        return Multipliers(*values)


@dataclass(frozen=True)
class SandwichResidual(PlainResidual):
    """(x + norm'(f(norm(x)))) · s with a number s of each layer; embeddings times √D, and scores that are not scaled."""

    has_output_norms: ClassVar[bool] = True

    def multipliers(self, family: Any) -> Multipliers:
        """Return √D as the factor of embeddings, and 1 as that of scores."""
        return Multipliers(positive(family, "hidden_size") ** 0.5, rounds_embedding=True, attention=1.0)


@dataclass(frozen=True)
class NormResidual(PlainResidual):
    """alpha · norm(x) + beta · f(norm(x)). Each rule has the config keys of its alpha and beta."""

    attention: tuple[str, str]
    lightning: tuple[str, str]
    feed_forward: tuple[str, str]

    def of_layer(self, family: Any, is_linear: bool) -> tuple[Residual, Residual] | None:
        """Return the rules of a layer's attention and of its feed-forward block."""
        attention, lightning, feed_forward = (
            Residual(*(number(key, getattr(family, key)) for key in keys))
            for keys in (self.attention, self.lightning, self.feed_forward)
        )
        return lightning if is_linear else attention, feed_forward
