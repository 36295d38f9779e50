"""From a command's decisions to a complete artifact: written, measured, described and named, in a way that can be
resumed.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch

from calibrate.collect import collect
from calibrate.skipping import skip_tables
from calibrate.statistics import Statistics, load_statistics
from calibrate.windows import Windows
from compress.options.job import JobOptions
from compress.plans.apply import apply, carried_files
from compress.plans.gguf_plan import planned_file, write_planned
from compress.plans.plan import plan_to_json
from compress.report import canvas
from compress.report.card import model_card
from compress.report.diep_scores import load_scores
from compress.report.expert_record import ExpertRecord, save_record
from compress.report.figures import ModelFigures, PerplexityFigures
from compress.report.pictures import Pictured, draw, kept_experts, unit_shares
from compress.run.job import AnyRun, HeldOut, Made, fingerprints, held_out
from compress.run.losses import Losses, before_and_after
from compress.run.work_directory import WorkDirectory
from engine.adapted.adapted_checkpoint import open_mixture_checkpoint
from engine.checkpoint.artifact import (
    check_checksums,
    check_file_output,
    check_output,
    partial_path,
    read_provenance,
    whole_or_nothing,
    write_provenance,
)
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_directory import resolve
from engine.checkpoint.skip_table_file import FILE_NAME as SKIP_TABLES
from engine.errors import OptionError
from engine.files.gguf_file import SUFFIX, check_name
from engine.files.json_file import replacing, write_json
from engine.generation.report import peak_memory_bytes
from engine.passes import processes

SKIP_TABLE_SEQUENCES = 16
"""Number of sequences on which the result's own skip tables are measured."""


def finished_before(
    options: JobOptions, work: WorkDirectory, identity: Callable[[], dict[str, str]] | None = None
) -> dict[str, Any] | None:
    """Return the figures of a run that is resumed with `--resume` and whose result is complete; None if work is left.

    identity: returns the identity of all models that the result is made from, where that is not one decoder.
    """
    return processes.told(_finished_before(options, work, identity) if processes.is_first() else None)  # type: ignore[no-any-return]


def _finished_before(
    options: JobOptions, work: WorkDirectory, identity: Callable[[], dict[str, str]] | None
) -> dict[str, Any] | None:
    if not options.resume or options.overwrite or not os.path.isdir(options.output):
        return None
    provenance = read_provenance(options.output)
    if provenance is None or provenance.get("options") != options.recorded():
        return None
    source = provenance.get("source")
    wanted = open_mixture_checkpoint(resolve(options.model)).identity() if identity is None else identity()
    if not isinstance(source, dict) or any(source.get(key) != value for key, value in wanted.items()):
        return None
    check_checksums(options.output, provenance)
    if options.plan_output is not None:
        write_json(options.plan_output, provenance["plan"])
    shutil.rmtree(partial_path(options.output), ignore_errors=True)
    work.remove()
    return dict(provenance["figures"])


def check_outputs(options: JobOptions) -> None:
    """Raise OutputError unless the results can be written; the first of several processes checks."""
    if not processes.is_first():
        return
    is_file = options.makes_file
    if is_file and not options.writes_gguf:
        raise OptionError(
            f"{options.output}: the result is a directory; `compress export --format gguf` makes a GGUF file of it"
        )
    (check_file_output if is_file else check_output)(options.output, options.overwrite)
    if is_file:
        check_name(options.output)
    if options.plan_output is not None:
        check_file_output(options.plan_output, options.overwrite)
        if options.plan_output.resolve() in (options.output.resolve(), Path(options.model).resolve()):
            raise OptionError(f"{options.plan_output}: is the model or the result itself; give the plan another file")


def check_sweep(output: Path, runs: Sequence[JobOptions], marker: str) -> None:
    """Raise OutputError where results cannot be written. An earlier sweep is continued or, on request, replaced.

    marker: the file in a sweep's directory by which --overwrite knows it.
    """
    if not processes.is_first() or (runs[0].resume and output.is_dir()):
        return
    check_output(output, runs[0].overwrite, marker)
    for run in runs:
        check_outputs(run)


def carry_out(run: AnyRun, make: Callable[[], Made]) -> ModelFigures:
    """Measure the source, make, write and measure the result; return its figures.

    Invalid input leaves no files. An interruption leaves the state from which `--resume` continues. Several processes
    make and measure together; the first writes, and all return the figures.
    """
    options, prepared, work = run.options, run.prepared, run.work
    processes.wait()  # no process begins before all have checked their inputs
    with work.until_whole(options.output):
        work.begin(options.deciding() | fingerprints(prepared), options.resume)
        before = work.once(
            "held_out_before",
            lambda: held_out(run, prepared.checkpoint, "before", work.shared / "held_out"),
            shared=True,
        )
        work.forget(work.shared / "held_out")
        made = make()
        write = write_file if options.makes_file else write_artifact
        figures = write(run, made, before)
        if options.plan_output is not None and processes.is_first():
            write_json(options.plan_output, plan_to_json(made.plan))
    return figures


def write_artifact(run: AnyRun, made: Made, before: HeldOut) -> ModelFigures:
    """Apply the plan into a temporary sibling directory, measure and describe the result, and rename the directory."""
    options, source = run.options, run.prepared.checkpoint
    if not processes.is_first():
        _measured(run, open_mixture_checkpoint(Path(processes.told())))
        return cast(ModelFigures, processes.told())
    with whole_or_nothing(options.output, options.overwrite) as directory:
        apply(
            made.plan,
            source,
            directory,
            replaced=made.trained,
            quantiser=made.quantiser,
            progress=run.bar("writing"),
        )
        for path in carried_files(source.files_directory):
            shutil.copyfile(path, directory / path.name)
        processes.told(str(directory.absolute()))
        result = open_mixture_checkpoint(directory)
        own, after = _measured(run, result)
        if own is not None:
            skip_tables(own).save(directory / SKIP_TABLES)
        made.add_files(directory)
        widest = source.config.widest_ffn()
        models = [_before(run, before), _after(options, made, result, own, after, widest)]
        record = ExpertRecord(*(model.seen for model in models))
        if record.after.routed or record.after.within:
            save_record(record, directory)
        pictures = [*made.draw(directory), *draw(directory, models)] if canvas.available() else []
        figures = _figures(run, made, result, perplexity_figures(run.prepared.held_out, before, after))
        figures["plots"] = [picture.path.name for picture in pictures]
        skipping = (directory / SKIP_TABLES).exists()
        lines = (*made.card, *(made.quantiser.card(result) if made.quantiser else ()))
        card = model_card(
            *(figures, options.model, result.config.moe_layers, skipping, pictures, made.title, lines),
            needs_code="auto_map" in result.raw_config,
        )
        (directory / "README.md").write_text(card, encoding="utf-8")
        write_provenance(directory, _provenance(run, made, figures, skipping))
    processes.told(figures)
    return figures


def write_file(run: AnyRun, made: Made, before: HeldOut) -> ModelFigures:
    """Write the result as one GGUF file beside its place, compare what is read back, measure it, and rename it."""
    options, source = run.options, run.prepared.checkpoint
    if not processes.is_first():
        held_out(run, Checkpoint(Path(processes.told())), "after")
        return cast(ModelFigures, processes.told())
    planned = planned_file(made.plan, source, made.trained)
    with replacing(options.output, "GGUF file", SUFFIX) as partial:
        result = write_planned(planned, source, partial, run.bar("writing"))
        processes.told(str(partial.absolute()))
        after = held_out(run, result, "after")
        figures = _figures(run, made, result, perplexity_figures(run.prepared.held_out, before, after))
    processes.told(figures)
    return figures


def _measured(run: AnyRun, result: Checkpoint) -> tuple[Statistics | None, HeldOut]:
    """Return the result's own statistics, where it has experts and there is text, and its results on the held-out text."""
    options, prepared = run.options, run.prepared
    own, sample_SL = None, prepared.tokens_SL[:SKIP_TABLE_SEQUENCES]
    if result.config.moe_layers and len(sample_SL):
        own = collect(
            result,
            sample_SL,
            dtype=prepared.dtype,
            device=options.device,
            seed=options.calibration.seed,
            budget=run.memory_budget,
        )
    return own, held_out(run, result, "after")


def _before(run: AnyRun, seen: HeldOut) -> Pictured:
    """Return the source for pictures, with its statistics where the method needed them."""
    config, statistics = run.prepared.checkpoint.config, run.prepared.statistics
    if statistics is None and run.work.statistics.is_file():
        statistics = load_statistics(run.work.statistics, config)
    label = f"{Path(run.options.model).name} (before)"
    return Pictured(label, config.experts_by_layer, statistics, routed=_routed(seen))


def _after(
    options: JobOptions, made: Made, result: Checkpoint, statistics: Statistics | None, seen: HeldOut, width: int
) -> Pictured:
    """Return the result for pictures. width: hidden units of an expert of the source."""
    return Pictured(
        f"{options.output.name} (after)",
        result.config.experts_by_layer,
        statistics,
        kept_experts(made.plan, result.config),
        load_scores(result.directory),
        _routed(seen),
        units=unit_shares(made.plan, result.config, width),
    )


def _routed(seen: HeldOut) -> dict[int, list[int]] | None:
    counts = seen["routed"]
    return None if counts is None else {int(layer): own for layer, own in counts.items()}


def perplexity_figures(windows: Windows | None, before: HeldOut, after: HeldOut) -> PerplexityFigures:
    """Return the perplexities before and after, with their standard errors, and their ratio, paired by document."""
    if windows is None or before["losses"] is None or after["losses"] is None:
        return cast(PerplexityFigures, dict.fromkeys(PerplexityFigures.__annotations__) | {"evaluation_documents": 0})
    predictions, documents_S = windows.tokens_SL.shape[1] - 1, windows.documents_S
    both = (before["losses"], after["losses"])
    first, then = (Losses(torch.tensor(each, dtype=torch.float64), predictions) for each in both)
    figures = before_and_after("perplexity", first, then, documents_S) | {"evaluation_documents": windows.documents}
    return cast(PerplexityFigures, figures)


def _figures(run: AnyRun, made: Made, result: Checkpoint, perplexities: PerplexityFigures) -> ModelFigures:
    """Return the figures of every smaller model, followed by the command's own."""
    options, source = run.options, run.prepared.checkpoint
    experts_before, experts_after = sum(source.config.experts_per_layer), sum(result.config.experts_per_layer)
    removed = 1.0 - experts_after / experts_before if experts_before else 0.0
    calibration, configs = run.prepared.calibration, (source.config, result.config)
    units_before, units_after = (sum(map(sum, config.ffn_widths(made.include).values())) for config in configs)
    own: dict[str, object] = {
        "artifact": str(options.output),
        "method": made.method,
        "sparsity": 1.0 - units_after / units_before if units_before and made.plan.kind == "moe" else removed,
        "experts_before": experts_before,
        "experts_after": experts_after,
        "experts_per_layer": list(result.config.experts_per_layer),
        "units_before": units_before,
        "units_after": units_after,
        "widths_per_layer": [list(own) for own in result.config.ffn_widths().values()],
        "parameters_before": source.parameters,
        "parameters_after": result.parameters,
        "bytes_before": source.bytes,
        "bytes_after": result.bytes,
        **perplexities,
        "evaluation": f"{calibration.evaluation_samples} held-out sequences of {calibration.sequence_length} tokens of "
        f"{calibration.data}",
        "seconds": time.monotonic() - run.started,
        "peak_memory_bytes": peak_memory_bytes(),
        "loading_note": result.loading_note,
    }
    choice = result.prediction_choice(source, has_own_experts=bool(made.plan.prediction))
    if (note := result.prediction_note or choice) is not None:
        own["prediction_note"] = note
    rounding: Mapping[str, object] = made.quantiser.figures(source, result) if made.quantiser else {}
    return cast(ModelFigures, {**own, **made.figures, **rounding})


def _provenance(run: AnyRun, made: Made, figures: ModelFigures, skipping: bool) -> dict[str, Any]:
    options = run.options
    return {
        "source": {"model": options.model} | run.prepared.models,
        "method": figures["method"],
        "options": options.recorded(),
        "seed": options.calibration.seed,
        "plan": plan_to_json(made.plan),
        "experts_per_layer": figures["experts_per_layer"],
        "skip_tables": SKIP_TABLES if skipping else None,
        "figures": figures,
        "versions": {name: version(name) for name in ("torch", "transformers", "safetensors", "numpy")},
    }
