"""The parts that methods for hidden units share: statistics of a run, and from scores of units to a plan."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from calibrate.unit_statistics import UnitSums, collect_units, held_bytes, unit_sums
from compress.cost.phases import PassCosts, Phase
from compress.methods.criterion import Criterion
from compress.methods.gate_gradients import gradient_phase
from compress.methods.inputs import MethodRun
from compress.methods.refit import RIDGES
from compress.options.plan_run import RunOptions
from compress.options.prune import PruneOptions
from compress.plans.plan import Plan
from compress.plans.selection import expert_widths
from compress.plans.unit_selection import select_units, units_plan
from engine.checkpoint.checkpoint import Checkpoint
from engine.families.config import DecoderConfig
from engine.families.experts import DOWN
from engine.families.tensor_names import expert_tensor
from engine.passes.memory_need import MemoryDemand

UnitScores = Mapping[int, Sequence[Tensor]]
"""A score for each hidden unit, [F] for each expert, by decoder layer index; units with higher scores are kept."""


def unit_criterion(scores: Callable[[MethodRun], UnitScores], *, gradients: bool) -> Criterion:
    """Return the criterion of scores of hidden units. gradients: whether they need a backward pass."""

    def plan(run: MethodRun) -> Plan:
        budget, config = run.prepared.budget, run.prepared.checkpoint.config
        assert budget is not None and budget.sparsity is not None and budget.unit_multiple is not None
        scored = scores(run)
        if run.options.shard:
            gc.collect()  # the modules of a sharded model hold reference cycles
        kept = select_units(scored, budget.sparsity, budget.scope, budget.unit_multiple, budget.least_experts)
        return units_plan(kept, expert_widths(config))

    def memory(demand: MemoryDemand, options: PruneOptions, config: DecoderConfig) -> MemoryDemand:
        return replace(demand.with_other(held_bytes(config)), gradients=gradients)

    def phases(costs: PassCosts, options: RunOptions) -> Iterator[Phase]:
        if gradients:
            yield gradient_phase(costs, own_samples=True)
        yield moments_phase(costs)
        yield Phase("refit", costs.passes.refit(len(RIDGES)), held_bytes(costs.passes.config))

    return Criterion(plan, phases, memory)


def moments_phase(costs: PassCosts) -> Phase:
    """Return the phase of the pass that collects the moments of hidden units."""
    passes, tokens, length = costs.passes, costs.tokens, costs.length
    memory = costs.weights.layer(passes) + costs.streaming_bytes + held_bytes(passes.config)
    return Phase("moments of hidden units", passes.unit_moments(tokens, length), memory)


def unit_directory(run: MethodRun, *, moments: bool) -> Path:
    """Return the directory with the statistics of hidden units of the calibration text, which are collected once."""
    directory = run.work.shared / ("unit-moments" if moments else "unit-sums")
    prepared = run.prepared
    collect_units(
        prepared.checkpoint,
        prepared.tokens_SL,
        directory,
        moments=moments,
        dtype=prepared.dtype,
        device=run.options.device,
        budget=run.memory_budget,
        progress=run.bar("hidden units (layers)"),
    )
    return directory


def sums_of(run: MethodRun) -> dict[int, UnitSums]:
    """Return the sums of every MoE layer, from the pass that also collects the moments where the run refits."""
    directory, config = unit_directory(run, moments=run.options.refit.refit), run.prepared.checkpoint.config
    return {layer: unit_sums(directory, layer, config) for layer in config.moe_layers}


def down_projection(checkpoint: Checkpoint, layer: int, expert: int) -> Tensor:
    """Return an expert's down projection, [D, F]."""
    return checkpoint.tensor(expert_tensor(checkpoint.config.architecture, layer, expert, DOWN))
