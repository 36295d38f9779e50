"""Budgets, and the selection of the experts that stay, from scores: global ranking (DiEP §4.2), per layer, or uniform.

`--uniform` is scope "uniform": every layer keeps the same number of experts, so that the result is a plain checkpoint
of its family. That number is the budget applied to a layer of average size. Scope "global" (DiEP) ranks the experts of
all layers together, and scope "layer" removes the same share of each layer. The scopes of hidden units are in
unit_selection.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.errors import OptionError
from engine.options import check, option

if TYPE_CHECKING:
    from torch import Tensor

    from engine.families.config import DecoderConfig
    from engine.families.layer_config import MoeConfig

REMOVE = "What to remove"
SCOPES = ("global", "layer", "uniform")
GRANULARITIES = ("expert", "unit", "both")
INCLUDED = ("shared", "dense")
LARGEST_MULTIPLE = 64
"""Largest default of `unit_multiple`: tiles of vLLM's kernels have 64 units, packed groups 32 or 64 weights."""


def least_experts(asked: int, config: DecoderConfig, usual: int) -> int:
    """Return the fewest experts that a layer keeps: `asked` or, for 0, the larger of `usual` and the router's minimum.

    Raises OptionError for fewer than the router takes.
    """
    needed = config.architecture.least_experts
    if asked == 0:
        return max(needed, usual)
    if asked < needed:
        name = config.architecture.model_type
        raise OptionError(f"min-experts is {asked}; the router of the family {name} takes {needed} in each layer")
    return asked


@dataclass(frozen=True)
class Budget:
    """How many experts may stay, and over which experts scores are ranked."""

    sparsity: float | None = option(None, group=REMOVE, help="Share of the experts' parameters to remove, between 0 and 1.")
    experts: int | None = option(
        None, group=REMOVE, help="Experts to keep per layer, on average for scope global, instead of --sparsity."
    )
    scope: str = option(
        "global",
        group=REMOVE,
        choices=SCOPES,
        help="Rank the experts of all layers together (global), or remove the same share of each layer (layer).",
    )
    """How the budget is shared among layers: "global" ranks the experts of all layers together; "layer" removes the
    same share of each layer; "uniform" keeps the same count in each layer, that of a layer of average size.
    """
    min_experts: int = option(1, group=REMOVE, help="Fewest experts that a layer keeps.")
    granularity: str = option(
        "expert",
        group=REMOVE,
        choices=GRANULARITIES,
        help="Remove whole experts, hidden units of experts, or both: an expert that loses all its units leaves.",
    )
    unit_multiple: int | None = option(
        None,
        group=REMOVE,
        minimum=1,
        metavar="N",
        unset=f"a power of two up to {LARGEST_MULTIPLE}",
        help="Experts keep multiples of N hidden units.",
    )
    include: tuple[str, ...] = option(
        (),
        group=REMOVE,
        choices=INCLUDED,
        several="commas",
        unset="routed experts alone",
        help="Also remove hidden units of shared experts (shared) and of the FFNs of layers without experts (dense).",
    )

    def __post_init__(self) -> None:
        check(self)

    @property
    def least_experts(self) -> int | None:
        """Fewest experts that a layer keeps where units and whole experts leave; None where all experts stay."""
        return self.min_experts if self.granularity == "both" else None

    def check(self, counts: Mapping[int, int]) -> None:
        """Raise OptionError unless a model with `counts` experts by layer can be cut to this budget."""
        if (self.sparsity is None) == (self.experts is None):
            raise OptionError("give either a sparsity or a number of experts")
        self.check_sparsity()
        largest = max(counts.values())
        if self.experts is not None and not 1 <= self.experts < largest:
            raise OptionError(f"cannot keep {self.experts} experts a layer; the layers have up to {largest}")
        if self.min_experts < 1:
            raise OptionError(f"min-experts is {self.min_experts}; every layer needs at least one expert")
        if self.scope != "global":
            self._check_each(counts)
            return
        least = sum(min(self.min_experts, count) for count in counts.values())
        if self.kept_in_all(counts) < least:
            raise OptionError(
                f"only {self.kept_in_all(counts)} experts would be kept, and {len(counts)} layers with at least "
                f"{self.min_experts} each need {least}; lower the sparsity or --min-experts"
            )

    def check_sparsity(self) -> None:
        """Raise OptionError for a share that would remove nothing or everything."""
        if self.sparsity is not None and not 0.0 < self.sparsity < 1.0:
            raise OptionError(f"sparsity is {self.sparsity}; it must lie strictly between 0 and 1")

    def _check_each(self, counts: Mapping[int, int]) -> None:
        for layer, kept in self.kept_per_layer(counts).items():
            if kept < min(self.min_experts, counts[layer]):
                raise OptionError(
                    f"layer {layer} would keep {kept} of {counts[layer]} experts, under the minimum of "
                    f"{self.min_experts}; lower the sparsity or --min-experts"
                )
            if kept > counts[layer]:
                raise OptionError(
                    f"a uniform result would keep {kept} experts in each layer, and layer {layer} has {counts[layer]}; "
                    "raise the sparsity or leave out --uniform"
                )

    def kept_per_layer(self, counts: Mapping[int, int]) -> dict[int, int]:
        """Return the number of kept experts of each layer, for scopes in which it does not depend on scores."""
        assert self.scope != "global"
        if self.scope == "uniform":
            average = round(sum(counts.values()) / len(counts))
            return dict.fromkeys(counts, self._kept_of(average) if self.experts is None else self.experts)
        return {layer: self._kept_of(count) for layer, count in counts.items()}

    def kept_in_all(self, counts: Mapping[int, int]) -> int:
        """Return the number of experts kept for scope "global": Σ N_l − round(r · Σ N_l), or Σ min(experts, N_l)."""
        total = sum(counts.values())
        if self.experts is not None:
            return sum(min(self.experts, count) for count in counts.values())
        assert self.sparsity is not None
        return total - round(self.sparsity * total)

    def _kept_of(self, count: int) -> int:
        if self.experts is not None:
            return min(self.experts, count)
        assert self.sparsity is not None
        return count - round(self.sparsity * count)

    def select(
        self, scores: Mapping[int, Tensor], groups: Mapping[int, Sequence[int]] | None = None, *, even: bool = False
    ) -> dict[int, list[int]]:
        """Return the kept experts of each layer, ascending. Ties go to the earlier layer and the lower index.

        groups: the group of each expert, by layer, for layers that have groups. Scope "uniform" keeps an equal number
        of each group. even: whether the other scopes do so too. One expert of each group then stays or goes together with
        those of the other groups, by their mean score, and a few experts fewer than the budget allows may stay.
        """
        counts = {layer: len(values) for layer, values in scores.items()}
        self.check(counts)
        ranked = {layer: values.argsort(descending=True, stable=True).tolist() for layer, values in scores.items()}
        together = 1
        if groups and (even or self.scope == "uniform"):
            ranked = {layer: _in_turns(order, groups[layer]) for layer, order in ranked.items()}
            together = most_groups(groups) if even else 1
        if self.scope != "global":
            number = {layer: kept - kept % together for layer, kept in self.kept_per_layer(counts).items()}
            return {layer: sorted(order[: number[layer]]) for layer, order in ranked.items()}
        # Each layer first keeps its minimum by score. The rest of the budget goes to the best of all other experts.
        kept = {layer: order[: min(self.min_experts, len(order))] for layer, order in ranked.items()}
        others = [
            (-float(scores[layer][own].double().mean()), layer, own)
            for layer, order in ranked.items()
            for own in _pieces(order[len(kept[layer]) :], together)
        ]
        left = self.kept_in_all(counts) - sum(map(len, kept.values()))
        for _, layer, own in sorted(others)[: left // together]:
            kept[layer] += own
        return {layer: sorted(experts) for layer, experts in kept.items()}


def check_groups(budget: Budget, layers: Mapping[int, MoeConfig]) -> None:
    """Raise OptionError where a uniform result would have unequal numbers of experts in the groups of a layer.

    A plain checkpoint of such a family stores only the number of groups. Groups with sigmoid scores are ranked by the
    sum of their two best experts (arXiv 2412.19437, §2.1.2), so transformers requires at least two experts per group.
    """
    if budget.scope != "uniform":
        return
    kept = budget.kept_per_layer({layer: moe.experts for layer, moe in layers.items()})
    for layer, moe in layers.items():
        groups, least = len(set(moe.groups)) or 1, 2 if moe.scores == "sigmoid" else 1
        if kept[layer] % groups or kept[layer] < groups * least:
            raise OptionError(
                f"a uniform result would keep {kept[layer]} experts in layer {layer}, and its {groups} groups need as many "
                f"each, at least {least}; keep a multiple of {groups} (--experts), or leave out --uniform"
            )


def most_groups(groups: Mapping[int, Sequence[int]]) -> int:
    """Return the largest number of groups of a layer. groups: the group of each expert, by layer."""
    return max(len(set(own)) for own in groups.values())


def _pieces(order: Sequence[int], size: int) -> list[list[int]]:
    """Return the experts in pieces of one size."""
    return [list(order[start : start + size]) for start in range(0, len(order), size)]


def _in_turns(order: Sequence[int], groups: Sequence[int]) -> list[int]:
    """Return the experts best first, taking one of each group in turn.

    Any multiple of the number of groups then has equally many experts of each group.
    """
    turn: dict[int, int] = {}
    turns = {}
    for expert in order:
        turns[expert] = turn[groups[expert]] = turn.get(groups[expert], -1) + 1
    return sorted(order, key=lambda expert: turns[expert])


def moe_configs(config: DecoderConfig) -> dict[int, MoeConfig]:
    """Return the mixture config of each MoE layer, by decoder layer index."""
    return {index: moe for index, layer in enumerate(config.layers) if (moe := layer.moe) is not None}


def groups_of(config: DecoderConfig) -> dict[int, tuple[int, ...]]:
    """Return the group of each expert by decoder layer index; empty for a model without groups."""
    return {index: moe.groups for index, moe in moe_configs(config).items() if moe.groups}
