"""Pruning and merging experts: scores or groups to a plan, the plan to a smaller artifact, with figures before and after."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calibrate.collect import held_bytes as collecting_bytes
from calibrate.options import training_text
from compress.distillation.recover import RecoverOptions, recover
from compress.distillation.whole_recovery import WholeRecoveryOptions, recover_all
from compress.methods.alignment import held_bytes as aligning_bytes
from compress.methods.diep import DiepOptions, search
from compress.methods.diep_scores import save_scores, scores_of_state
from compress.methods.gate_gradients import fisher_scores, taylor_scores
from compress.methods.merging import MERGE_METHODS, Group, merge_groups, merge_pruned, merging_plan
from compress.methods.naee import SUBSET_LIMIT, naee, search_used
from compress.methods.naee import held_bytes as naee_bytes
from compress.methods.saliency import SCORES, scores
from compress.plans.apply import check_fits
from compress.plans.plan import Plan, plan_from_json, plan_to_json, pruning_plan
from compress.plans.selection import Budget, check_groups
from compress.report.card import training_lines
from compress.report.pictures import draw_training
from compress.rounding.quantizer import Quantiser, QuantiserOptions
from compress.run.claims import claims_output
from compress.run.job import JobOptions, Made, Prepared, check_plain, check_weights, open_mixture, prepare, statistics_of
from compress.run.result import carry_out, check_outputs, finished_before
from compress.run.work_directory import WorkDirectory
from compress.training.training import Trained
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.tokenizer import load_tokenizer
from engine.errors import OptionError
from engine.families.layer_config import MoeConfig
from engine.files.json_file import load_json
from engine.passes import processes
from engine.passes.layerwise import AnyDecoder, LayerwiseDecoder
from engine.passes.memory_budget import current, limited
from engine.passes.memory_need import Work, budget_for
from engine.progress import Progress, no_progress

GRADIENT_METHODS = {"fisher": fisher_scores, "taylor": taylor_scores}
METHODS = ("diep", "naee", *SCORES, *GRADIENT_METHODS, "random")
"""Of pruning; those of merging are MERGE_METHODS."""
DEFAULT_METHOD = "fisher"
"""The best one-shot row of docs/methods.md on both models; DiEP's search from it is within noise, at many times the cost."""
DEFAULT_SCOPE = {"naee": "layer"}
"""Scopes of methods that cannot rank the experts of all layers together; "global" for all others."""


@dataclass(frozen=True, kw_only=True)
class PruneOptions(JobOptions):
    """One run of pruning or, with a method of MERGE_METHODS, of merging."""

    budget: Budget | None
    """None with a ready-made plan."""
    method: str = DEFAULT_METHOD
    merge: str = "none"
    """What becomes of pruned experts: "none" drops them, "cka" merges each into its most similar kept one."""
    naee_limit: int = SUBSET_LIMIT
    diep: DiepOptions = field(default_factory=DiepOptions)
    recover: RecoverOptions = field(default_factory=RecoverOptions)
    distill: WholeRecoveryOptions = field(default_factory=WholeRecoveryOptions)
    plan: Path | None = None
    quantiser: QuantiserOptions | None = None
    """How the weights of what is left are rounded; None leaves them."""
    shard: bool = False
    """Spread the model over the processes where the method needs all of it."""

    def deciding(self) -> dict[str, Any]:
        """Without what each process holds."""
        return {name: value for name, value in super().deciding().items() if name != "shard"}

    def recorded(self) -> dict[str, Any]:
        """With the search's defaults filled in too."""
        return self.deciding() | {"diep": asdict(self.diep.filled())}


@dataclass
class Prunable(Prepared):
    """Inputs that were found to be good, with what pruning needs besides."""

    plan: Plan | None
    budget: Budget | None
    training_SL: Tensor
    """With `validation_VL`: text to train all weights on, none where that was not asked for."""
    validation_VL: Tensor

    @property
    def texts(self) -> dict[str, Tensor]:
        """With the training's."""
        return super().texts | {"training_text": self.training_SL, "validation_text": self.validation_VL}


@dataclass(frozen=True)
class Shared:
    """What several runs on one model and text have in common (sweep.py); its weights were found to be finite."""

    prepared: Prunable
    work: WorkDirectory


@claims_output
def prune(options: PruneOptions, progress: Progress = no_progress, shared: Shared | None = None) -> dict[str, Any]:
    """Run the job; the figures of the result, with the keys of `compress prune --json`.

    Several processes (engine/passes/processes.py) share all that runs text through the model.
    """
    started = time.monotonic()
    work = WorkDirectory(options.output, shared=None if shared is None else shared.work)
    if (figures := finished_before(options, work)) is not None:
        return figures
    check_outputs(options)
    if shared is None:
        check_shard([options])
        prepared = prepare_pruning(options)
        with limited(budget_for(options.memory_limit, prepared.checkpoint, memory_work(options, prepared))):
            check_weights(prepared.checkpoint, progress)
            return carry_out(options, prepared, work, lambda: _make(options, prepared, work, progress), progress, started)
    prepared = replace(shared.prepared, budget=checked_budget(options, shared.prepared.checkpoint))
    return carry_out(options, prepared, work, lambda: _make(options, prepared, work, progress), progress, started)


def memory_work(options: PruneOptions, prepared: Prepared) -> Work:
    """What the run does, as far as memory is concerned."""
    config = prepared.checkpoint.config
    others = [collecting_bytes(config)]
    if options.method == "naee":
        others.append(naee_bytes(config))
    if options.method in MERGE_METHODS or options.merge != "none" or options.plan is not None:
        width = max(moe.expert_width for moe in moe_configs(prepared.checkpoint).values())
        others.append(aligning_bytes(width, config.hidden_size))
    mixes_all = options.method == "diep" and options.diep.relaxation == "paper"
    return Work(
        prepared.dtype,
        prepared.tokens_SL.shape[1],
        gradients=options.method == "diep" or options.method in GRADIENT_METHODS,
        optimises=options.method == "diep",
        experts_per_token=max(config.experts_per_layer) if mixes_all else None,
        other_bytes=max(others),
    )


def _make(options: PruneOptions, prepared: Prunable, work: WorkDirectory, progress: Progress) -> Made:
    plan = prepared.plan or make_plan(options, prepared, work, progress)
    check_fits(plan, prepared.checkpoint)

    def add_scores(directory: Path) -> None:
        if options.method == "diep" and work.search_state.is_file():
            save_scores(scores_of_state(work.search_state, prepared.checkpoint.config.moe_layers), directory)

    own: dict[str, Any] = {"recover_steps": options.recover.steps}
    if options.method == "naee" and prepared.budget is not None:
        counts = prepared.checkpoint.config.experts_by_layer
        own["naee"] = search_used(counts, prepared.budget.kept_per_layer(counts), options.naee_limit)
    trained = recovered(options, prepared, plan, work, progress)
    distilled = _distilled(options, prepared, plan, trained, work, progress)
    return Made(
        plan,
        "plan" if prepared.plan is not None else options.method,
        trained | distilled.tensors,
        own | {"training": distilled.parts},
        card=tuple(training_lines(distilled.parts)),
        add_files=add_scores,
        draw=lambda directory: draw_training(directory, options.output.name, distilled.histories),
        quantiser=None if options.quantiser is None else Quantiser(options.quantiser),
    )


def checked_budget(options: PruneOptions, checkpoint: Checkpoint) -> Budget | None:
    """With its default filled in; None with a ready-made plan. Raises OptionError where the model cannot be cut to it."""
    budget, per_token = options.budget, checkpoint.config.experts_per_token
    if budget is None:
        return None
    if options.method == "naee" and budget.scope == "global":
        raise OptionError("naee compares subsets within a layer and cannot rank across layers; leave out --scope global")
    needed = checkpoint.config.architecture.least_experts
    if budget.min_experts == 0:  # the default: at least max(1, k) in each layer
        least = per_token if budget.experts is None else min(per_token, budget.experts)
        budget = replace(budget, min_experts=max(needed, least))
    elif budget.min_experts < needed:
        name = checkpoint.config.architecture.model_type
        raise OptionError(f"min-experts is {budget.min_experts}; the router of a {name} takes {needed} in each layer")
    budget.check(checkpoint.config.experts_by_layer)
    check_groups(budget, moe_configs(checkpoint))
    if options.method == "naee" and budget.scope == "uniform" and groups_of(checkpoint):
        raise OptionError(
            "naee compares all subsets of a layer's experts, and a uniform result keeps as many of each group; leave out "
            "--uniform, or choose another method"
        )
    return budget


def moe_configs(checkpoint: Checkpoint) -> dict[int, MoeConfig]:
    """Of each layer that holds experts."""
    return {index: moe for index, layer in enumerate(checkpoint.config.layers) if (moe := layer.moe) is not None}


def groups_of(checkpoint: Checkpoint) -> dict[int, tuple[int, ...]]:
    """The group of each expert by layer; nothing for a model without groups."""
    return {index: moe.groups for index, moe in moe_configs(checkpoint).items() if moe.groups}


def prepare_pruning(options: PruneOptions) -> Prunable:
    """Open and check every input that the run will need; nothing is written. Raises a CompressError for bad input."""
    options.diep.check()
    options.recover.check()
    options.distill.check()
    if options.memory_limit is not None and (options.recover.steps or options.distill.steps):
        raise OptionError("recovery and distillation hold two models; leave out --memory-limit, or train afterwards")
    checkpoint = open_mixture(options.model)
    if options.method in MERGE_METHODS or options.merge != "none" or options.distill.steps or options.quantiser is not None:
        check_plain(checkpoint)
    if options.quantiser is not None:
        options.quantiser.check(checkpoint.config)
    budget = checked_budget(options, checkpoint)
    plan = None
    if options.plan is not None:
        plan = plan_from_json(load_json(options.plan, "plan"))
        check_fits(plan, checkpoint)
    prepared = prepare(options, checkpoint)
    texts = (prepared.tokens_SL[:0], prepared.tokens_SL[:0])
    if steps := options.distill.steps:
        wanted, validation = steps * options.distill.batch_size, options.distill.validation_samples
        texts = training_text(prepared.calibration, load_tokenizer(checkpoint), wanted, validation)
    ready = Prunable(**vars(prepared), plan=plan, budget=budget, training_SL=texts[0], validation_VL=texts[1])
    _own_steps(options, ready)
    return ready


def check_shard(runs: Sequence[PruneOptions]) -> None:
    """Raise OptionError where a model is to be spread that none of the runs needs whole, or over nothing."""
    if not runs[0].shard:
        return
    needing = ("diep", *GRADIENT_METHODS)
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
    """The trainings with this process's part of each step. Raises OptionError where several cannot share them."""
    recover, distill = options.recover, options.distill
    if recover.steps:
        size = processes.own_batch_size(recover.batch_size, len(prepared.tokens_SL), "--recover-steps")
        recover = replace(recover, batch_size=size)
    if distill.steps:
        size = processes.own_batch_size(distill.batch_size, len(prepared.training_SL), "--distill-steps")
        distill = replace(distill, batch_size=size)
    return recover, distill


def make_plan(options: PruneOptions, prepared: Prunable, work: WorkDirectory, progress: Progress) -> Plan:
    """The experts that stay by score and budget, or the groups that become one expert each."""
    assert prepared.budget is not None
    if options.method in MERGE_METHODS:
        assert prepared.budget.experts is not None and prepared.budget.scope == "layer"
        groups = merge_groups(options.method, statistics_of(options, prepared, work, progress), prepared.budget.experts)
        return _merged(groups, options, prepared, work, progress)
    if options.method == "naee":
        kept = _best_subsets(options, prepared, work, progress)
    else:
        scored = _scores(options, prepared, work, progress)
        if options.shard:
            gc.collect()  # the parts of a model in pieces know each other in circles
        kept = prepared.budget.select(scored, groups_of(prepared.checkpoint))
    if options.merge == "cka":
        groups = merge_pruned(kept, statistics_of(options, prepared, work, progress))
        return _merged(groups, options, prepared, work, progress)
    return pruning_plan(kept)


def _best_subsets(
    options: PruneOptions, prepared: Prunable, work: WorkDirectory, progress: Progress
) -> dict[int, list[int]]:
    assert prepared.budget is not None
    return naee(
        prepared.checkpoint,
        prepared.tokens_SL,
        prepared.budget.kept_per_layer(prepared.checkpoint.config.experts_by_layer),
        dtype=prepared.dtype,
        device=options.device,
        seed=options.calibration.seed,
        limit=options.naee_limit,
        once=work.once,
        directory=work.path / "naee",
        progress=lambda layers: progress(layers, "comparing subsets (layers)"),
    )


def _merged(
    groups: Mapping[int, Sequence[Group]],
    options: PruneOptions,
    prepared: Prunable,
    work: WorkDirectory,
    progress: Progress,
) -> Plan:
    """The groups aligned, once over interruptions: with wide experts that takes longest."""

    def aligned() -> dict[str, Any]:
        own = merging_plan(
            dict(processes.share(sorted(groups.items()))),
            prepared.checkpoint,
            device=options.device,
            progress=lambda layers: progress(layers, "aligning (layers)"),
        )
        parts = processes.all_told(plan_to_json(own))
        return parts[0] | {"layers": {layer: experts for part in parts for layer, experts in part["layers"].items()}}

    return plan_from_json(work.once("merging_plan", aligned))


def _scores(options: PruneOptions, prepared: Prunable, work: WorkDirectory, progress: Progress) -> dict[int, Tensor]:
    """Scores by the chosen method."""
    if options.method == "diep":
        decoder = _decoder(options, prepared)
        return search(
            decoder,
            prepared.tokens_SL,
            options.diep,
            state_path=work.search_state,
            resume=options.resume or work.shared != work.path,
            fisher=lambda: _gradient_scores("fisher", lambda: decoder, options, prepared, work, progress),
            progress=lambda epochs: progress(epochs, "searching (epochs)"),
        )
    if options.method in GRADIENT_METHODS:
        return _gradient_scores(options.method, lambda: _decoder(options, prepared), options, prepared, work, progress)
    return scores(options.method, statistics_of(options, prepared, work, progress), options.calibration.seed)


def _gradient_scores(
    method: str,
    decoder: Callable[[], AnyDecoder],
    options: PruneOptions,
    prepared: Prunable,
    work: WorkDirectory,
    progress: Progress,
) -> dict[int, Tensor]:
    """Gate gradients, computed once for all who need them: DiEP starts from gate Fisher, on the decoder that it has."""

    def compute() -> dict[str, list[float]]:
        scored = GRADIENT_METHODS[method](
            decoder(),
            prepared.tokens_SL,
            options.diep.seed,
            state_path=work.shared / f"{method}.safetensors",
            progress=lambda rows: progress(rows, "gate gradients (batches)"),
        )
        return {str(layer): row.tolist() for layer, row in scored.items()}

    values = work.once(f"{method}_scores", compute, shared=True)
    return {int(layer): torch.tensor(row, dtype=torch.float64) for layer, row in values.items()}


def _decoder(options: PruneOptions, prepared: Prunable) -> AnyDecoder:
    """All weights at once, this process's pieces of them, or, within a limit of memory, one layer's."""
    if current() is not None:
        return LayerwiseDecoder(prepared.checkpoint, prepared.dtype, options.device)
    decoder = processes.load_decoder(prepared.checkpoint, prepared.dtype, options.device, options.shard)
    decoder.checkpoint_activations = True
    return decoder


def recovered(
    options: PruneOptions, prepared: Prunable, plan: Plan, work: WorkDirectory, progress: Progress
) -> dict[str, Tensor]:
    """What recovery has trained, by tensor name; nothing where it was not asked for."""
    if not options.recover.steps:
        return {}
    return recover(
        plan,
        prepared.checkpoint,
        prepared.tokens_SL,
        _own_steps(options, prepared)[0],
        dtype=prepared.dtype,
        device=options.device,
        state_path=work.path / "recovery.safetensors",
        resume=options.resume,
        progress=lambda steps: progress(steps, "recovering (steps)"),
    )


def _distilled(
    options: PruneOptions,
    prepared: Prunable,
    plan: Plan,
    trained: Mapping[str, Tensor],
    work: WorkDirectory,
    progress: Progress,
) -> Trained:
    """What distillation from the full model makes of all weights; nothing where it was not asked for."""
    if not options.distill.steps:
        return Trained()
    return recover_all(
        plan,
        prepared.checkpoint,
        trained,
        prepared.training_SL,
        prepared.validation_VL,
        _own_steps(options, prepared)[1],
        dtype=prepared.dtype,
        device=options.device,
        state_path=work.path / "distill.safetensors",
        resume=options.resume,
        progress=lambda steps: progress(steps, "distilling (steps)"),
    )
