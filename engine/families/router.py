"""The router as a part of a family: names of its tensors, and the rule that chooses and weighs a token's experts.

The rules themselves are in engine/decoder/routing.py. A part states in a `MoeConfig` which of them a layer has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from engine.errors import CheckpointError, UnsupportedError
from engine.families.block_configs import block_config_groups
from engine.families.layer_config import MoeConfig
from engine.families.values import keys, natural, number, positive

GATE_WIDTH_KEY = "gate_network_width"
"""Config key of this project: the number of hidden units of a gate network, if it differs from the number of experts."""


class RouterNames(NamedTuple):
    """Names of a router's tensors within the block; None for tensors that the router does not have."""

    weight: str
    """The matrix that has one row for each expert."""
    logit_bias: str | None = None
    """One number for each expert, which is added to its router logit."""
    choice_bias: str | None = None
    """One number for each expert, which is added to its score for the choice but not for the weight."""
    hidden: str | None = None
    """W1 [hidden units, D] of a gate network."""
    noise: str | None = None
    """W_noise [experts, D] of noisy top-k."""
    input_scale: str | None = None
    """The weight [D] of the norm of the router's input, which is then the hidden state itself."""
    weight_scale: str | None = None
    """One number for each expert, by which its weight is multiplied."""


@dataclass(frozen=True)
class Groups:
    """Experts are in groups, and a token takes its experts from the best few groups."""

    count: str = "n_group"
    """Config key of the number of groups."""
    per_token: str = "topk_group"
    """Config key of the number of groups that a token's experts come from."""
    only_if: tuple[str, str] | None = None
    """Config key and the value under which there are groups; None if there always are."""

    def number(self, family: Any) -> int:
        """Return the number of groups; 1 if experts are in no groups."""
        if self.only_if and getattr(family, self.only_if[0], None) != self.only_if[1]:
            return 1
        return natural(family, self.count) or 1

    def of_experts(
        self, config: Mapping[str, Any], family: Any, index: int, experts: int, per_token: int
    ) -> tuple[int, ...]:
        """Return the group of each of a layer's experts, from `block_configs` or as contiguous groups of equal size.

        The result is empty if there are no groups. Raises CheckpointError for numbers that do not fit each other.
        """
        count = self.number(family)
        if count == 1:
            return ()
        if (used := positive(family, self.per_token)) > count:
            raise CheckpointError(f"config.json: a token cannot use {used} of {count} groups ({self.per_token})")
        if (recorded := block_config_groups(config.get("block_configs"), index, experts, count)) is not None:
            return recorded
        if experts % count:
            raise CheckpointError(f"config.json: {experts} experts cannot share {count} groups evenly ({self.count})")
        if per_token > used * (experts // count):
            raise CheckpointError(
                f"config.json: a token cannot use {per_token} experts of {used} groups that have {experts // count} each"
            )
        return tuple(expert // (experts // count) for expert in range(experts))


@dataclass(frozen=True)
class TopK:
    """The k experts with the largest probabilities, which are the softmax over all logits."""

    scores: ClassVar[str] = "softmax"
    """Function of the router logits: "softmax" over all experts, or the "sigmoid" of each logit."""
    least: ClassVar[int] = 1
    """Minimum number of experts in a layer, because the family's own router always takes so many."""
    even_groups: ClassVar[bool] = False
    """Whether each layer of a smaller model needs as many experts of each group, in order."""
    weight: str = "gate.weight"
    """Name within the block of the matrix that has one row for each expert."""
    per_token: tuple[str, ...] = ("num_experts_per_tok",)
    """Config keys of k. All but the first repeat the number and may be missing."""
    normalized: bool = False
    """Whether the weights of the chosen experts sum to 1, whatever the config's `norm_topk_prob`."""
    scale: str | None = None
    """Config key of the factor of the routed weights: one number, or one for each layer."""
    in_float32: bool = False
    """Whether the router's product is computed in float32, whatever the model's dtype."""
    choice_bias: str | None = None
    """Name within the block of the tensor that is added to scores for the choice of experts but not for their weights."""
    groups: Groups | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        """Config keys that the part reads."""
        return (*self.per_token, *keys(self.scale))

    @property
    def names(self) -> RouterNames:
        """Names of the router's tensors within the block."""
        return RouterNames(self.weight, choice_bias=self.choice_bias)

    def choice_bias_shape(self, experts: int) -> tuple[int, ...]:
        """Return the shape of the tensor that is added to scores for the choice of experts."""
        return (experts,)

    def group_count(self, family: Any) -> int:
        """Return the number of groups of experts; 1 if experts are in no groups."""
        return 1 if self.groups is None else self.groups.number(family)

    def layer(self, config: Mapping[str, Any], family: Any, index: int, experts: int, width: int) -> MoeConfig:
        """Return the config of a layer with so many experts of this width and this router."""
        per_token = positive(family, self.per_token[0])
        groups = self.groups.of_experts(config, family, index, experts, per_token) if self.groups else ()
        return MoeConfig(
            experts=experts,
            # If pruning left fewer than k experts, the layer's own top-k shrinks to their number.
            experts_per_token=min(per_token, experts),
            expert_width=width,
            normalise_top_k=self.normalized or bool(getattr(family, "norm_topk_prob", False)),
            weight_scale=self._scale(family, index),
            scores=self.scores,
            groups=groups,
            groups_per_token=positive(family, self.groups.per_token) if self.groups and groups else 1,
            router_in_float32=self.in_float32,
        )

    def _scale(self, family: Any, index: int) -> float:
        if self.scale is None:
            return 1.0
        value = getattr(family, self.scale, 1.0)
        if isinstance(value, list) and len(value) == positive(family, "num_hidden_layers"):
            value = value[index]
        return number(self.scale, value)

    def with_counts(self, config: Mapping[str, Any], family: Any, counts: Sequence[int], is_plain: bool) -> dict[str, Any]:
        """Return the entries about the router in a result's config.json, for layers with so many experts.

        is_plain: whether the family's own classes build layers of so many experts.
        """
        largest = max(counts)
        per_token = getattr(family, self.per_token[0])  # a config may omit its family's default
        if is_plain and self.groups and (count := self.group_count(family)) > 1:
            per_token = min(per_token, positive(family, self.groups.per_token) * (largest // count))
        written = (self.per_token[0], *(key for key in self.per_token[1:] if key in config))
        return dict.fromkeys(written, min(per_token, largest))


@dataclass(frozen=True)
class SigmoidTopK(TopK):
    """The k experts with the largest sums of the logit's sigmoid and a bias. The sigmoids are the weights."""

    scores: ClassVar[str] = "sigmoid"
    added_to_sum: float = 1e-20
    """Number that is added to the sum of the weights by which they are divided."""

    def layer(self, config: Mapping[str, Any], family: Any, index: int, experts: int, width: int) -> MoeConfig:
        """Return the config of a layer with so many experts of this width and this router."""
        return replace(super().layer(config, family, index, experts, width), added_to_sum=self.added_to_sum)


@dataclass(frozen=True)
class InputScaling(SigmoidTopK):
    """The sigmoid of an expert's router logit multiplies the expert's input instead of its output."""

    def layer(self, config: Mapping[str, Any], family: Any, index: int, experts: int, width: int) -> MoeConfig:
        """Return the config of a layer with so many experts of this width and this router."""
        return replace(super().layer(config, family, index, experts, width), scales_inputs=True)


@dataclass(frozen=True)
class NormedInput(TopK):
    """The router has a norm of its own, and each expert a factor by which its normalized weight is multiplied.

    The shared expert has norms of its own too, and so have the routed experts.
    """

    weight: str = "router.proj.weight"
    per_token: tuple[str, ...] = ("top_k_experts",)
    normalized: bool = True
    input_scale: str = "router.scale"
    weight_scale: str = "router.per_expert_scale"

    @property
    def names(self) -> RouterNames:
        """Names of the router's tensors within the block."""
        return super().names._replace(input_scale=self.input_scale, weight_scale=self.weight_scale)

    def layer(self, config: Mapping[str, Any], family: Any, index: int, experts: int, width: int) -> MoeConfig:
        """Return the config of a layer with so many experts of this width and this router."""
        made = super().layer(config, family, index, experts, width)
        return replace(made, scales_weights=True, own_norms=True)


@dataclass(frozen=True)
class BiasedLogits(TopK):
    """Each expert has a bias that is added to its router logit."""

    bias: str = "router.bias"
    """Name of the bias within the block."""

    @property
    def names(self) -> RouterNames:
        """Names of the router's tensors within the block."""
        return super().names._replace(logit_bias=self.bias)


@dataclass(frozen=True)
class LeastSum(TopK):
    """Chosen probabilities are divided by their sum, or by a minimum divisor. The choice bias is [1, experts]."""

    normalized: bool = True
    least_sum: str = "moe_norm_min"
    """Config key of the minimum divisor."""

    def choice_bias_shape(self, experts: int) -> tuple[int, ...]:
        """Return the shape of the tensor that is added to scores for the choice of experts."""
        return 1, experts

    def layer(self, config: Mapping[str, Any], family: Any, index: int, experts: int, width: int) -> MoeConfig:
        """Return the config of a layer with so many experts of this width and this router."""
        least = number(self.least_sum, getattr(family, self.least_sum))
        return replace(super().layer(config, family, index, experts, width), least_sum=least)


@dataclass(frozen=True)
class SparseMixer(TopK):
    """Two experts are chosen one after the other by sparsemixer (engine/decoder/routing.py)."""

    least: ClassVar[int] = 2
    jitter: str = "router_jitter_noise"
    """Config key of ε."""

    def layer(self, config: Mapping[str, Any], family: Any, index: int, experts: int, width: int) -> MoeConfig:
        """Return the config of a layer with this router. Raises UnsupportedError for another number of experts per token."""
        made, key = super().layer(config, family, index, experts, width), self.per_token[0]
        if (used := positive(family, key)) != self.least:
            raise UnsupportedError(
                f"config.json: {key} is {used}; the router of a {config['model_type']} takes {self.least}"
            )
        return replace(made, mixer_jitter=number(self.jitter, getattr(family, self.jitter)))


@dataclass(frozen=True)
class GateNetwork(TopK):
    """A router of two layers, logits = W2·tanh(W1·x), with noisy top-k in training.

    `weight` is W2 [experts, hidden units]. There are as many hidden units as experts, unless config.json has
    GATE_WIDTH_KEY: removing an expert removes its row of W2 but keeps the hidden units, on which all other experts depend.
    """

    hidden: str = "gate.gate_network.0.weight"
    """Name within the block of W1 [hidden units, D]."""
    noise: str = "gate.weight_noise.weight"
    """Name within the block of W_noise [experts, D] of noisy top-k (engine/decoder/routing.py)."""
    units: str = "num_experts"
    """Config key of the number of hidden units, if GATE_WIDTH_KEY is missing."""
    is_noisy: str = "gate_add_noise"
    """Config key of the flag for W_noise."""
    epsilon: str = "gate_noise_epsilon"
    """Config key of the minimum deviation of the noise."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Config keys that the part reads."""
        return (*super().reads, self.is_noisy, self.epsilon, GATE_WIDTH_KEY)

    @property
    def names(self) -> RouterNames:
        """Names of the router's tensors within the block."""
        return super().names._replace(hidden=self.hidden, noise=self.noise)

    def layer(self, config: Mapping[str, Any], family: Any, index: int, experts: int, width: int) -> MoeConfig:
        """Return the config of a layer with so many experts of this width and this router."""
        made, is_noisy = super().layer(config, family, index, experts, width), getattr(family, self.is_noisy, True)
        epsilon = number(self.epsilon, getattr(family, self.epsilon, 1e-2)) if is_noisy else None
        return replace(made, gate_network_width=self._width(family), noise_epsilon=epsilon)

    def _width(self, family: Any) -> int:
        recorded = getattr(family, GATE_WIDTH_KEY, None) is not None
        return positive(family, GATE_WIDTH_KEY if recorded else self.units)

    def with_counts(self, config: Mapping[str, Any], family: Any, counts: Sequence[int], is_plain: bool) -> dict[str, Any]:
        """Return the entries about the router in a result's config.json, including its hidden units, which do not change."""
        changed, width = super().with_counts(config, family, counts, is_plain), self._width(family)
        return changed if width == max(counts) else changed | {GATE_WIDTH_KEY: width}
