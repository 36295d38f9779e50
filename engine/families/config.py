"""`DecoderConfig`: a model's config.json in plain numbers. The decoder is built from it alone."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from engine.families.architecture import Architecture
from engine.families.layer_config import LatentConfig, LayerConfig, LayerHeads, LinearConfig, Multipliers, Temperature


@dataclass(frozen=True)
class DecoderConfig:
    """All facts that the decoder is built from, in plain numbers."""

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
    """Whether neighboring dimensions are rotated together, instead of one half against the other."""
    latent: LatentConfig | None
    """Sizes of latent attention; None if heads have keys and values of their own."""
    qk_norm: str
    """"none", "head" (per head) or "full" (over all heads at once, before the split)."""
    norm_epsilon: float
    qkv_bias: bool
    output_bias: bool
    head_bias: bool
    clip_qkv: float | None
    tied_embeddings: bool
    max_positions: int
    """Maximum number of positions of a text."""
    dense_positions: int | None
    """Number of positions up to which sparse attention is dense. The decoder has dense attention only; None for no limit."""
    prediction_layers: int
    """Number of layers for multi-token prediction, which follow the last layer in a checkpoint, outside of the decoder."""
    layers: tuple[LayerConfig, ...]
    multipliers: Multipliers
    temperature: Temperature | None
    """Scaling of queries in layers that do not rotate."""
    has_sinks: bool
    """Whether each head has an attention sink: a learned score that takes a share of the softmax and adds nothing."""
    output_gate: bool
    """Whether the projection of queries also gives a gate for each number of the heads' outputs."""
    layer_norm: bool
    """Whether norms are layer norms with a bias instead of root mean square norms."""
    zero_centered: bool
    """Whether the weights of norms, also of queries and keys, are stored as their differences from 1."""
    rope_mscales: bool
    """Whether the short and the long form of `longrope` have a factor each, `short_mscale` and `long_mscale`."""
    transformers_config: Any = field(repr=False, compare=False)
    """The family's transformers config, which rotary embeddings are initialized from."""
    value_norm: bool = False
    """Whether values are divided by their root mean square, head by head."""
    output_norms: bool = False
    """Whether a layer's output is s · (x + norm(f(x))) for attention and feed-forward block (residual.SandwichResidual)."""
    logit_cap: float | None = None
    """c, if logits l become c · tanh(l / c); None if they stay as they are."""

    @property
    def why_no_more(self) -> str:
        """Reason for `max_positions` as a clause that follows the number; empty if it is the model's own number."""
        if self.dense_positions is None or self.max_positions < self.dense_positions:
            return ""
        return " (beyond them its attention is sparse, which the engine does not have)"

    @property
    def cached(self) -> tuple[int, int, int]:
        """Sizes of the cache of one position: groups, and the dimensions of a group's key and of its value.

        Latent attention has one group: the latent vector takes the place of the key, and the rotated key that of the value.
        """
        if self.latent is None:
            return self.key_value_heads, self.head_dimension, self.head_dimension
        return 1, self.latent.key_value_rank, self.latent.rotary_dimension

    def heads_of(self, layer: int) -> LayerHeads:
        """Return the sizes of a layer's grouped-query attention."""
        return self.layers[layer].heads or LayerHeads(self.key_value_heads, self.head_dimension)

    def cached_by(self, layer: int) -> tuple[int, int, int]:
        """Return `cached` of one layer."""
        heads = self.layers[layer].heads
        return self.cached if heads is None else (heads.groups, heads.size, heads.size)

    @property
    def rotary_kinds(self) -> dict[str, int]:
        """Rotated dimensions of each kind of layer; empty where all layers share their rotary parameters."""
        return {layer.kind: self.heads_of(index).size for index, layer in enumerate(self.layers) if layer.kind is not None}

    @property
    def caching_layers(self) -> tuple[int, ...]:
        """Indices of the layers that cache something for each position. All others have a state, or no attention."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.attends and layer.linear is None)

    @property
    def linear_layers(self) -> dict[int, LinearConfig]:
        """Sizes of the layers of linear attention, which have a state, by layer index."""
        return {index: layer.linear for index, layer in enumerate(self.layers) if layer.linear is not None}

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers that hold experts."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.moe is not None)

    @property
    def experts_per_layer(self) -> tuple[int, ...]:
        """Number of routed experts of each MoE layer, in order."""
        return tuple(layer.moe.experts for layer in self.layers if layer.moe is not None)

    @property
    def widths_per_layer(self) -> tuple[int | tuple[int, ...], ...]:
        """Number of hidden units of the experts of each MoE layer, in order: one number, or one for each expert."""
        return tuple(layer.moe.expert_widths or layer.moe.expert_width for layer in self.layers if layer.moe is not None)

    @property
    def common_widths(self) -> dict[int, int]:
        """Number of hidden units of the FFN that every token of a layer uses, by decoder layer index.

        This is the shared expert of an MoE layer, if there is one, and the only FFN of a dense layer.
        """
        widths = (layer.dense_width if layer.moe is None else layer.moe.shared_width for layer in self.layers)
        return {index: width for index, width in enumerate(widths) if width}

    def ffn_widths(self, include: Collection[str] = ()) -> dict[int, tuple[int, ...]]:
        """Return the number of hidden units of each FFN of a layer, by decoder layer index; layers without any are left out.

        Routed experts come first. The FFN that every token uses follows if its kind is included: "shared" or "dense".
        """
        common = self.common_widths
        found = {}
        for index, layer in enumerate(self.layers):
            widths = () if layer.moe is None else layer.moe.widths
            if index in common and ("dense" if layer.moe is None else "shared") in include:
                widths += (common[index],)
            if widths:
                found[index] = widths
        return found

    def widest_ffn(self, include: Collection[str] = ()) -> int:
        """Return the largest of these numbers; 0 where there are none."""
        return max((width for own in self.ffn_widths(include).values() for width in own), default=0)

    @property
    def experts_by_layer(self) -> dict[int, int]:
        """Number of routed experts of each MoE layer, by decoder layer index."""
        return dict(zip(self.moe_layers, self.experts_per_layer, strict=True))

    def with_experts_per_token(self, count: int) -> DecoderConfig:
        """Return the config of the same weights where every token uses `count` experts of each layer."""
        layers = (
            layer if layer.moe is None else replace(layer, moe=replace(layer.moe, experts_per_token=count))
            for layer in self.layers
        )
        return replace(self, layers=tuple(layers))

    @property
    def experts_per_token(self) -> int:
        """The model's top-k; 0 for a dense model."""
        return max((layer.moe.experts_per_token for layer in self.layers if layer.moe is not None), default=0)
