"""`DecoderConfig`: a model's config.json in plain numbers, which is all that the decoder is built from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine.families.architecture import Architecture
from engine.families.layer_config import LatentConfig, LayerConfig, Multipliers, Temperature


@dataclass(frozen=True)
class DecoderConfig:
    """Everything the decoder is built from, in plain numbers."""

    architecture: Architecture
    vocabulary_size: int
    hidden_size: int
    attention_heads: int
    key_value_heads: int
    head_dimension: int
    """Dimensions of queries and keys."""
    rotary_dimension: int
    """The first dimensions of a head, which are rotated; the last ones of latent attention."""
    rotary_pairs: bool
    """Neighbors are rotated together, not half against half."""
    latent: LatentConfig | None
    """None where heads have keys and values of their own."""
    qk_norm: str
    """"none", "head" (per head) or "full" (over all heads at once, before the split)."""
    norm_epsilon: float
    qkv_bias: bool
    output_bias: bool
    head_bias: bool
    clip_qkv: float | None
    tied_embeddings: bool
    max_positions: int
    prediction_layers: int
    """Layers for multi-token prediction, which follow the last one in a checkpoint and are not read."""
    layers: tuple[LayerConfig, ...]
    multipliers: Multipliers
    temperature: Temperature | None
    """The rule of layers that do not rotate."""
    has_sinks: bool
    """Each head has a learned score beside those of the keys, which takes its share of the softmax and adds nothing."""
    layer_norm: bool
    """Norms are layer norms with a bias, not root mean squares."""
    rope_mscales: bool
    """The short and the long form of `longrope` have a factor each, `short_mscale` and `long_mscale`."""
    transformers_config: Any = field(repr=False, compare=False)
    """The family's transformers config: rotary embeddings are initialized from it."""

    @property
    def cached(self) -> tuple[int, int, int]:
        """What attention keeps of a position: groups, and dimensions of a group's key and of its value.

        Latent attention has one group: the latent vector in place of the key, the rotated key in place of the value.
        """
        if self.latent is None:
            return self.key_value_heads, self.head_dimension, self.head_dimension
        return 1, self.latent.key_value_rank, self.latent.rotary_dimension

    @property
    def caching_layers(self) -> tuple[int, ...]:
        """Indices of the layers that keep something of each position; all others have a state."""
        return tuple(index for index, layer in enumerate(self.layers) if not layer.is_lightning)

    @property
    def lightning_layers(self) -> tuple[int, ...]:
        """Indices of the layers that have a state of lightning attention."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.is_lightning)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers that hold experts."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.moe is not None)

    @property
    def experts_per_layer(self) -> tuple[int, ...]:
        """Routed experts of each MoE layer, in order."""
        return tuple(layer.moe.experts for layer in self.layers if layer.moe is not None)

    @property
    def experts_by_layer(self) -> dict[int, int]:
        """Routed experts of each MoE layer, by decoder layer index."""
        return dict(zip(self.moe_layers, self.experts_per_layer, strict=True))

    @property
    def experts_per_token(self) -> int:
        """The model's top-k; 0 for a dense model."""
        return max((layer.moe.experts_per_token for layer in self.layers if layer.moe is not None), default=0)
