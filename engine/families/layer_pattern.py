"""The layer pattern as a part of a family: the layers that hold experts, and the feed-forward blocks of the others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from engine.errors import CheckpointError
from engine.families.aliases import Settings, only, unused
from engine.families.values import natural, of_layer, positive
from engine.files.json_file import shown

DENSE, SPARSE = "dense", "sparse"
"""Kinds of feed-forward blocks, as entries of `mlp_layer_types`."""
EXPERTS, FFN = "moe", "mlp"
BLOCKS = frozenset([EXPERTS, FFN])
"""Kinds of layers that are a single feed-forward block, as entries of `layers_block_type`."""
SINGLE_BLOCK_NAMES = {
    "model.layers": "backbone.layers",
    "model.embed_tokens": "backbone.embeddings",
    "model.norm": "backbone.norm_f",
    "input_layernorm": "norm",
    "post_attention_layernorm": "norm",
    **{f"self_attn.{part}_proj": f"mixer.{part}_proj" for part in "qkvo"},
    **{f"mlp.{part}_proj": f"mixer.{part}_proj" for part in ("up", "down")},
}
"""Names on disk in models whose layers are a single block, the mixer, by the engine's names."""


@dataclass(frozen=True)
class EveryLayer:
    """Every layer holds experts."""

    left_to_transformers: ClassVar[tuple[str, ...]] = ()
    """Config keys of features that our decoder lacks and transformers has."""
    settings: ClassVar[Settings] = {}
    """Further config keys of such models, with the values that are honored."""
    dense_width: str = field(default="intermediate_size", kw_only=True)
    """Config key of a dense FFN's width."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Config keys that the part reads."""
        return ()

    def holds_experts(self, family: Any, index: int) -> bool:
        """Return whether a layer holds experts."""
        return True

    def attends(self, family: Any, index: int) -> bool:
        """Return whether a layer has attention."""
        return True

    def ffn_width(self, family: Any, index: int) -> int:
        """Return the width by the family's own key of the FFN of a layer without experts; 0 if it has no FFN either."""
        return positive(family, self.dense_width)

    def all_dense(self, family: Any) -> dict[str, Any] | None:
        """Return config keys with which no layer holds experts, or None if no config can express it."""
        return None


@dataclass(frozen=True)
class SparseStep(EveryLayer):
    """Every n-th layer by `decoder_sparse_step` holds experts, except those in `mlp_only_layers`."""

    def holds_experts(self, family: Any, index: int) -> bool:
        """Return whether a layer holds experts."""
        only_dense = set(getattr(family, "mlp_only_layers", None) or ())
        return not (index + 1) % positive(family, "decoder_sparse_step") and index not in only_dense

    def all_dense(self, family: Any) -> dict[str, Any] | None:
        """Return config keys with which no layer holds experts."""
        return {"mlp_only_layers": list(range(positive(family, "num_hidden_layers")))}


@dataclass(frozen=True)
class DenseFirst(EveryLayer):
    """The first layers are dense."""

    count: str = "first_k_dense_replace"
    """Config key of the number of dense layers."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Config keys that the part reads."""
        return (self.count,)

    def holds_experts(self, family: Any, index: int) -> bool:
        """Return whether a layer holds experts."""
        return index >= natural(family, self.count)

    def all_dense(self, family: Any) -> dict[str, Any] | None:
        """Return config keys with which no layer holds experts."""
        return {self.count: positive(family, "num_hidden_layers")}


@dataclass(frozen=True)
class DenseFirstThenEveryNth(DenseFirst):
    """The first layers are dense. After them, a layer holds experts if its number is a multiple of n."""

    step: str = "moe_layer_freq"
    """Config key of n."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Config keys that the part reads."""
        return (*super().reads, self.step)

    def holds_experts(self, family: Any, index: int) -> bool:
        """Return whether a layer holds experts."""
        return super().holds_experts(family, index) and index % (natural(family, self.step) or 1) == 0


@dataclass(frozen=True)
class ListedKinds(DenseFirst):
    """The config lists the kind of each layer's feed-forward block. `count` is for programs that do not read the list."""

    kinds: str = "mlp_layer_types"
    """Config key of the list, whose entries are DENSE or SPARSE."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Config keys that the part reads."""
        return (*super().reads, self.kinds)

    def holds_experts(self, family: Any, index: int) -> bool:
        """Return whether a layer holds experts. Raises CheckpointError for an unknown kind of layer."""
        if (kind := of_layer(family, self.kinds, index)) not in (DENSE, SPARSE):
            raise CheckpointError(f"config.json: {self.kinds} has {shown(kind)}; it may have {DENSE} and {SPARSE}")
        return bool(kind == SPARSE)

    def all_dense(self, family: Any) -> dict[str, Any] | None:
        """Return config keys with which no layer holds experts."""
        layers = positive(family, "num_hidden_layers")
        return {self.count: layers, self.kinds: [DENSE] * layers}


@dataclass(frozen=True)
class LayerRange(EveryLayer):
    """Every n-th layer of a range holds experts. All fields are config keys."""

    first: str
    last: str
    step: str

    @property
    def reads(self) -> tuple[str, ...]:
        """Config keys that the part reads."""
        return self.first, self.last, self.step

    def holds_experts(self, family: Any, index: int) -> bool:
        """Return whether a layer holds experts."""
        in_range = natural(family, self.first) <= index <= natural(family, self.last)
        return in_range and not (index + 1) % positive(family, self.step)


@dataclass(frozen=True)
class ListedLayers(EveryLayer):
    """The config lists the layers that hold experts."""

    layers: str = "moe_layers"
    """Config key of the list."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Config keys that the part reads."""
        return (self.layers,)

    def holds_experts(self, family: Any, index: int) -> bool:
        """Return whether a layer holds experts."""
        return index in (getattr(family, self.layers) or ())


@dataclass(frozen=True)
class SingleBlocks(EveryLayer):
    """Every layer is a single block: attention or what takes its place, experts, or an FFN. The config lists their kinds."""

    left_to_transformers: ClassVar[tuple[str, ...]] = ("moe_latent_size",)
    settings: ClassVar[Settings] = (
        only(mlp_hidden_act="relu2", mamba_hidden_act="silu", use_conv_bias=True, n_shared_experts=1)
        | only(use_bias=False, attention_bias=False, moe_latent_size=None)
        | unused("num_hidden_layers", "norm_eps", "partial_rotary_factor", "mtp_hybrid_override_pattern")
    )
    kinds: str = "layers_block_type"
    """Config key of the list."""
    pattern: str = "hybrid_override_pattern"
    """Config key of the list as a text with a letter for each layer, in older configs."""
    ffn_letter: str = "-"

    @property
    def reads(self) -> tuple[str, ...]:
        """Config keys that the part reads."""
        return self.kinds, self.pattern

    def holds_experts(self, family: Any, index: int) -> bool:
        """Return whether a layer holds experts."""
        return bool(of_layer(family, self.kinds, index) == EXPERTS)

    def attends(self, family: Any, index: int) -> bool:
        """Return whether a layer has attention."""
        return of_layer(family, self.kinds, index) not in BLOCKS

    def ffn_width(self, family: Any, index: int) -> int:
        """Return the width by the family's own key of the FFN of a layer that is one; 0 for other layers."""
        return super().ffn_width(family, index) if of_layer(family, self.kinds, index) == FFN else 0

    def all_dense(self, family: Any) -> dict[str, Any] | None:
        """Return config keys with which layers of experts are FFNs. Both keys have them, as some programs read either."""
        kinds = [FFN if kind == EXPERTS else kind for kind in getattr(family, self.kinds)]
        letters = getattr(family, self.pattern).replace("E", self.ffn_letter)
        return {self.kinds: kinds, self.pattern: letters}
