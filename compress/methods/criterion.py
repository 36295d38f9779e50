"""What a method gives, as the value that its row in METHODS names: a plan, its costs, and what it leaves in the artifact."""

from __future__ import annotations

import gc
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from calibrate.statistics import LayerStatistics, Statistics
from compress.cost.phases import PassCosts, Phase, statistics_phase
from compress.methods import METHODS
from compress.methods.alignment import held_bytes as aligning_bytes
from compress.methods.cka import REMOVED_EXPERTS
from compress.methods.groups import Group
from compress.methods.inputs import MethodRun
from compress.methods.merging import merge_groups, merged_plan
from compress.options.plan_run import RunOptions
from compress.options.prune import PruneOptions
from compress.plans.plan import Plan, pruning_plan
from compress.plans.selection import groups_of, moe_configs
from compress.run.job import statistics_of
from engine.families.config import DecoderConfig
from engine.passes.memory_need import MemoryDemand

Kept = Mapping[int, Sequence[int]]
"""Experts that stay, ascending, by decoder layer index."""


def _unchanged(demand: MemoryDemand, options: PruneOptions, config: DecoderConfig) -> MemoryDemand:
    return demand


@dataclass(frozen=True)
class Criterion:
    """A method's functions; the facts about it are in its row of METHODS."""

    plan: Callable[[MethodRun], Plan]
    """Decides, from a run's options and inputs. Long steps are kept in the run's work directory."""
    phases: Callable[[PassCosts, RunOptions], Iterator[Phase]]
    """The work of `plan`, counted from the config alone."""
    memory: Callable[[MemoryDemand, PruneOptions, DecoderConfig], MemoryDemand] = _unchanged
    """What `plan` holds in memory: the demand of any run, changed to its own."""
    figures: Callable[[MethodRun], Mapping[str, object]] = lambda run: {}
    """Its own figures of the result."""
    add_files: Callable[[MethodRun, Path], None] = lambda run, directory: None
    """Writes its own files into the artifact's directory."""


def criterion_of(method: str) -> Criterion:
    """The functions of a method of METHODS; its file is imported now."""
    found: Criterion = pkgutil.resolve_name(METHODS[method].code)
    return found


# Removing experts


def kept_plan(run: MethodRun, kept: Kept) -> Plan:
    """The plan that keeps these experts; the others are dropped or merged into them, as the options say."""
    join = REMOVED_EXPERTS[run.options.merge]
    if join is None:
        return pruning_plan(kept)
    statistics = statistics_of(run)
    return merged_plan(run, {index: join(statistics.layers[index], experts) for index, experts in kept.items()})


def by_scores(scores: Callable[[MethodRun], Mapping[int, Tensor]]) -> Callable[[MethodRun], Plan]:
    """A plan that keeps the experts with the highest scores, as many as the budget allows.

    scores: a run to a score for each expert, [N] by decoder layer index; higher stays.
    """

    def plan(run: MethodRun) -> Plan:
        budget = run.prepared.budget
        assert budget is not None
        scored = scores(run)
        if run.options.shard:
            gc.collect()  # the parts of a model in pieces know each other in circles
        return kept_plan(run, budget.select(scored, groups_of(run.prepared.checkpoint.config)))

    return plan


def calibrating(costs: PassCosts, options: RunOptions) -> Iterator[Phase]:
    """The phase of a method that needs statistics and nothing else."""
    yield statistics_phase("calibrating", costs)


def statistic(score: Callable[[LayerStatistics], Tensor]) -> Criterion:
    """The criterion of a score that one layer's statistics give."""
    return Criterion(by_scores(lambda run: layer_scores(score, statistics_of(run))), calibrating)


def layer_scores(score: Callable[[LayerStatistics], Tensor], statistics: Statistics) -> dict[int, Tensor]:
    """Scores of every MoE layer, [N] by decoder layer index."""
    return {index: score(layer) for index, layer in statistics.layers.items()}


# Merging experts


def grouping(groups: Callable[[LayerStatistics, int], list[Group]]) -> Criterion:
    """The criterion of a merging method: one layer's statistics and a number of experts to as many groups."""

    def plan(run: MethodRun) -> Plan:
        budget = run.prepared.budget
        assert budget is not None and budget.experts is not None
        return merged_plan(run, merge_groups(groups, statistics_of(run), budget.experts))

    return Criterion(plan, calibrating, aligning)


def aligning(demand: MemoryDemand, options: PruneOptions, config: DecoderConfig) -> MemoryDemand:
    """The demand of a run that also aligns and averages experts."""
    width = max(moe.expert_width for moe in moe_configs(config).values())
    return demand.with_other(aligning_bytes(width, config.hidden_size))
