"""`Architecture`: one model family as a composition of parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.families.aliases import OwnWords, Settings
from engine.families.attention import GroupedQuery
from engine.families.experts import Experts, SharedExpert
from engine.families.head import Head, PredictionLayers
from engine.families.layer_pattern import EveryLayer
from engine.families.residual import PlainResidual, RootMeanSquareNorms
from engine.families.rotation import Rotation
from engine.families.router import TopK


@dataclass(frozen=True)
class Architecture:
    """One model family: two names, and a part for each concern.

    A part that a row leaves out is the part of a Llama without biases.
    """

    model_type: str
    causal_lm_class: str
    """Name of the transformers class, for the model code of non-uniform artifacts and for `architectures` in config.json."""
    attention: GroupedQuery = field(default_factory=GroupedQuery)
    rotation: Rotation = field(default_factory=Rotation)
    router: TopK = field(default_factory=TopK)
    experts: Experts = field(default_factory=Experts)
    """The routed experts. A dense family has no config key for their number."""
    shared: SharedExpert | None = None
    layers: EveryLayer = field(default_factory=EveryLayer)
    norms: RootMeanSquareNorms = field(default_factory=RootMeanSquareNorms)
    residual: PlainResidual = field(default_factory=PlainResidual)
    head: Head = field(default_factory=Head)
    prediction: PredictionLayers | None = None
    words: OwnWords = field(default_factory=OwnWords)
    settings: Settings = field(default_factory=dict, hash=False)
    disk_names: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Names on disk of modules within a layer, or of the model, by the names that they have in a Llama."""
    dense_sibling: str | None = None
    """model_type of the family that the same weights form when each MoE layer becomes one FFN; None if there is none."""
    not_dense: str | None = None
    """Reason why no model of the family can be made dense; None if it can."""
    not_onnx: str | None = None
    """Reason beside those of its attention why no model of the family can be written as an ONNX graph."""

    @property
    def all_settings(self) -> Settings:
        """Config keys with the values that are honored: those of the layer pattern, and the row's own."""
        return {**self.layers.settings, **self.settings}

    @property
    def onnx_obstacle(self) -> str | None:
        """Reason why no model of the family can be written as an ONNX graph; None if it can."""
        return self.not_onnx or self.attention.not_onnx

    @property
    def left_to_transformers(self) -> tuple[str, ...]:
        """Config keys of features that our decoder lacks: transformers runs a model that has any of them."""
        return (*self.attention.left_to_transformers, *self.layers.left_to_transformers)

    @property
    def even_widths(self) -> bool:
        """Whether all experts of a layer need one width."""
        return self.experts.even_widths

    @property
    def even_groups(self) -> bool:
        """Whether each layer of a smaller model needs as many experts of each group, in order."""
        return self.router.even_groups

    @property
    def in_transformers(self) -> bool:
        """Whether transformers has a class for the family."""
        return self.words.read_as is None

    @property
    def has_experts(self) -> bool:
        """Whether the models of this family are mixtures of experts."""
        return bool(self.experts.count)

    @property
    def has_shared_gate(self) -> bool:
        """Whether a gate scales the family's shared expert."""
        return self.shared is not None and self.shared.gate is not None

    @property
    def least_experts(self) -> int:
        """Minimum number of experts in a layer, because the family's own router always takes so many."""
        return self.router.least

    @property
    def count_keys(self) -> tuple[str, ...]:
        """Config keys of the number of experts, best first."""
        return self.experts.count

    @property
    def experts_per_token_key(self) -> str:
        """Config key of the number of experts per token."""
        return self.router.per_token[0]

    @property
    def modules(self) -> tuple[str, str]:
        """transformers' names for the MoE block within a layer, and for the router within the block."""
        return self.experts.names.modules

    @property
    def reads(self) -> frozenset[str]:
        """Config keys that the parts read. The family's transformers config may not know them."""
        shared = () if self.shared is None else self.shared.reads
        prediction = () if self.prediction is None else (self.prediction.count,)
        routed = (*self.router.reads, *self.experts.reads, *self.layers.reads) if self.has_experts else ()
        return frozenset((*self.attention.reads, *self.rotation.reads, *routed, *shared, *prediction))
