"""The interface of a method, `Criterion`: its plan, its costs, and its files in the artifact."""

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
from compress.methods.merging import check_averaging, merge_groups, merged_plan
from compress.options.plan_run import RunOptions
from compress.options.prune import PruneOptions
from compress.plans.plan import Plan, pruning_plan
from compress.plans.selection import groups_of, moe_configs
from compress.run.job import statistics_of
from engine.families.config import DecoderConfig
from engine.passes.memory_need import MemoryDemand

Kept = Mapping[int, Sequence[int]]
"""Indices of the kept experts, ascending, by decoder layer index."""


def _unchanged(demand: MemoryDemand, options: PruneOptions, config: DecoderConfig) -> MemoryDemand:
    return demand


@dataclass(frozen=True)
class Criterion:
    """The functions of a method; facts about it are in its row of METHODS."""

    plan: Callable[[MethodRun], Plan]
    """Returns the plan from a run's options and inputs. Long steps are saved in the run's work directory."""
    phases: Callable[[PassCosts, RunOptions], Iterator[Phase]]
    """Yields the phases of `plan` with their costs, which are counted from the config alone."""
    memory: Callable[[MemoryDemand, PruneOptions, DecoderConfig], MemoryDemand] = _unchanged
    """Returns the memory demand of a run with the memory that `plan` needs."""
    figures: Callable[[MethodRun], Mapping[str, object]] = lambda run: {}
    """Returns the method's own figures of the result."""
    add_files: Callable[[MethodRun, Path], None] = lambda run, directory: None
    """Writes the method's own files into the artifact's directory."""


def criterion_of(method: str) -> Criterion:
    """Return the functions of a method of METHODS; its module is imported by this call."""
    found: Criterion = pkgutil.resolve_name(METHODS[method].code)
    return found


# Removing experts


def kept_plan(run: MethodRun, kept: Kept) -> Plan:
    """Return the plan that keeps these experts. The options decide whether the others are dropped or merged into them."""
    join = REMOVED_EXPERTS[run.options.merge]
    if join is None:
        return pruning_plan(kept)
    statistics = statistics_of(run)
    return merged_plan(run, {index: join(statistics.layers[index], experts) for index, experts in kept.items()})


def by_scores(scores: Callable[[MethodRun], Mapping[int, Tensor]]) -> Callable[[MethodRun], Plan]:
    """Return a function whose plan keeps the experts with the highest scores, as many as the budget allows.

    scores: returns a score for each expert, [N] by decoder layer index; experts with higher scores are kept.
    """

    def plan(run: MethodRun) -> Plan:
        budget = run.prepared.budget
        assert budget is not None
        scored = scores(run)
        if run.options.shard:
            gc.collect()  # the modules of a sharded model hold reference cycles
        config = run.prepared.checkpoint.config
        return kept_plan(run, budget.select(scored, groups_of(config), even=config.architecture.even_groups))

    return plan


def calibrating(costs: PassCosts, options: RunOptions) -> Iterator[Phase]:
    """Yield the one phase of a method that only needs statistics."""
    yield statistics_phase("calibrating", costs)


def statistic(score: Callable[[LayerStatistics], Tensor]) -> Criterion:
    """Return the criterion of a score that is a function of one layer's statistics."""
    return Criterion(by_scores(lambda run: layer_scores(score, statistics_of(run))), calibrating)


def layer_scores(score: Callable[[LayerStatistics], Tensor], statistics: Statistics) -> dict[int, Tensor]:
    """Return the scores of every MoE layer, [N] by decoder layer index."""
    return {index: score(layer) for index, layer in statistics.layers.items()}


# Merging experts


def grouping(groups: Callable[[LayerStatistics, int], list[Group]]) -> Criterion:
    """Return the criterion of a merging method.

    groups: returns a given number of groups from one layer's statistics.
    """

    def plan(run: MethodRun) -> Plan:
        budget = run.prepared.budget
        assert budget is not None and budget.experts is not None
        return merged_plan(run, merge_groups(groups, statistics_of(run), budget.experts))

    return Criterion(plan, calibrating, averaging)


def averaging(demand: MemoryDemand, options: PruneOptions, config: DecoderConfig) -> MemoryDemand:
    """Return the memory demand of a run that chooses experts to average. Raises UnsupportedError if they differ in width."""
    if options.plan is None:
        check_averaging(config)
    return aligning(demand, options, config)


def aligning(demand: MemoryDemand, options: PruneOptions, config: DecoderConfig) -> MemoryDemand:
    """Return the memory demand of a run that also aligns and averages experts."""
    width = max(moe.expert_width for moe in moe_configs(config).values())
    return demand.with_other(aligning_bytes(width, config.hidden_size))
