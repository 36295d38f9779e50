"""`compress prune` and `compress merge`: from a method's plan to a smaller artifact, with figures before and after."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor

from calibrate.batches import training_text
from calibrate.collect import held_bytes as collecting_bytes
from calibrate.unit_statistics import held_bytes as unit_bytes
from compress.distillation.recover import recover
from compress.distillation.whole_recovery import recover_all
from compress.methods import METHODS, methods_of
from compress.methods.cka import REMOVED_EXPERTS
from compress.methods.criterion import aligning, averaging, criterion_of
from compress.methods.inputs import MethodRun, Prunable
from compress.methods.prediction_experts import with_prediction
from compress.methods.unit_criterion import include_of
from compress.options.prune import PruneOptions
from compress.options.training import RecoverOptions, WholeRecoveryOptions
from compress.plans.apply import check_fits, check_rounded
from compress.plans.plan import Plan, granularity, plan_from_json
from compress.plans.selection import INCLUDED, Budget, check_groups, groups_of, least_experts, moe_configs, most_groups
from compress.plans.unit_selection import check_units, fitting_multiple, uniform_width, units_plan
from compress.prune_file import check_file_result, fitting_widths
from compress.refit.closed_form import refitted
from compress.refit.correction import check_correctable, check_width
from compress.refit.correction import held_bytes as correction_bytes
from compress.report.card import training_lines
from compress.report.figures import PruneFigures
from compress.report.likeness import likeness
from compress.report.pictures import draw_training
from compress.rounding.quantizer import Quantiser
from compress.run.claims import claims_output
from compress.run.job import Made, Run, check_plain, check_weights, open_mixture, prepare
from compress.run.result import carry_out, check_outputs, finished_before
from compress.run.work_directory import WorkDirectory
from compress.training.training import Trained
from engine.adapted.adapted_checkpoint import AdaptedCheckpoint, open_mixture_checkpoint
from engine.adapted.layer_sizes import LayerSize, sizes_of
from engine.adapted.stored_experts import expert_places
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.tokenizer import load_tokenizer
from engine.errors import OptionError
from engine.families.config import DecoderConfig
from engine.files.json_file import load_json
from engine.passes import processes
from engine.passes.memory_need import MemoryDemand, budget_for
from engine.progress import Progress, no_progress


@dataclass(frozen=True)
class Shared:
    """State that several runs on one model and text share (sweep.py); the weights were found to be finite."""

    prepared: Prunable
    work: WorkDirectory


@claims_output
def prune(options: PruneOptions, progress: Progress = no_progress, shared: Shared | None = None) -> PruneFigures:
    """Run the job; return the figures of the result, with the keys of `compress prune --json`.

    Several processes (engine/passes/processes.py) share every pass of text through the model.
    """
    started = time.monotonic()
    work = WorkDirectory(options.output, shared=None if shared is None else shared.work)
    if (figures := finished_before(options, work)) is not None:
        return cast(PruneFigures, figures)
    check_outputs(options)
    if shared is None:
        check_shard([options])
        prepared = prepare_pruning(options)
        memory = budget_for(options.memory_limit, prepared.checkpoint, memory_demand(options, prepared))
        check_weights(prepared.checkpoint, progress)
        run = Run(options, prepared, work, progress, started, memory)
    else:
        budget = checked_budget(options, shared.prepared.checkpoint)
        run = Run(options, replace(shared.prepared, budget=budget), work, progress, started)
    return cast(PruneFigures, carry_out(run, lambda: _make(run)))


def memory_demand(options: PruneOptions, prepared: Prunable) -> MemoryDemand:
    """Return the memory that the run needs, by purpose."""
    config = prepared.checkpoint.config
    texts = [prepared.tokens_SL, *([] if prepared.held_out is None else [prepared.held_out.tokens_SL])]
    demand = MemoryDemand(
        prepared.dtype,
        prepared.tokens_SL.shape[1],
        other_bytes=collecting_bytes(config),
        tokens=max(text.numel() for text in texts),
    )
    if options.plan is not None:
        units_leave = prepared.plan is not None and granularity(prepared.plan) == "unit"
        if options.refit.refit and units_leave:
            demand = demand.with_other(unit_bytes(config, INCLUDED))
        if options.refit.corrects(units_leave and prepared.checkpoint.has_own_decoder):
            demand = demand.with_other(correction_bytes(config, INCLUDED, prepared.dtype.itemsize))
        demand = aligning(demand, options, config)
    elif REMOVED_EXPERTS[options.merge] is not None:
        demand = averaging(demand, options, config)
    budget = prepared.budget
    if budget is not None and options.refit.corrects(budget.granularity != "expert" and prepared.checkpoint.has_own_decoder):
        demand = demand.with_other(correction_bytes(config, budget.include, prepared.dtype.itemsize))
    return criterion_of(options.method).memory(demand, options, config)


def _make(run: MethodRun) -> Made:
    options, prepared = run.options, run.prepared
    criterion = criterion_of(options.method)
    plan = prepared.plan or make_plan(run)
    check_fits(plan, prepared.checkpoint)
    if options.quantiser is not None:
        check_rounded(options.quantiser, prepared.checkpoint, plan)
    own: dict[str, object] = {"recover_steps": options.recover.steps, **criterion.figures(run)}
    fitted = refitted(run, plan)
    trained = fitted.tensors | recovered(run, plan, fitted.tensors)
    distilled = _distilled(run, plan, trained)
    own |= {"granularity": granularity(plan), "refit": fitted.figures, "training": distilled.parts}
    if granularity(plan) == "unit" and prepared.checkpoint.has_own_decoder:
        own["expert_likeness"] = likeness(prepared.checkpoint)
    return Made(
        plan,
        "plan" if prepared.plan is not None else options.method,
        trained | distilled.tensors,
        own,
        card=tuple(training_lines(distilled.parts)),
        add_files=lambda directory: criterion.add_files(run, directory),
        draw=lambda directory: draw_training(directory, options.output.name, distilled.histories),
        quantiser=None if options.quantiser is None else Quantiser(options.quantiser),
        include=include_of(run),
    )


def checked_budget(options: PruneOptions, checkpoint: Checkpoint) -> Budget | None:
    """Return the budget with its defaults, or None with a ready-made plan.

    Raises OptionError where it does not fit the model.
    """
    budget, per_token = options.budget, checkpoint.config.experts_per_token
    if budget is None:
        return None
    method = METHODS[options.method]
    if (budget.granularity == "expert") != (method.granularity == "expert"):
        raise OptionError(_other_granularity(options.method, budget.granularity))
    if budget.scope not in method.scopes:
        raise OptionError(
            f"{options.method} decides layer by layer and cannot rank across layers; leave out --scope {budget.scope}"
        )
    usual = per_token if budget.experts is None else min(per_token, budget.experts)
    budget = replace(budget, min_experts=least_experts(budget.min_experts, checkpoint.config, usual))
    if budget.granularity != "expert":
        return _checked_unit_budget(budget, checkpoint, options)
    if budget.unit_multiple is not None:
        raise OptionError(f"{options.method} removes whole experts; leave out --unit-multiple, or add --granularity unit")
    if budget.include:
        raise OptionError(f"{options.method} removes whole experts; leave out --include, or add --granularity unit")
    if options.refit.correct:
        check_width(checkpoint.config)
    if checkpoint.config.architecture.even_groups and (groups := groups_of(checkpoint.config)):
        together = most_groups(groups)
        budget = replace(budget, min_experts=-(-budget.min_experts // together) * together)
    budget.check(checkpoint.config.experts_by_layer)
    check_groups(budget, moe_configs(checkpoint.config))
    if not method.keeps_groups and groups_of(checkpoint.config):
        if checkpoint.config.architecture.even_groups:
            raise OptionError(
                f"{options.method} does not select experts group by group, and layers of the family "
                f"{checkpoint.config.architecture.model_type} need as many of each group; choose another method"
            )
        if budget.scope == "uniform":
            raise OptionError(
                f"{options.method} does not select experts group by group, and a uniform result keeps as many of each "
                "group; leave out --uniform, or choose another method"
            )
    return budget


def _other_granularity(method: str, granularity: str) -> str:
    """Return the message for a method that scores something else than what is to be removed."""
    scored = "whole experts" if METHODS[method].granularity == "expert" else "hidden units"
    fitting = [name for name in methods_of("prune") if (METHODS[name].granularity == "expert") == (granularity == "expert")]
    return f"{method} scores {scored}; with --granularity {granularity}, give --method {' or '.join(fitting)}"


def _checked_unit_budget(budget: Budget, checkpoint: Checkpoint, options: PruneOptions) -> Budget:
    """Return the budget of hidden units with its multiple. Raises OptionError where it does not fit the model."""
    config = checkpoint.config
    if options.merge != "none":
        raise OptionError("hidden units are dropped, not merged; leave out --merge, or give --granularity expert")
    if budget.sparsity is None:
        raise OptionError("--experts counts whole experts; say by --sparsity which share of the hidden units to remove")
    budget.check_sparsity()
    if budget.granularity == "both" and budget.scope == "uniform":
        raise OptionError("a uniform result keeps every expert; leave out --uniform, or give --granularity unit")
    has = {"shared" if layer in config.moe_layers else "dense" for layer in config.common_widths}
    if lacking := [kind for kind in budget.include if kind not in has]:
        network = {"shared": "no shared experts", "dense": "no layers without experts"}[lacking[0]]
        raise OptionError(f"include is {lacking[0]!r}, and this model has {network}; leave it out of --include")
    include = tuple(kind for kind in INCLUDED if kind in budget.include)
    widths = config.ffn_widths(include)
    scheme = None if options.quantiser is None else options.quantiser.scheme
    fits = fitting_widths(options, checkpoint, include) if scheme is None else scheme.fits
    other = "another --output" if scheme is None else "another --group-size"
    multiple = fitting_multiple(budget.unit_multiple, widths, fits, other)
    try:
        check_units(budget.sparsity, budget.scope, multiple, widths, budget.least_experts, config.experts_by_layer)
    except OptionError as error:
        if scheme is None:
            raise
        raise OptionError(f"{error}; with --bits, a multiple below {multiple} needs a smaller --group-size") from error
    return replace(budget, unit_multiple=multiple, include=include)


def prepare_pruning(options: PruneOptions) -> Prunable:
    """Open and check every input of the run, and write nothing. Raises a CompressError for invalid input."""
    options.diep.check()
    options.recover.check()
    options.distill.check()
    options.refit.check()
    if options.memory_limit is not None and (options.recover.steps or options.distill.steps):
        raise OptionError("recovery and distillation hold two models; leave out --memory-limit, or train afterwards")
    checkpoint = open_mixture(options.model, open_mixture_checkpoint)
    if isinstance(checkpoint, AdaptedCheckpoint):
        _check_adapted(options, checkpoint)
    merges = METHODS[options.method].kind == "merge" or REMOVED_EXPERTS[options.merge] is not None
    if merges or options.distill.steps or options.quantiser is not None or options.refit.correct:
        check_plain(checkpoint)
    if options.refit.correct:
        check_correctable(checkpoint.config)
    if options.quantiser is not None:
        check_rounded(options.quantiser, checkpoint)
    budget = checked_budget(options, checkpoint)
    if options.statistics is not None and budget is not None and budget.granularity != "expert":
        raise OptionError(
            f"{options.statistics}: has no moments of hidden units, which {options.method} needs; leave out --statistics, "
            "so that they are collected from --data"
        )
    if budget is not None and budget.unit_multiple is not None:
        check_fits(_narrowest_plan(budget, checkpoint.config), checkpoint)  # weights whose units cannot go
    plan = None
    if options.plan is not None:
        plan = plan_from_json(load_json(options.plan, "plan"))
        check_fits(plan, checkpoint)
        if options.refit.correct and granularity(plan) == "expert":
            check_width(checkpoint.config)
    check_file_result(options, checkpoint, budget, plan)
    prepared = prepare(options, checkpoint)
    texts = (prepared.tokens_SL[:0], prepared.tokens_SL[:0])
    if steps := options.distill.steps:
        wanted, validation = steps * options.distill.batch_size, options.distill.validation_samples
        texts = training_text(prepared.calibration, load_tokenizer(checkpoint), wanted, validation)
    ready = Prunable(**vars(prepared), plan=plan, budget=budget, training_SL=texts[0], validation_VL=texts[1])
    _own_steps(options, ready)
    return ready


def _check_adapted(options: PruneOptions, checkpoint: AdaptedCheckpoint) -> None:
    """Raise an error for options that need our own decoder, of a model that transformers runs."""
    trains = options.recover.steps or options.distill.steps or options.refit.correct
    if trains or options.shard:
        raise checkpoint.refusal()
    expert_places(checkpoint)  # raises UnsupportedError where no expert can be removed
    merges = METHODS[options.method].kind == "merge"
    if merges or REMOVED_EXPERTS[options.merge] is not None:
        checkpoint.stored_experts  # noqa: B018  raises UnsupportedError where projections are not found
    budget = options.budget
    if budget is None:
        return
    if METHODS[options.method].needs_states:
        checkpoint.check_states()
    if budget.granularity == "both" or budget.include:
        asked = f"--include {budget.include[0]}" if budget.include else "--granularity both"
        raise OptionError(
            f"{asked} needs our own decoder, and transformers runs a model of the family {checkpoint.model_type}; give "
            "--granularity unit"
        )
    if merges:
        if groups_of(checkpoint.config):
            raise OptionError(
                f"{options.method} does not merge experts group by group, and a model of the family {checkpoint.model_type} "
                "keeps as many of each group; give `compress prune --merge cka --uniform`"
            )
        return
    if budget.scope != "uniform" and budget.granularity == "expert":
        checkpoint.check_sizes(_ragged_sizes(checkpoint))


def _ragged_sizes(checkpoint: AdaptedCheckpoint) -> dict[int, LayerSize]:
    """Return the sizes of the layers, of which the first has as few experts as the family's router works with."""
    first, *_ = sizes = sizes_of(checkpoint.found)
    least = min(sizes[first].count, checkpoint.config.architecture.least_experts)
    return sizes | {first: replace(sizes[first], count=least)}


def _narrowest_plan(budget: Budget, config: DecoderConfig) -> Plan:
    """Return a plan that keeps the first hidden units of every FFN: one multiple or, if uniform, an expert's new width.

    Where the experts of a layer need one width, only those of the first layer are narrowed.
    """
    assert budget.unit_multiple is not None and budget.sparsity is not None
    widths, least = config.ffn_widths(), budget.unit_multiple
    kept = uniform_width(budget.sparsity, least, widths) if budget.scope == "uniform" else least
    every = {layer: [range(min(kept, *own))] * len(own) for layer, own in config.ffn_widths(budget.include).items()}
    if config.architecture.even_widths and budget.scope != "uniform":
        first, *_ = every
        every = {layer: every[layer] if layer == first else [*map(range, own)] for layer, own in widths.items()}
    return units_plan(every, widths, config.common_widths)


def check_shard(runs: Sequence[PruneOptions]) -> None:
    """Raise OptionError for sharding that none of the runs can use, or that has only one process."""
    if not runs[0].shard:
        return
    needing = [name for name, method in METHODS.items() if method.needs_gradients]
    if not any(run.plan is None and run.method in needing for run in runs):
        raise OptionError(
            f"--shard is for methods that need the whole model ({', '.join(needing)}), and others read it layer by layer; "
            "leave it out"
        )
    if runs[0].memory_limit is not None:
        raise OptionError("--memory-limit holds one layer of the model, and --shard a piece of each; leave out one of them")
    if runs[0].recover.steps or runs[0].distill.steps:
        raise OptionError("recovery and distillation hold two whole models; leave out --shard, or train afterwards")
    processes.check_several()


def _own_steps(options: PruneOptions, prepared: Prunable) -> tuple[RecoverOptions, WholeRecoveryOptions]:
    """Return the trainings with this process's part of each step. Raises OptionError where processes cannot share a step."""
    recover, distill = options.recover, options.distill
    if recover.steps:
        size = processes.own_batch_size(recover.batch_size, len(prepared.tokens_SL), "--recover-steps")
        recover = replace(recover, batch_size=size)
    if distill.steps:
        size = processes.own_batch_size(distill.batch_size, len(prepared.training_SL), "--distill-steps")
        distill = replace(distill, batch_size=size)
    return recover, distill


def make_plan(run: MethodRun) -> Plan:
    """Return the plan of the run's method."""
    return with_prediction(run, criterion_of(run.options.method).plan(run))


def recovered(run: MethodRun, plan: Plan, made: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that recovery has trained, by name; empty where recovery was not requested.

    made: tensors of the result that the plan does not say.
    """
    if not run.options.recover.steps:
        return {}
    return recover(
        plan,
        run.prepared.checkpoint,
        run.prepared.tokens_SL,
        _own_steps(run.options, run.prepared)[0],
        dtype=run.prepared.dtype,
        device=run.options.device,
        state_path=run.work.path / "recovery.safetensors",
        resume=run.options.resume,
        progress=run.bar("recovering (steps)"),
        made=made,
    )


def _distilled(run: MethodRun, plan: Plan, trained: Mapping[str, Tensor]) -> Trained:
    """Return all weights after distillation from the full model; empty where distillation was not requested."""
    if not run.options.distill.steps:
        return Trained()
    return recover_all(
        plan,
        run.prepared.checkpoint,
        trained,
        run.prepared.training_SL,
        run.prepared.validation_VL,
        _own_steps(run.options, run.prepared)[1],
        dtype=run.prepared.dtype,
        device=run.options.device,
        state_path=run.work.path / "distill.safetensors",
        resume=run.options.resume,
        progress=run.bar("distilling (steps)"),
    )
