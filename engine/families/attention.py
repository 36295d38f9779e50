"""Attention as a part of a family: biases, norms, windows, head sizes, and the layers with another kind of attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from engine.errors import CheckpointError
from engine.families.layer_config import (
    Chunk,
    GatedDeltaConfig,
    IndexerConfig,
    LatentConfig,
    LayerHeads,
    LightningConfig,
    LinearConfig,
    Mamba2Config,
    ShortConvolutionConfig,
    SplitGatedDeltaConfig,
)
from engine.families.layer_pattern import BLOCKS
from engine.families.values import keys, natural, number, of_layer, positive
from engine.files.json_file import shown

LINEAR, FULL, SLIDING, CHUNKED = "linear_attention", "full_attention", "sliding_attention", "chunked_attention"
CONVOLUTION, INDEXED = "conv", "indexed_attention"
"""Kinds of layers, as entries of `layer_types`."""


class Heads(NamedTuple):
    """Dimensions of a head's query and key, the number of heads of keys and values, and the sizes of latent attention if
    they are made from latent vectors."""

    size: int
    groups: int
    latent: LatentConfig | None = None


def _set_head_dimension(family: Any, size: int) -> None:
    """Replace a head_dim of None, which transformers' initializers of rotary embeddings take for a number."""
    if getattr(family, "head_dim", 0) is None:
        family.head_dim = size


@dataclass(frozen=True)
class Unbounded:
    """Every position attends to all earlier positions."""

    kinds: ClassVar[frozenset[str]] = frozenset()
    """Unusual kinds of layers that this window adds."""

    def of_layer(self, family: Any, index: int) -> int | Chunk | None:
        """Return a layer's window, or None for no limit."""
        return None


@dataclass(frozen=True)
class SlidingWindow(Unbounded):
    """Every layer has the config's `sliding_window`, if it is set."""

    def of_layer(self, family: Any, index: int) -> int | Chunk | None:
        """Return the window in tokens."""
        return natural(family, "sliding_window") or None


@dataclass(frozen=True)
class SlidingLayers(SlidingWindow):
    """Layers whose entry in `layer_types` is `sliding_attention` have the window."""

    def of_layer(self, family: Any, index: int) -> int | Chunk | None:
        """Return the window in tokens."""
        return super().of_layer(family, index) if family.layer_types[index] == SLIDING else None


@dataclass(frozen=True)
class ChunkedLayers(Unbounded):
    """Layers whose entry in `layer_types` is `chunked_attention` attend within chunks."""

    kinds: ClassVar[frozenset[str]] = frozenset(["chunked"])
    size: str
    """Config key of the chunk size."""

    def of_layer(self, family: Any, index: int) -> int | Chunk | None:
        """Return the layer's chunks."""
        if of_layer(family, "layer_types", index) != CHUNKED or getattr(family, self.size) is None:
            return None
        return Chunk(positive(family, self.size))


@dataclass(frozen=True)
class GroupedQuery:
    """Grouped-query attention (arXiv 2305.13245)."""

    left_to_transformers: ClassVar[tuple[str, ...]] = ()
    """Config keys of features that our decoder lacks and transformers has."""
    not_onnx: ClassVar[str | None] = None
    """Reason why our graphs do not have this attention; None if they do."""
    kinds: ClassVar[frozenset[str]] = frozenset()
    """Unusual kinds of layers that this attention adds."""
    has_sinks: ClassVar[bool] = False
    """Whether each head has an attention sink: a learned score that takes a share of the softmax and adds nothing."""
    has_output_gate: ClassVar[bool] = False
    """Whether the projection of queries also gives a gate, whose sigmoid multiplies the heads' outputs."""
    has_value_norm: ClassVar[bool] = False
    """Whether values are divided by their root mean square, head by head."""
    qk_norm: str = "none"
    """"none", "head" (per head) or "full" (over all heads at once, before the split)."""
    qkv_bias: bool | str = False
    """True, False, or the config key of the flag."""
    output_bias: bool | str = False
    window: Unbounded = Unbounded()

    @property
    def reads(self) -> tuple[str, ...]:
        """Config keys that the part reads."""
        return keys(self.qkv_bias, self.output_bias)

    def lacking(self, family: Any) -> Iterator[str]:
        """Yield the settings of the config that cannot be honored."""
        unknown = {"linear", "chunked", CONVOLUTION} - self.kinds - self.window.kinds
        if any(kind in own for own in getattr(family, "layer_types", None) or () for kind in unknown):
            yield f"layer_types={sorted(set(family.layer_types))}"

    def heads(self, config: Mapping[str, Any], family: Any, hidden: int, count: int) -> Heads:
        """Return a head's sizes. Raises CheckpointError for sizes that do not divide, which shapes alone would not show."""
        _set_head_dimension(family, hidden // count)
        groups, size = positive(family, "num_key_value_heads"), getattr(family, "head_dim", None) or hidden // count
        if count % groups:
            raise CheckpointError(f"config.json: {count} attention heads cannot share {groups} key-value heads evenly")
        if not config.get("head_dim") and hidden % count:
            raise CheckpointError(f"config.json: hidden_size {hidden} is not divisible by {count} attention heads")
        if size < 2 or size % 2:
            raise CheckpointError(f"config.json: a head has {size} dimensions; rotary positions need an even number")
        return Heads(size, groups)

    def of_layer(self, family: Any, index: int) -> LayerHeads | None:
        """Return the sizes of a layer's attention, or None if all layers have those of `heads`."""
        return None

    def norm(self, family: Any) -> str:
        """Return the kind of norm of queries and keys, as in `qk_norm`."""
        return self.qk_norm

    def clip(self, family: Any) -> float | None:
        """Return the largest magnitude of queries, keys and values, or None if they are not clipped."""
        return None

    def linear(self, family: Any, index: int, heads: Heads) -> LinearConfig | None:
        """Return the sizes of a layer's linear attention, or None if its attention is not linear."""
        return None

    def indexer(self, family: Any, index: int) -> IndexerConfig | None:
        """Return the sizes of a layer's indexer, or None if it has none."""
        return None

    def dense_positions(self, family: Any) -> int | None:
        """Return the number of positions up to which sparse attention is dense; None if attention is not sparse."""
        return None


@dataclass(frozen=True)
class GroupedQueryWithSinks(GroupedQuery):
    """Grouped-query attention whose heads have sinks."""

    has_sinks: ClassVar[bool] = True


@dataclass(frozen=True)
class ClippedGroupedQuery(GroupedQuery):
    """Grouped-query attention whose queries, keys and values are clipped if `clip_qkv` is set."""

    def clip(self, family: Any) -> float | None:
        """Return the config's limit. Raises CheckpointError if it is not positive."""
        value = getattr(family, "clip_qkv", None)
        if value is not None and not (isinstance(value, int | float) and 0 < value < 1e38):
            raise CheckpointError(f"config.json: clip_qkv is {shown(value)}; it must be a positive number")
        return value


@dataclass(frozen=True)
class OptionallyNormed(GroupedQuery):
    """Grouped-query attention whose queries and keys have the norm only if the config asks for it."""

    normed: str = "use_qk_norm"
    """Config key of the flag for the norm."""

    def norm(self, family: Any) -> str:
        """Return the kind of norm, or "none"."""
        return self.qk_norm if getattr(family, self.normed, False) else "none"


@dataclass(frozen=True)
class HeadsByLayer(GroupedQuery):
    """Grouped-query attention with normed values, whose heads differ in size and number between the kinds of layers."""

    left_to_transformers: ClassVar[tuple[str, ...]] = ("hidden_size_per_layer_input",)
    has_value_norm: ClassVar[bool] = True
    own: str = "per_layer_config"
    """Attribute of transformers' config with the settings of each layer, also a key of config.json."""
    shares_projection: str = "attention_k_eq_v"
    """Config key of the flag for layers of full attention whose values are made from the projection of keys."""
    shared_layers: str = "num_kv_shared_layers"
    """Config key of the number of layers that attend to keys and values of other layers, which the engine does not have."""
    further_inputs: str = "hidden_size_per_layer_input"
    """Config key of the size of embeddings that every layer is given, which the engine does not have."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Config keys that the part reads."""
        return (*super().reads, self.own, "global_head_dim", "num_global_key_value_heads")

    def lacking(self, family: Any) -> Iterator[str]:
        """Yield the settings that cannot be honored."""
        yield from super().lacking(family)
        if not set(own := family.layer_types or ()) <= {SLIDING, FULL}:
            yield f"layer_types={sorted(set(own))}"
        if family.use_bidirectional_attention not in (None, "vision"):  # the latter is among the tokens of an image
            yield f"use_bidirectional_attention={family.use_bidirectional_attention!r}"
        settings = set(family.per_layer_attributes or ()) - {"head_dim", "num_key_value_heads"}
        settings |= {"skip" for each in getattr(family, self.own) if getattr(each, "skip", None)}
        yield from (f"{key} in {self.own}" for key in sorted(settings))
        if len({(family.layer_types[index], self.of_layer(family, index)) for index in range(len(own))}) > len(set(own)):
            yield f"{self.own} with different heads in layers of one kind"
        yield from (f"{key}={value}" for key in (self.shared_layers, self.further_inputs) if (value := getattr(family, key)))

    def heads(self, config: Mapping[str, Any], family: Any, hidden: int, count: int) -> Heads:
        """Return the sizes of the first layer."""
        first = self.of_layer(family, 0)
        return Heads(first.size, first.groups)

    def of_layer(self, family: Any, index: int) -> LayerHeads:
        """Return the sizes of a layer's attention. Raises CheckpointError for sizes that do not divide."""
        own, count = getattr(family, self.own)[index], positive(family, "num_attention_heads")
        groups, size = positive(own, "num_key_value_heads"), positive(own, "head_dim")
        if count % groups or size % 2:
            raise CheckpointError(
                f"config.json: layer {index} has {count} heads of {size} dimensions and {groups} key-value heads; heads "
                "need an even number of dimensions, and key-value heads an equal number of heads each"
            )
        shares = bool(getattr(family, self.shares_projection)) and of_layer(family, "layer_types", index) == FULL
        return LayerHeads(groups, size, shares)


@dataclass(frozen=True)
class LinearLayers(GroupedQuery):
    """Linear attention in layers that `layer_types` calls `linear_attention`, grouped-query attention in all others."""

    kinds: ClassVar[frozenset[str]] = frozenset(["linear"])
    kind: ClassVar[str] = LINEAR
    """Entry of `layer_types` for layers that have a state."""
    others: ClassVar[frozenset[str]] = frozenset()
    """Entries of `layer_types` for layers without attention."""

    def lacking(self, family: Any) -> Iterator[str]:
        """Yield the settings that cannot be honored: other kinds of layers, or no layer of full attention."""
        yield from super().lacking(family)
        if not {FULL} <= set(own := family.layer_types or ()) <= {self.kind, FULL, *self.others}:
            yield f"layer_types={sorted(set(own))}"

    def linear(self, family: Any, index: int, heads: Heads) -> LinearConfig | None:
        """Return the sizes of a layer's linear attention, or None if its attention is not linear."""
        return self.sizes(family, heads) if of_layer(family, "layer_types", index) == self.kind else None

    def sizes(self, family: Any, heads: Heads) -> LinearConfig:
        """Return the sizes of linear attention, beside heads of grouped-query attention that have these sizes."""
        raise NotImplementedError


@dataclass(frozen=True)
class Lightning(LinearLayers):
    """Lightning attention, with as many heads of the same size as the other layers have heads of queries."""

    not_onnx: ClassVar[str | None] = "its lightning attention keeps a state, for which our graphs have no input"

    def sizes(self, family: Any, heads: Heads) -> LinearConfig:
        """Return the sizes of lightning attention."""
        return LightningConfig(positive(family, "num_attention_heads"), heads.size, heads.size)


@dataclass(frozen=True)
class GatedDelta(LinearLayers):
    """The gated delta rule in layers of linear attention, and attention with an output gate in all others."""

    not_onnx: ClassVar[str | None] = "its gated delta rule keeps a state, for which our graphs have no input"
    has_output_gate: ClassVar[bool] = True
    made: ClassVar[type[GatedDeltaConfig]] = GatedDeltaConfig
    """The class of the sizes, which stands for the layout on disk."""
    interval: str = "full_attention_interval"
    """Config key of n, if every n-th layer has full attention and the config has no `layer_types`."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Config keys that the part reads."""
        return (*super().reads, self.interval)

    def sizes(self, family: Any, heads: Heads) -> LinearConfig:
        """Return the sizes of the gated delta rule. Raises CheckpointError for heads of values that keys cannot share."""
        count, keys = positive(family, "linear_num_value_heads"), positive(family, "linear_num_key_heads")
        if count % keys:
            raise CheckpointError(f"config.json: {count} linear value heads cannot share {keys} linear key heads evenly")
        return self.made(
            heads=count,
            key_dimension=positive(family, "linear_key_head_dim"),
            value_dimension=positive(family, "linear_value_head_dim"),
            key_heads=keys,
            kernel=positive(family, "linear_conv_kernel_dim"),
        )


@dataclass(frozen=True)
class SplitGatedDelta(GatedDelta):
    """The gated delta rule with a matrix for each projection, beside attention with an output gate."""

    made: ClassVar[type[GatedDeltaConfig]] = SplitGatedDeltaConfig


@dataclass(frozen=True)
class Mamba2Layers(LinearLayers):
    """Mamba-2 in layers of linear attention, grouped-query attention in others, and layers that are a single FFN."""

    not_onnx: ClassVar[str | None] = "its Mamba-2 layers keep a state, for which our graphs have no input"
    others: ClassVar[frozenset[str]] = BLOCKS
    least_step: str = "time_step_min"
    """Config key of the minimum of Δ."""

    def sizes(self, family: Any, heads: Heads) -> LinearConfig:
        """Return the sizes of Mamba-2. Raises CheckpointError for heads that are not as many in each group."""
        count, groups = positive(family, "mamba_num_heads"), positive(family, "n_groups")
        if count % groups:
            raise CheckpointError(f"config.json: {count} Mamba heads are not {groups} groups of one size (n_groups)")
        return Mamba2Config(
            heads=count,
            key_dimension=positive(family, "ssm_state_size"),
            value_dimension=positive(family, "mamba_head_dim"),
            groups=groups,
            kernel=positive(family, "conv_kernel"),
            least_step=number(self.least_step, getattr(family, self.least_step)),
        )


@dataclass(frozen=True)
class ShortConvolutions(LinearLayers):
    """Short convolutions in layers that `layer_types` calls `conv`, grouped-query attention in all others."""

    not_onnx: ClassVar[str | None] = "its short convolutions keep a state, for which our graphs have no input"
    kinds: ClassVar[frozenset[str]] = frozenset([CONVOLUTION])
    kind: ClassVar[str] = CONVOLUTION
    kernel: str = "conv_L_cache"
    """Config key of the number of positions that a convolution reads."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Config keys that the part reads."""
        return (*super().reads, self.kernel)

    def sizes(self, family: Any, heads: Heads) -> LinearConfig:
        """Return the sizes of the convolution."""
        return ShortConvolutionConfig(1, 0, positive(family, "hidden_size"), positive(family, self.kernel))


@dataclass(frozen=True)
class Latent(GroupedQuery):
    """Multi-head latent attention: keys and values are made from a latent vector (DeepSeek-V2, §2.1)."""

    def heads(self, config: Mapping[str, Any], family: Any, hidden: int, count: int) -> Heads:
        """Return a head's sizes. Raises CheckpointError if heads share keys or an odd number of dimensions is rotated."""
        _set_head_dimension(family, hidden // count)
        latent = LatentConfig(
            query_rank=natural(family, "q_lora_rank"),
            key_value_rank=positive(family, "kv_lora_rank"),
            plain_dimension=positive(family, "qk_nope_head_dim"),
            rotary_dimension=positive(family, "qk_rope_head_dim"),
            value_dimension=positive(family, "v_head_dim"),
        )
        groups = positive(family, "num_key_value_heads")
        if count != groups or latent.rotary_dimension % 2:
            raise CheckpointError(
                f"config.json: latent attention of {count} heads has num_key_value_heads {groups} and rotates "
                f"{latent.rotary_dimension} dimensions; it needs as many of the one as of the other, and an even number"
            )
        return Heads(latent.plain_dimension + latent.rotary_dimension, groups, latent)


@dataclass(frozen=True)
class SparseLatent(Latent):
    """Latent attention to the positions that an indexer selects (DeepSeek-V3.2, arXiv 2512.02556, §2.1)."""

    selected: str = "index_topk"
    """Config key of the number of positions that a query attends to. Up to as many, the attention is dense."""
    count: str = "index_n_heads"
    size: str = "index_head_dim"
    sharing: str | None = None
    """Config key of a list with `shared` for each layer that takes the selection of the layer before; None if none does."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Config keys that the part reads."""
        return (*super().reads, self.selected, self.count, self.size, *keys(self.sharing))

    def lacking(self, family: Any) -> Iterator[str]:
        """Yield the settings that cannot be honored: layers of another kind."""
        yield from super().lacking(family)
        if set(own := family.layer_types or ()) - {INDEXED}:
            yield f"layer_types={sorted(set(own))}"

    def heads(self, config: Mapping[str, Any], family: Any, hidden: int, count: int) -> Heads:
        """Return a head's sizes. Raises CheckpointError if there is no latent vector of queries, which the indexer reads."""
        positive(family, "q_lora_rank")
        return super().heads(config, family, hidden, count)

    def indexer(self, family: Any, index: int) -> IndexerConfig | None:
        """Return the sizes of a layer's indexer, or None if it has none. Raises CheckpointError for an unknown kind."""
        if self.sharing is not None:
            if (kind := of_layer(family, self.sharing, index)) not in ("full", "shared") or (kind == "shared" and not index):
                raise CheckpointError(f"config.json: {self.sharing} has {shown(kind)} for layer {index}")
            if kind == "shared":
                return None
        return IndexerConfig(positive(family, self.count), positive(family, self.size))

    def dense_positions(self, family: Any) -> int | None:
        """Return the number of positions that are selected."""
        return positive(family, self.selected)
