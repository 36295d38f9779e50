"""The statistics of one run of `compress fit`, and the table of costs that they give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial

import torch
from torch import Tensor

from calibrate.unit_statistics import unit_sums
from compress.fitting.costs import Table, table
from compress.fitting.divergence import Reference
from compress.fitting.rounding_costs import rounding_costs, trial_bytes
from compress.fitting.sizes import Sizes
from compress.fitting.substitution import rounded, squared_error
from compress.methods.criterion import criterion_of
from compress.methods.inputs import MethodRun, Prunable
from compress.methods.unit_criterion import unit_directory
from compress.methods.unit_fisher import gradients_of
from compress.methods.unit_obs import GRADIENT_SEQUENCES, obs_scores
from compress.options.fit import FitOptions
from compress.options.prune import PruneOptions
from compress.options.quantize import GPTQ
from compress.refit.correction import held_bytes as correction_bytes
from compress.rounding.feedback_pass import MOMENT_BYTES_WITHIN_LIMIT
from compress.rounding.memory import rounding_bytes
from compress.rounding.mixed_widths import everything_rounded, kinds_of_others
from compress.run.job import Run
from compress.run.work_directory import WorkDirectory
from engine.kernels.stored.scheme import PLAIN_BITS, Scheme
from engine.passes.memory_need import MemoryDemand

FitRun = Run[FitOptions, Prunable]
MEASURED_BITS = 4
"""The width of other matrices at which their cost is measured, or the nearest one to choose from."""


def pruning_run(run: FitRun, work: WorkDirectory) -> MethodRun:
    """Return the run of `compress prune` whose statistics and refit are used, with this work directory."""
    pruning = pruning_options(run.options, run.prepared)
    return Run(pruning, run.prepared, work, run.progress, run.started, run.memory_budget)


def pruning_options(options: FitOptions, prepared: Prunable) -> PruneOptions:
    """Return the options of that run."""
    return PruneOptions(
        model=options.model,
        output=options.output,
        method="unit-obs",
        budget=prepared.budget,
        refit=options.refit,
        calibration=options.calibration,
        dtype=options.dtype,
        device=options.device,
    )


def memory_demand(options: FitOptions, prepared: Prunable) -> MemoryDemand:
    """Return the memory that a run needs, by purpose. The passes for costs and divergences are computed in float32."""
    config, shapes = prepared.checkpoint.config, prepared.checkpoint.shapes
    texts = [prepared.tokens_SL, prepared.validation_VL]
    texts += [] if prepared.held_out is None else [prepared.held_out.tokens_SL]
    pruning = pruning_options(options, prepared)
    demand = MemoryDemand(torch.float32, prepared.tokens_SL.shape[1], tokens=max(text.numel() for text in texts))
    demand = criterion_of(pruning.method).memory(demand, pruning, config)
    if options.refit.corrects(options.removes):
        demand = demand.with_other(correction_bytes(config, (), torch.float32.itemsize))
    if not options.low_bits:
        return demand
    quantiser = everything_rounded(config, max(options.low_bits), options.group_size)
    rounding = rounding_bytes({name: shapes[name] for name in quantiser.names(config)}, quantiser, GPTQ)
    trials = trial_bytes(config.hidden_size, config.widest_ffn(), len(options.low_bits))
    return demand.with_other(max(rounding, trials + MOMENT_BYTES_WITHIN_LIMIT))


def unit_costs(run: FitRun) -> dict[int, list[Tensor]]:
    """Return the costs of the hidden units, in nats per token, [F] float64 for each expert, by layer."""
    tokens = run.prepared.tokens_SL.numel()

    def compute() -> dict[str, list[list[float]]]:
        scored = obs_scores(pruning_run(run, run.work))
        return {str(layer): [(own / tokens).tolist() for own in each] for layer, each in scored.items()}

    known = run.work.once("unit-costs", compute, shared=True)
    return {int(layer): [torch.tensor(own, dtype=torch.float64) for own in each] for layer, each in known.items()}


def table_of(run: FitRun, scores: Mapping[int, Sequence[Tensor]]) -> Table:
    """Return the table of all options of the model. scores: those of `unit_costs`."""
    options, prepared, checkpoint = run.options, run.prepared, run.prepared.checkpoint
    pruning = pruning_run(run, run.work)
    directory, output = unit_directory(pruning, moments=True), gradients_of(pruning, GRADIENT_SEQUENCES).output
    tokens, seen = prepared.tokens_SL.numel(), prepared.tokens_SL[:GRADIENT_SEQUENCES].numel()
    rounding = rounding_costs(
        *(checkpoint, prepared.tokens_SL, {layer: output[layer] / seen for layer in scores}),
        [Scheme(bits, options.group_size) for bits in options.low_bits],
        run.work.shared / "rounding-costs",
        dtype=torch.float32,
        device=options.device,
        budget=run.memory_budget,
        progress=run.bar("costs of rounding (layers)"),
    )
    budget = prepared.budget
    assert budget is not None and budget.unit_multiple is not None
    return table(
        *(Sizes(checkpoint, options.group_size), options.low_bits, scores, rounding),
        {layer: (unit_sums(directory, layer).tokens / tokens).tolist() for layer in scores},
        _costs_of_others(run),
        multiple=budget.unit_multiple if options.removes else None,
        least_experts=budget.min_experts,
        keeps_plain=PLAIN_BITS in options.bits,
        by_layer=options.by_layer,
        progress=run.bar("options (layers)"),
    )


def _costs_of_others(run: FitRun) -> dict[str, dict[int, float]]:
    """Return the divergence caused by rounding the other matrices of each kind to nearest, by bits.

    It is measured at one width. A divergence is of the second order in the change of the weights, so for the other widths it
    is scaled in proportion to the squared error of the weights.
    """
    checkpoint, widths = run.prepared.checkpoint, run.options.low_bits
    kinds = kinds_of_others(checkpoint.config)
    if not widths:
        return {kind: {} for kind in kinds}
    schemes = {bits: Scheme(bits, run.options.group_size) for bits in widths}
    measured = min(widths, key=lambda bits: abs(bits - MEASURED_BITS))
    with ExitStack() as opened:
        full = cache(lambda: opened.enter_context(reference(run)))  # a pass over the text, unless all costs are known

        def cost(names: Sequence[str]) -> dict[str, float]:
            errors = {bits: squared_error(checkpoint, names, scheme) for bits, scheme in schemes.items()}
            divergence = full().divergence(rounded(checkpoint, names, schemes[measured]))
            scale = divergence / errors[measured] if errors[measured] else 0.0
            return {str(bits): scale * error for bits, error in errors.items()}

        known = {kind: run.work.once(f"rounding-{kind}", partial(cost, own), shared=True) for kind, own in kinds.items()}
    return {kind: {int(bits): own for bits, own in costs.items()} for kind, costs in known.items()}


def reference(run: FitRun) -> Reference:
    """Return the model's predictions for the text on which candidates are measured."""
    return Reference(
        *(run.prepared.checkpoint, run.prepared.validation_VL, torch.float32, run.options.device),
        budget=run.memory_budget,
        progress=run.bar("measuring (layers)"),
    )
