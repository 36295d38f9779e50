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
from compress.methods.least_squares import FIRST_RIDGES
from compress.options.plan_run import RunOptions
from compress.options.prune import PruneOptions
from compress.plans.plan import Plan
from compress.plans.unit_selection import included, select_units, units_plan
from engine.checkpoint.checkpoint import Checkpoint
from engine.families.config import DecoderConfig
from engine.families.experts import DOWN
from engine.families.tensor_names import ffn_tensor
from engine.passes.memory_need import MemoryDemand

INVERSE_MATRICES = 6
"""F × F matrices in float64 that are held at a time while the brain surgeon ranks the units of an expert."""
RIDGES_TRIED = len(FIRST_RIDGES) + 1
"""Number of ridges for which costs are planned."""
UnitScores = Mapping[int, Sequence[Tensor]]
"""A score for each hidden unit, [F] for each FFN (DecoderConfig.ffn_widths), by decoder layer index; units with higher
scores are kept."""


def unit_criterion(scores: Callable[[MethodRun], UnitScores], *, gradients: bool, inverts: bool = False) -> Criterion:
    """Return the criterion of scores of hidden units.

    gradients: whether they need a backward pass. inverts: whether they need the inverse of each expert's moments.
    """

    def most_bytes(config: DecoderConfig, include: tuple[str, ...] = ()) -> int:
        return max(held_bytes(config, include), inverts * INVERSE_MATRICES * 8 * config.widest_ffn(include) ** 2)

    def plan(run: MethodRun) -> Plan:
        budget, config = run.prepared.budget, run.prepared.checkpoint.config
        assert budget is not None and budget.sparsity is not None and budget.unit_multiple is not None
        scored = scores(run)
        if run.options.shard:
            gc.collect()  # the modules of a sharded model hold reference cycles
        rule = budget.sparsity, budget.scope, budget.unit_multiple, budget.least_experts
        kept = select_units(scored, *rule, config.experts_by_layer, even=config.architecture.even_widths)
        return units_plan(kept, config.ffn_widths(), config.common_widths)

    def memory(demand: MemoryDemand, options: PruneOptions, config: DecoderConfig) -> MemoryDemand:
        include = () if options.budget is None else options.budget.include
        return replace(demand.with_other(most_bytes(config, include)), gradients=gradients)

    def phases(costs: PassCosts, options: RunOptions) -> Iterator[Phase]:
        if gradients:
            yield gradient_phase(costs, own_samples=True)
        yield moments_phase(costs)
        if inverts:
            yield Phase("ranking of hidden units", costs.passes.brain_surgeon(), most_bytes(costs.passes.config))
        kept = 1.0 - options.sparsity
        yield Phase("refit", costs.passes.refit(kept, RIDGES_TRIED), held_bytes(costs.passes.config))
        yield correction_phase(costs, kept)

    return Criterion(plan, phases, memory)


def correction_phase(costs: PassCosts, kept: float) -> Phase:
    """Return the phase of the correction after the refit. kept: share of hidden units that stay."""
    passes = costs.passes
    memory = costs.weights.layer(passes) + costs.streaming_bytes + held_bytes(passes.config)
    return Phase("correction", passes.correction(costs.tokens, costs.length, kept, RIDGES_TRIED), memory)


def moments_phase(costs: PassCosts) -> Phase:
    """Return the phase of the pass that collects the moments of hidden units."""
    passes, tokens, length = costs.passes, costs.tokens, costs.length
    memory = costs.weights.layer(passes) + costs.streaming_bytes + held_bytes(passes.config)
    return Phase("moments of hidden units", passes.unit_moments(tokens, length), memory)


def unit_directory(run: MethodRun, *, moments: bool) -> Path:
    """Return the directory with the statistics of hidden units of the calibration text, which are collected once."""
    prepared, include = run.prepared, include_of(run)
    directory = run.work.shared / "-".join(["unit", "moments" if moments else "sums", *include])
    collect_units(
        prepared.checkpoint,
        prepared.tokens_SL,
        directory,
        moments=moments,
        include=include,
        dtype=prepared.dtype,
        device=run.options.device,
        budget=run.memory_budget,
        progress=run.bar("hidden units (layers)"),
    )
    return directory


def sums_of(run: MethodRun) -> dict[int, UnitSums]:
    """Return the sums of every MoE layer, from the pass that also collects the moments where the run refits."""
    directory, config = unit_directory(run, moments=run.options.refit.refit), run.prepared.checkpoint.config
    return {layer: unit_sums(directory, layer) for layer in config.ffn_widths(include_of(run))}


def include_of(run: MethodRun) -> tuple[str, ...]:
    """Return the kinds of FFNs beside the routed experts that lose units in a run (selection.INCLUDED)."""
    plan, budget = run.prepared.plan, run.prepared.budget
    if plan is not None:
        return included(plan, run.prepared.checkpoint.config)
    return () if budget is None else budget.include


def down_projection(checkpoint: Checkpoint, layer: int, number: int) -> Tensor:
    """Return the down projection of one of a layer's FFNs, [D, F]."""
    return checkpoint.tensor(ffn_tensor(checkpoint.config, layer, number, DOWN))
