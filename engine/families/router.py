"""The router as a part of a family: names of its tensors, and the rule by which a token's experts are chosen and weighed.

The rules themselves are in engine/decoder/routing.py; a part says in a `MoeConfig` which of them a layer has.
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
"""Config key of this project: hidden units of a gate network that are not as many as experts."""


class RouterNames(NamedTuple):
    """Names within the block of the tensors of a router; None for those that it does not have."""

    weight: str
    """The matrix that has one row for each expert."""
    logit_bias: str | None = None
    """One number for each expert that is added to its router logit."""
    choice_bias: str | None = None
    """One number for each expert that is added to its score to choose it, and never weighs it."""
    hidden: str | None = None
    """W1 [hidden units, D] of a gate network."""
    noise: str | None = None
    """W_noise [experts, D] of noisy top-k."""


@dataclass(frozen=True)
class Groups:
    """Experts are in groups, and a token takes its experts from the best few."""

    count: str = "n_group"
    """Config key of the number of groups."""
    per_token: str = "topk_group"
    """Config key of the number of groups that a token's experts are of."""
    only_if: tuple[str, str] | None = None
    """Config key and the value under which there are groups; None where there always are."""

    def number(self, family: Any) -> int:
        """How many groups there are; 1 where experts are in no groups."""
        if self.only_if and getattr(family, self.only_if[0], None) != self.only_if[1]:
            return 1
        return natural(family, self.count) or 1

    def of_experts(
        self, config: Mapping[str, Any], family: Any, index: int, experts: int, per_token: int
    ) -> tuple[int, ...]:
        """The group of each of a layer's experts: as `block_configs` says, or all of equal size, one after the other.

        Empty where there are no groups. Raises CheckpointError for numbers that do not fit each other.
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
    """What the router makes of its logits: "softmax" over all experts, or the "sigmoid" of each."""
    least: ClassVar[int] = 1
    """Experts that a layer must keep: the family's own router always takes so many."""
    weight: str = "gate.weight"
    """Name within the block of the matrix that has one row for each expert."""
    per_token: tuple[str, ...] = ("num_experts_per_tok",)
    """Config keys of k; all but the first say the same once more, and may be missing."""
    normalized: bool = False
    """The weights of the chosen experts sum to 1, whatever the config's `norm_topk_prob`."""
    scale: str | None = None
    """Config key of the factor that routed weights are multiplied by: one number, or one for each layer."""
    in_float32: bool = False
    """The router's product is taken in float32 whatever the model's dtype."""
    choice_bias: str | None = None
    """Name within the block of what is added to scores to choose experts, and never weighs them."""
    groups: Groups | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        """Config keys that are read."""
        return (*self.per_token, *keys(self.scale))

    @property
    def names(self) -> RouterNames:
        """Names within the block."""
        return RouterNames(self.weight, choice_bias=self.choice_bias)

    def choice_bias_shape(self, experts: int) -> tuple[int, ...]:
        """The shape of what is added to scores to choose experts."""
        return (experts,)

    def group_count(self, family: Any) -> int:
        """How many groups of experts there are; 1 where experts are in no groups."""
        return 1 if self.groups is None else self.groups.number(family)

    def layer(self, config: Mapping[str, Any], family: Any, index: int, experts: int, width: int) -> MoeConfig:
        """A layer of so many experts of this width, with this router."""
        per_token = positive(family, self.per_token[0])
        groups = self.groups.of_experts(config, family, index, experts, per_token) if self.groups else ()
        return MoeConfig(
            experts=experts,
            # Where pruning left fewer than k, the layer's own top-k shrinks to what is left.
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
        """What a result's config.json says of the router where layers have so many experts.

        is_plain: the family's own classes build layers of so many experts.
        """
        largest = max(counts)
        per_token = getattr(family, self.per_token[0])  # a config may leave its family's default out
        if is_plain and self.groups and (count := self.group_count(family)) > 1:
            per_token = min(per_token, positive(family, self.groups.per_token) * (largest // count))
        written = (self.per_token[0], *(key for key in self.per_token[1:] if key in config))
        return dict.fromkeys(written, min(per_token, largest))


@dataclass(frozen=True)
class SigmoidTopK(TopK):
    """The k experts with the largest sums of the sigmoid of a logit and a bias; the sigmoids weigh them."""

    scores: ClassVar[str] = "sigmoid"


@dataclass(frozen=True)
class InputScaling(SigmoidTopK):
    """The sigmoid of an expert's router logit multiplies what the expert is given, and nothing that it gives."""

    def layer(self, config: Mapping[str, Any], family: Any, index: int, experts: int, width: int) -> MoeConfig:
        """A layer of so many experts of this width, with this router."""
        return replace(super().layer(config, family, index, experts, width), scales_inputs=True)


@dataclass(frozen=True)
class BiasedLogits(TopK):
    """Each expert has a number that is added to its router logit."""

    bias: str = "router.bias"
    """Its name within the block."""

    @property
    def names(self) -> RouterNames:
        """Names within the block."""
        return super().names._replace(logit_bias=self.bias)


@dataclass(frozen=True)
class LeastSum(TopK):
    """Chosen probabilities are divided by their sum or by a least divisor; the choice bias is [1, experts]."""

    normalized: bool = True
    least_sum: str = "moe_norm_min"
    """Config key of the least divisor."""

    def choice_bias_shape(self, experts: int) -> tuple[int, ...]:
        """The shape of what is added to scores to choose experts."""
        return 1, experts

    def layer(self, config: Mapping[str, Any], family: Any, index: int, experts: int, width: int) -> MoeConfig:
        """A layer of so many experts of this width, with this router."""
        least = number(self.least_sum, getattr(family, self.least_sum))
        return replace(super().layer(config, family, index, experts, width), least_sum=least)


@dataclass(frozen=True)
class SparseMixer(TopK):
    """Two experts are chosen one after the other by sparsemixer (engine/decoder/routing.py)."""

    least: ClassVar[int] = 2
    jitter: str = "router_jitter_noise"
    """Config key of ε."""

    def layer(self, config: Mapping[str, Any], family: Any, index: int, experts: int, width: int) -> MoeConfig:
        """A layer with this router. Raises UnsupportedError for another number of experts per token."""
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
    GATE_WIDTH_KEY: removing an expert takes its row out of W2 and leaves the hidden units, on which all others depend.
    """

    hidden: str = "gate.gate_network.0.weight"
    """Name within the block of W1 [hidden units, D]."""
    noise: str = "gate.weight_noise.weight"
    """Name within the block of W_noise [experts, D] of noisy top-k (engine/decoder/routing.py)."""
    units: str = "num_experts"
    """Config key of the number of hidden units where GATE_WIDTH_KEY is missing."""
    is_noisy: str = "gate_add_noise"
    """Config key that says whether there is a W_noise."""
    epsilon: str = "gate_noise_epsilon"
    """Config key of the least deviation of the noise."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Config keys that are read."""
        return (*super().reads, self.is_noisy, self.epsilon, GATE_WIDTH_KEY)

    @property
    def names(self) -> RouterNames:
        """Names within the block."""
        return super().names._replace(hidden=self.hidden, noise=self.noise)

    def layer(self, config: Mapping[str, Any], family: Any, index: int, experts: int, width: int) -> MoeConfig:
        """A layer of so many experts of this width, with this router."""
        made, is_noisy = super().layer(config, family, index, experts, width), getattr(family, self.is_noisy, True)
        epsilon = number(self.epsilon, getattr(family, self.epsilon, 1e-2)) if is_noisy else None
        return replace(made, gate_network_width=self._width(family), noise_epsilon=epsilon)

    def _width(self, family: Any) -> int:
        recorded = getattr(family, GATE_WIDTH_KEY, None) is not None
        return positive(family, GATE_WIDTH_KEY if recorded else self.units)

    def with_counts(self, config: Mapping[str, Any], family: Any, counts: Sequence[int], is_plain: bool) -> dict[str, Any]:
        """What a result's config.json says of the router: also its hidden units, which stay as they are."""
        changed, width = super().with_counts(config, family, counts, is_plain), self._width(family)
        return changed if width == max(counts) else changed | {GATE_WIDTH_KEY: width}
