"""The main job: a checkpoint in, calibration, scores, plan, a smaller artifact out, with figures before and after."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor

from calibrate.collect import collect
from calibrate.options import CalibrationOptions, calibration_texts
from calibrate.skipping import skip_tables
from calibrate.statistics import Statistics, load_statistics
from compress import plots
from compress.apply import apply, carried_files, check_fits
from compress.card import model_card
from compress.diep import DiepOptions, search
from compress.diep_scores import load_scores, save_scores, scores_of_state
from compress.evaluate import perplexity, routed_counts
from compress.gate_gradients import fisher_scores, taylor_scores
from compress.merging import MERGE_METHODS, Group, merge_groups, merge_pruned, merging_plan
from compress.naee import SUBSET_LIMIT, naee, search_used
from compress.pictures import Pictured, draw, kept_experts
from compress.plan import Plan, plan_from_json, plan_to_json, pruning_plan
from compress.recover import RecoverOptions, recover
from compress.saliency import SCORES, scores
from compress.selection import Budget
from compress.work_directory import WorkDirectory
from engine.artifact import (
    check_checksums,
    check_file_output,
    check_output,
    partial_path,
    read_provenance,
    whole_or_nothing,
    write_provenance,
)
from engine.checkpoint import Checkpoint, load_tokenizer, resolve
from engine.errors import CompressError, DataError, OptionError, OutputError
from engine.json_file import load_json, write_json
from engine.model import Decoder
from engine.progress import Progress, no_progress
from engine.report import peak_memory_bytes
from engine.skip_tables import FILE_NAME as SKIP_TABLES

GRADIENT_METHODS = {"fisher": fisher_scores, "taylor": taylor_scores}
METHODS = ("diep", "naee", *SCORES, *GRADIENT_METHODS, "random")
"""Of pruning; those of merging are MERGE_METHODS."""
DEFAULT_SCOPE = {"naee": "layer"}
"""Scopes of methods that cannot rank the experts of all layers together; "global" for all others."""
SKIP_TABLE_SEQUENCES = 16
"""Sequences on which the result's own skip tables are measured."""


@dataclass(frozen=True)
class PruneOptions:
    """One run of pruning or, with a method of MERGE_METHODS, of merging."""

    model: str
    output: Path
    budget: Budget | None
    """None with a ready-made plan."""
    method: str = "diep"
    merge: str = "none"
    """What becomes of pruned experts: "none" drops them, "cka" merges each into its most similar kept one."""
    naee_limit: int = SUBSET_LIMIT
    diep: DiepOptions = field(default_factory=DiepOptions)
    recover: RecoverOptions = field(default_factory=RecoverOptions)
    calibration: CalibrationOptions = field(default_factory=CalibrationOptions)
    statistics: Path | None = None
    plan: Path | None = None
    plan_output: Path | None = None
    dtype: torch.dtype | None = None
    device: str = "cpu"
    overwrite: bool = False
    resume: bool = False


class HeldOut(TypedDict):
    """What a model did on the held-out text, as JSON; None where there was no such text."""

    perplexity: float | None
    routed: dict[str, list[int]] | None
    """By decoder layer index, the tokens routed to each expert."""


@dataclass
class Prepared:
    """Inputs that were found to be good, before any work."""

    checkpoint: Checkpoint
    calibration: CalibrationOptions
    tokens_SL: Tensor
    held_out_SL: Tensor | None
    statistics: Statistics | None
    plan: Plan | None
    dtype: torch.dtype
    budget: Budget | None


@dataclass(frozen=True)
class Shared:
    """What several runs on one model and text have in common (sweep.py); its weights were found to be finite."""

    prepared: Prepared
    work: WorkDirectory


def prune(options: PruneOptions, progress: Progress = no_progress, shared: Shared | None = None) -> dict[str, Any]:
    """Run the job; the figures of the result, with the keys of `compress prune --json`."""
    started = time.monotonic()
    work = WorkDirectory(options.output, shared=None if shared is None else shared.work)
    if (figures := finished_before(options, work)) is not None:
        return figures
    check_outputs(options)
    if shared is None:
        prepared = prepare(options)
        prepared.checkpoint.check_finite(lambda names: progress(names, "checking weights"))
    else:
        prepared = replace(shared.prepared, budget=checked_budget(options, shared.prepared.checkpoint))
    try:
        work.begin(resumable(options) | fingerprints(prepared), options.resume)
        before = work.once(
            "held_out_before",
            lambda: _held_out(prepared.checkpoint, prepared, options, progress, "before"),
            shared=True,
        )
        plan = prepared.plan or make_plan(options, prepared, work, progress)
        check_fits(plan, prepared.checkpoint)
        trained = recovered(options, prepared, plan, work, progress)
        figures = write_artifact(options, prepared, plan, trained, before, started, progress, work)
        if options.plan_output is not None:
            write_json(options.plan_output, plan_to_json(plan))
    except CompressError:
        work.abandon()
        raise
    except OSError as error:
        work.abandon()
        raise OutputError(f"{options.output}: {error.strerror or error}; make space or give another --output") from error
    work.remove()
    return figures


def finished_before(options: PruneOptions, work: WorkDirectory) -> dict[str, Any] | None:
    """For `--resume` of a run whose result was already in place: its figures. None if there is still work to do."""
    if not options.resume or options.overwrite or not os.path.isdir(options.output):
        return None
    provenance = read_provenance(options.output)
    if provenance is None or provenance.get("options") != _recorded(options):
        return None
    source = provenance.get("source")
    if not isinstance(source, dict) or source.get("fingerprint") != Checkpoint(resolve(options.model)).fingerprint():
        return None
    check_checksums(options.output, provenance)
    if options.plan_output is not None:
        write_json(options.plan_output, provenance["plan"])
    shutil.rmtree(partial_path(options.output), ignore_errors=True)
    work.remove()
    return dict(provenance["figures"])


def check_outputs(options: PruneOptions) -> None:
    """Raise OutputError unless the results can be written."""
    check_output(options.output, options.overwrite)
    if options.plan_output is not None:
        check_file_output(options.plan_output, options.overwrite)


def checked_budget(options: PruneOptions, checkpoint: Checkpoint) -> Budget | None:
    """With its default filled in; None with a ready-made plan. Raises OptionError where the model cannot be cut to it."""
    budget, per_token = options.budget, checkpoint.config.experts_per_token
    if budget is None:
        return None
    if options.method == "naee" and budget.scope == "global":
        raise OptionError("naee compares subsets within a layer and cannot rank across layers; leave out --scope global")
    if budget.min_experts == 0:  # the default: at least max(1, k) in each layer (methods.md §2.5)
        least = per_token if budget.experts is None else min(per_token, budget.experts)
        budget = replace(budget, min_experts=max(1, least))
    budget.check(checkpoint.config.experts_by_layer)
    return budget


def prepare(options: PruneOptions) -> Prepared:
    """Open and check every input that the run will need; nothing is written. Raises a CompressError for bad input."""
    options.diep.check()
    options.recover.check()
    checkpoint = Checkpoint(resolve(options.model))
    config = checkpoint.config
    if not config.moe_layers:
        raise OptionError(
            f"{options.model}: is not a mixture of experts ({config.architecture.model_type}), so it has no experts to spare"
        )
    budget = checked_budget(options, checkpoint)
    calibration = options.calibration.filled(checkpoint)
    plan = None
    if options.plan is not None:
        plan = plan_from_json(load_json(options.plan, "plan"))
        check_fits(plan, checkpoint)
    statistics = None
    if options.statistics is not None:
        statistics = load_statistics(options.statistics, config)
        if statistics.header.get("model") != checkpoint.fingerprint():
            raise DataError(f"{options.statistics}: statistics of another model than {options.model}; calibrate again")
    tokenizer = load_tokenizer(checkpoint)
    tokens, held_out = calibration_texts(calibration, tokenizer, config.vocabulary_size)
    dtype = options.dtype or checkpoint.model_dtype
    return Prepared(checkpoint, calibration, tokens, held_out, statistics, plan, dtype, budget)


def _recorded(options: PruneOptions) -> dict[str, Any]:
    """The same with the search's defaults filled in, as provenance has it."""
    return resumable(options) | {"diep": asdict(options.diep.filled())}


def fingerprints(prepared: Prepared) -> dict[str, str]:
    """Which model and which text, as JSON."""
    return {
        "fingerprint": prepared.checkpoint.fingerprint(),
        "tokens": hashlib.sha256(prepared.tokens_SL.numpy().tobytes()).hexdigest(),
    }


def resumable(options: PruneOptions) -> dict[str, Any]:
    """The options that decide the result, as JSON."""
    values = asdict(options)
    for key in ("resume", "overwrite", "plan_output"):
        del values[key]
    return dict(json.loads(json.dumps(values, default=str)))


def make_plan(options: PruneOptions, prepared: Prepared, work: WorkDirectory, progress: Progress) -> Plan:
    """The experts that stay by score and budget, or the groups that become one expert each."""
    assert prepared.budget is not None
    if options.method in MERGE_METHODS:
        assert prepared.budget.experts is not None and prepared.budget.scope == "layer"
        groups = merge_groups(options.method, _statistics(options, prepared, work, progress), prepared.budget.experts)
        return _merged(groups, options, prepared, work, progress)
    if options.method == "naee":
        kept = _best_subsets(options, prepared, work, progress)
    else:
        kept = prepared.budget.select(_scores(options, prepared, work, progress))
    if options.merge == "cka":
        groups = merge_pruned(kept, _statistics(options, prepared, work, progress))
        return _merged(groups, options, prepared, work, progress)
    return pruning_plan(kept)


def _best_subsets(
    options: PruneOptions, prepared: Prepared, work: WorkDirectory, progress: Progress
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
        progress=lambda layers: progress(layers, "comparing subsets (layers)"),
    )


def _merged(
    groups: Mapping[int, Sequence[Group]],
    options: PruneOptions,
    prepared: Prepared,
    work: WorkDirectory,
    progress: Progress,
) -> Plan:
    """The groups aligned, once over interruptions: with wide experts that takes longest."""

    def aligned() -> dict[str, Any]:
        return plan_to_json(
            merging_plan(
                groups,
                prepared.checkpoint,
                device=options.device,
                progress=lambda layers: progress(layers, "aligning (layers)"),
            )
        )

    return plan_from_json(work.once("merging_plan", aligned))


def _scores(options: PruneOptions, prepared: Prepared, work: WorkDirectory, progress: Progress) -> dict[int, Tensor]:
    """Scores by the chosen method."""
    if options.method == "diep":
        decoder = _decoder(options, prepared)
        return search(
            decoder,
            prepared.tokens_SL,
            options.diep,
            state_path=work.search_state,
            resume=options.resume or work.shared != work.path,
            fisher=lambda: _gradient_scores("fisher", lambda: decoder, options, prepared, work),
            progress=lambda epochs: progress(epochs, "searching (epochs)"),
        )
    if options.method in GRADIENT_METHODS:
        return _gradient_scores(options.method, lambda: _decoder(options, prepared), options, prepared, work)
    return scores(options.method, _statistics(options, prepared, work, progress), options.calibration.seed)


def _gradient_scores(
    method: str, decoder: Callable[[], Decoder], options: PruneOptions, prepared: Prepared, work: WorkDirectory
) -> dict[int, Tensor]:
    """Gate gradients, computed once for all who need them: DiEP starts from gate Fisher, on the decoder that it has."""

    def compute() -> dict[str, list[float]]:
        scored = GRADIENT_METHODS[method](decoder(), prepared.tokens_SL, options.diep.seed)
        return {str(layer): row.tolist() for layer, row in scored.items()}

    values = work.once(f"{method}_scores", compute, shared=True)
    return {int(layer): torch.tensor(row, dtype=torch.float64) for layer, row in values.items()}


def _decoder(options: PruneOptions, prepared: Prepared) -> Decoder:
    decoder = Decoder(prepared.checkpoint.config, prepared.checkpoint.source(prepared.dtype, options.device))
    decoder.checkpoint_activations = True
    return decoder


def _statistics(options: PruneOptions, prepared: Prepared, work: WorkDirectory, progress: Progress) -> Statistics:
    if prepared.statistics is not None:
        return prepared.statistics
    saved = work.statistics
    if saved.is_file():
        return load_statistics(saved, prepared.checkpoint.config)
    statistics = collect(
        prepared.checkpoint,
        prepared.tokens_SL,
        dtype=prepared.dtype,
        device=options.device,
        seed=options.calibration.seed,
        progress=lambda layers: progress(layers, "calibrating (layers)"),
    )
    statistics.save(saved)
    return statistics


def _held_out(checkpoint: Checkpoint, prepared: Prepared, options: PruneOptions, progress: Progress, when: str) -> HeldOut:
    """What the model does on the held-out text; nothing where there is none."""
    if prepared.held_out_SL is None:
        return {"perplexity": None, "routed": None}
    counts: dict[int, list[int]] = {}
    value = perplexity(
        checkpoint,
        prepared.held_out_SL,
        dtype=prepared.dtype,
        device=options.device,
        visit=routed_counts(counts),
        progress=lambda layers: progress(layers, f"perplexity {when} (layers)"),
    )
    return {"perplexity": value, "routed": {str(layer): own for layer, own in counts.items()}}


def recovered(
    options: PruneOptions, prepared: Prepared, plan: Plan, work: WorkDirectory, progress: Progress
) -> dict[str, Tensor]:
    """What recovery has trained, by tensor name; nothing where it was not asked for."""
    if not options.recover.steps:
        return {}
    return recover(
        plan,
        prepared.checkpoint,
        prepared.tokens_SL,
        options.recover,
        dtype=prepared.dtype,
        device=options.device,
        state_path=work.path / "recovery.safetensors",
        resume=options.resume,
        progress=lambda steps: progress(steps, "recovering (steps)"),
    )


def write_artifact(
    options: PruneOptions,
    prepared: Prepared,
    plan: Plan,
    trained: dict[str, Tensor],
    before: HeldOut,
    started: float,
    progress: Progress,
    work: WorkDirectory,
) -> dict[str, Any]:
    """Apply the plan into a temporary sibling, measure it, describe it, and give it its name."""
    source = prepared.checkpoint
    with whole_or_nothing(options.output, options.overwrite) as directory:
        apply(plan, source, directory, replaced=trained, progress=lambda names: progress(names, "writing"))
        for path in carried_files(source):
            shutil.copyfile(path, directory / path.name)
        result = Checkpoint(directory)
        own = None
        if result.config.moe_layers:
            sample = prepared.tokens_SL[:SKIP_TABLE_SEQUENCES]
            own = collect(result, sample, dtype=prepared.dtype, device=options.device, seed=options.calibration.seed)
            skip_tables(own).save(directory / SKIP_TABLES)
        after = _held_out(result, prepared, options, progress, "after")
        if options.method == "diep" and work.search_state.is_file():
            save_scores(scores_of_state(work.search_state, source.config.moe_layers), directory)
        models = [_before(options, prepared, before, work), _after(options, plan, result, own, after)]
        pictures = draw(directory, models) if plots.available() else []
        seconds = time.monotonic() - started
        figures = _figures(options, prepared, result, before["perplexity"], after["perplexity"], seconds)
        figures["plots"] = [picture.path.name for picture in pictures]
        skipping = (directory / SKIP_TABLES).exists()
        card = model_card(figures, options.model, result.config.moe_layers, skipping, pictures)
        (directory / "README.md").write_text(card, encoding="utf-8")
        write_provenance(directory, _provenance(options, prepared, plan, figures))
    return figures


def _before(options: PruneOptions, prepared: Prepared, held_out: HeldOut, work: WorkDirectory) -> Pictured:
    """The source, with its statistics where the method needed them."""
    config, statistics = prepared.checkpoint.config, prepared.statistics
    if statistics is None and work.statistics.is_file():
        statistics = load_statistics(work.statistics, config)
    label = f"{Path(options.model).name} (before)"
    return Pictured(label, config.experts_by_layer, statistics, routed=_routed(held_out))


def _after(
    options: PruneOptions, plan: Plan, result: Checkpoint, statistics: Statistics | None, held_out: HeldOut
) -> Pictured:
    return Pictured(
        f"{options.output.name} (after)",
        result.config.experts_by_layer,
        statistics,
        kept_experts(plan, result.config),
        load_scores(result.directory),
        _routed(held_out),
    )


def _routed(held_out: HeldOut) -> dict[int, list[int]] | None:
    counts = held_out["routed"]
    return None if counts is None else {int(layer): own for layer, own in counts.items()}


def _figures(
    options: PruneOptions,
    prepared: Prepared,
    result: Checkpoint,
    before: float | None,
    after: float | None,
    seconds: float,
) -> dict[str, Any]:
    source = prepared.checkpoint
    experts_before, experts_after = sum(source.config.experts_per_layer), sum(result.config.experts_per_layer)
    calibration = prepared.calibration
    own: dict[str, Any] = {}
    if options.method == "naee" and prepared.budget is not None:
        counts = source.config.experts_by_layer
        own["naee"] = search_used(counts, prepared.budget.kept_per_layer(counts), options.naee_limit)
    return {
        "artifact": str(options.output),
        "method": options.method if prepared.plan is None else "plan",
        "sparsity": 1.0 - experts_after / experts_before,
        "experts_before": experts_before,
        "experts_after": experts_after,
        "experts_per_layer": list(result.config.experts_per_layer),
        "parameters_before": source.parameters,
        "parameters_after": result.parameters,
        "bytes_before": source.bytes,
        "bytes_after": result.bytes,
        "perplexity_before": before,
        "perplexity_after": after,
        "evaluation": f"{calibration.evaluation_samples} held-out sequences of {calibration.sequence_length} tokens of "
        f"{calibration.data}",
        "recover_steps": options.recover.steps,
        "seconds": seconds,
        "peak_memory_bytes": peak_memory_bytes(),
    } | own


def _provenance(options: PruneOptions, prepared: Prepared, plan: Plan, figures: dict[str, Any]) -> dict[str, Any]:
    return {
        "source": {"model": options.model, "fingerprint": prepared.checkpoint.fingerprint()},
        "method": figures["method"],
        "options": _recorded(options),
        "seed": options.calibration.seed,
        "plan": plan_to_json(plan),
        "experts_per_layer": figures["experts_per_layer"],
        "skip_tables": SKIP_TABLES,
        "figures": figures,
        "versions": {name: version(name) for name in ("torch", "transformers", "safetensors", "numpy")},
    }
