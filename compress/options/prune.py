"""Options of `compress prune` and `compress merge`, with their defaults: budget, method, search and later training."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from compress.methods import DEFAULT_GRANULARITY, DEFAULT_MERGE_METHOD, DEFAULT_METHODS, METHODS, methods_of
from compress.options.job import JobOptions
from compress.options.quantize import QuantiserOptions
from compress.options.refit import RefitOptions
from compress.options.training import RecoverOptions, WholeRecoveryOptions
from compress.plans.selection import REMOVE, Budget
from engine.errors import OptionError
from engine.options import REQUIRED, changed, check, declared_part, left_out, like, option, part, unlisted

DIEP = "DiEP"
MERGE = "What to merge"
SUBSET_LIMIT = 10_000
"""A layer with at most this many subsets is searched exhaustively: always with 8 experts; with 16 where 12 stay, not where
8 stay.
"""


class SearchDefaults(NamedTuple):
    """Defaults of a relaxation for options of DiEP's search that are None."""

    learning_rate: float
    start: str
    """Initial α: "zero", or "fisher" for gate Fisher."""
    score: str
    """Ranking score: "raw" for α·β, or `normalised` for N·ᾱ·β."""
    pressure: float = 0.0
    """μ: weight of the mean gate in the loss, which penalizes every open gate."""


SEARCH_DEFAULTS = {
    "paper": SearchDefaults(5e-3, "zero", "normalised"),
    "routed": SearchDefaults(5e-3, "zero", "raw"),
    "gated": SearchDefaults(3e-2, "fisher", "raw", pressure=0.5),
}
"""Defaults by relaxation."""
BY_RELAXATION = "by relaxation"


class SearchAblation(NamedTuple):
    """One row of SEARCH_ABLATIONS: the scores that are left of DiEP's search (DiEP, table 2)."""

    trains_alpha: bool = True
    trains_beta: bool = True
    ranks_frequency: bool = False
    """Whether the ranking score is f·β, with f the share of tokens routed to an expert, in place of α·β."""
    fixes_beta: bool = False
    """Whether β is `fixed_beta`; otherwise it starts at 1."""


SEARCH_ABLATIONS = {
    "alpha": SearchAblation(trains_beta=False),
    "beta": SearchAblation(trains_alpha=False, ranks_frequency=True),
    "fixed-beta": SearchAblation(trains_beta=False, fixes_beta=True),
}


def default_scopes() -> str:
    """Return the default scope of most methods, followed by the scopes of methods with another default."""
    first, *others = ((name, METHODS[name].scopes[0]) for name in methods_of("prune"))
    return "; ".join([first[1], *(f"{name}: {scope}" for name, scope in others if scope != first[1])])


@dataclass(frozen=True)
class DiepOptions:
    """Options of DiEP's search. None stands for the relaxation's own default."""

    relaxation: str = option("gated", group=DIEP, choices=tuple(SEARCH_DEFAULTS), help="The relaxed layer.")
    epochs: int = option(10, group=DIEP, minimum=0, help="Passes over the text.")
    batch_size: int = option(16, group=DIEP, minimum=1, help="Sequences per step.")
    learning_rate: float | None = option(None, group=DIEP, unset=BY_RELAXATION, help="Learning rate of α and β.")
    alpha_learning_rate: float | None = option(
        None, group=DIEP, unset="--learning-rate", help="Learning rate η_α of the experts' scores α."
    )
    beta_learning_rate: float | None = option(
        None, group=DIEP, unset="--learning-rate", help="Learning rate η_β of the layers' scores β."
    )
    reconstruction_weight: float = option(0.01, group=DIEP, help="Weight λ of the reconstruction loss.")
    pressure: float | None = option(
        None, group=DIEP, unset=BY_RELAXATION, help="Weight μ of the mean gate, for relaxation gated."
    )
    start: str | None = option(
        None,
        group=DIEP,
        unset=BY_RELAXATION,
        choices=("zero", "fisher"),
        help="Where α starts: at zero, or from gate Fisher.",
    )
    score: str | None = option(
        None,
        group=DIEP,
        unset=BY_RELAXATION,
        choices=("raw", "normalised"),
        help="Rank experts by α·β (`raw`) or by N·softmax(α)·β (`normalised`).",
    )
    recenter: bool = option(
        True,
        group=DIEP,
        off="no-recenter",
        help="After each step, subtract the mean of a layer's α where a constant added to all of them changes nothing.",
    )
    ablation: str | None = option(
        None,
        group=DIEP,
        choices=tuple(SEARCH_ABLATIONS),
        help="Learn α alone; learn β alone and rank by frequency·β; or learn α beside a β that is fixed (`--fixed-beta`).",
    )
    fixed_beta: tuple[float, ...] = option(
        (1.5, 0.5),
        group=DIEP,
        several="commas",
        metavar="β",
        unset="1.5,0.5",
        help="For ablation fixed-beta: β of the first and of the last MoE layer, with equal steps between them.",
    )
    seed: int = 0

    def __post_init__(self) -> None:
        check(self)

    def check(self) -> None:
        """Raise OptionError for a value with which no search is possible."""
        filled = self.filled()
        for name in ("learning_rate", "alpha_learning_rate", "beta_learning_rate", "reconstruction_weight", "pressure"):
            value = getattr(filled, name)
            if not 0.0 <= value < math.inf:
                raise OptionError(f"{name.replace('_', '-')} is {value}; it must be a number from 0")
        if len(self.fixed_beta) != 2 or not all(0.0 < beta < math.inf for beta in self.fixed_beta):
            raise OptionError("fixed-beta must be two numbers above 0: β of the first and of the last MoE layer")

    @property
    def trained(self) -> SearchAblation:
        """Return which scores are trained; both without an ablation."""
        return SearchAblation() if self.ablation is None else SEARCH_ABLATIONS[self.ablation]

    def filled(self) -> DiepOptions:
        """Return these options with every None replaced by its default, which most have from the relaxation."""
        default = SEARCH_DEFAULTS[self.relaxation]
        if not self.trained.trains_alpha:
            default = default._replace(start="zero")
        rate = default.learning_rate if self.learning_rate is None else self.learning_rate
        values = default._asdict() | {"alpha_learning_rate": rate, "beta_learning_rate": rate}
        return replace(self, **{name: value for name, value in values.items() if getattr(self, name) is None})


@dataclass(frozen=True, kw_only=True)
class PruneOptions(JobOptions):
    """Options of one pruning run; the budget is None only with a ready-made plan."""

    writes_gguf: ClassVar[bool] = True
    output: Path = like(
        JobOptions, "output", help="Directory of the result; of a GGUF file also a GGUF file, if the name ends in .gguf."
    )
    budget: Budget | None = field(
        metadata=declared_part(
            Budget,
            sparsity=changed(
                several="commas",
                metavar="R",
                help="Share of the experts' parameters to remove, between 0 and 1. Several make a sweep: a result for each, "
                "and then their comparison.",
            ),
            scope=changed(
                None,
                choices=("global", "layer", "expert"),
                unset=default_scopes(),
                help="Rank the experts or hidden units of all layers together (global), remove the same share of each layer "
                "(layer), or keep the same number of hidden units in every expert (expert).",
            ),
            granularity=changed(None, unset="that of the method"),
            min_experts=changed(0, unset="experts per token"),
        )
    )
    method: str = option(
        DEFAULT_METHODS["expert"],
        group=REMOVE,
        choices=methods_of("prune"),
        several="commas",
        unset=f"{DEFAULT_METHODS[DEFAULT_GRANULARITY]}; {DEFAULT_METHODS['expert']} with an option of whole experts, diep "
        "with one of its own",
        help="Criterion. Several make a sweep.",
    )
    merge: str = option(
        "none",
        group=REMOVE,
        choices=("none", "cka"),
        help="Drop the removed experts (none), or merge each into the most similar expert that stays (cka).",
    )
    naee_limit: int = option(
        SUBSET_LIMIT,
        group="NAEE",
        minimum=0,
        help="Most subsets of a layer's experts to compare; where there are more, experts are removed one by one.",
    )
    diep: DiepOptions = part(DiepOptions)
    refit: RefitOptions = part(RefitOptions)
    recover: RecoverOptions = part(RecoverOptions)
    distill: WholeRecoveryOptions = field(default_factory=WholeRecoveryOptions)
    plan: Path | None = option(None, group=REMOVE, help="Carry out this plan instead of making one.")
    quantiser: QuantiserOptions | None = field(
        default=None,
        metadata=declared_part(
            QuantiserOptions,
            bits=changed(help="Also round the remaining weights to so many bits."),
            experts_only=left_out(),
            quantize_head=left_out(),
            embedding_bits=left_out(),
        ),
    )
    shard: bool = option(
        False, group="Machine", help="For methods that need gradients: spread MODEL over the processes (FSDP2)."
    )

    def deciding(self) -> dict[str, Any]:
        """Return the options that decide the result, without the memory placement of each process."""
        return {name: value for name, value in super().deciding().items() if name != "shard"}

    def recorded(self) -> dict[str, Any]:
        """Return the deciding options with the search's defaults filled in too."""
        return replace(self, diep=self.diep.filled()).deciding()


@dataclass(frozen=True, kw_only=True)
class MergeOptions(PruneOptions):
    """Options of one merging run: a pruning in which every expert becomes part of an expert that stays."""

    writes_gguf: ClassVar[bool] = False
    output: Path = like(JobOptions, "output")
    budget: Budget | None = field(
        metadata=declared_part(
            Budget,
            sparsity=left_out(),
            experts=changed(REQUIRED, group=MERGE, help="Experts per layer of the result."),
            scope=left_out("layer"),
            min_experts=left_out(),
            granularity=left_out(),
            unit_multiple=left_out(),
            include=left_out(),
        )
    )
    method: str = option(DEFAULT_MERGE_METHOD, group=MERGE, choices=methods_of("merge"), help="How experts are grouped.")
    merge: str = unlisted(PruneOptions, "merge")
    naee_limit: int = unlisted(PruneOptions, "naee_limit")
    diep: DiepOptions = unlisted(PruneOptions, "diep")
    refit: RefitOptions = part(RefitOptions, refit=left_out(), ridge=left_out(), correct=changed(False, unset=None))
    plan: Path | None = unlisted(PruneOptions, "plan")
    quantiser: QuantiserOptions | None = unlisted(PruneOptions, "quantiser")
    shard: bool = unlisted(PruneOptions, "shard")
