"""Comparison of several models in one run: quality on the same text, size, speed, memory, and pictures of their experts.

Perplexity is measured per token, so it is comparable only between models whose tokenizers split the text into the same
tokens. Rows have a `perplexity_group`; the models of one group read exactly the same token ids. Other tokenizers are
accepted, since size, speed and tasks are still comparable. The groups are marked wherever perplexities are shown, and a
note explains them.

Shape suffixes: S sequences, L positions, N experts of a layer, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calibrate.batches import evaluation_windows
from calibrate.collect import collect
from calibrate.options import CalibrationOptions
from calibrate.statistics import Statistics
from calibrate.text import token_batches
from calibrate.windows import Windows
from compress.options.compare import CompareOptions
from compress.plans.plan import plan_from_json
from compress.report import canvas
from compress.report.columns import to_csv
from compress.report.diep_scores import load_scores
from compress.report.expert_record import load_record
from compress.report.page import page
from compress.report.pictures import Picture, Pictured, kept_experts, save, unit_shares
from compress.report.pictures import draw as draw_experts
from compress.report.scatter import Point, scatter
from compress.run.claims import claims_output
from compress.run.losses import Losses
from compress.run.perplexity import exported_losses, routed_losses
from compress.tasks.run import require, run_tasks
from engine.adapted.adapted_checkpoint import open_mixture_checkpoint
from engine.adapted.adapted_pass import routings_of
from engine.bench.backends import BenchSpec
from engine.bench.side_by_side import bench, cases_for
from engine.checkpoint.artifact import check_output, whole_or_nothing
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.kinds import is_exported
from engine.checkpoint.model_directory import ModelDirectory, resolve
from engine.checkpoint.tokenizer import load_tokenizer
from engine.decoder.skip_tables import SkipTables, load_skip_tables, skipping_routings
from engine.errors import OptionError, PlanError
from engine.files.json_file import write_json, writing
from engine.generation.generate import Engine
from engine.generation.report import ExportedSkipCounter
from engine.kernels.devices import resolve_device
from engine.onnx.runtime import open_exported
from engine.progress import Progress, no_progress

COMPARISON = "comparison.json"
"""The file that marks a directory as a comparison, which --overwrite may replace."""
MOST_IN_HEADING = 4


@dataclass(frozen=True)
class Subject:
    """One of the models, opened."""

    name: str
    """The model's name as given by the user."""
    label: str
    """A short name that no other model has."""
    model: ModelDirectory
    """A Checkpoint, except for an export."""
    bytes: int
    """Bytes of the weights as stored."""
    tables: SkipTables | None
    skip_threshold: float | None
    """Skip threshold; None for an export whose threshold is unknown."""

    @property
    def is_exported(self) -> bool:
        """Whether onnxruntime runs the model."""
        return not isinstance(self.model, Checkpoint)


@claims_output
def compare(options: CompareOptions, progress: Progress = no_progress) -> dict[str, Any]:
    """Run `compress compare`; return {"rows": one dict per model, "notes": remarks, "output": the directory or None}.

    Raises OptionError, CheckpointError, DataError or OutputError for invalid input, before anything is measured.
    """
    subjects = prepare(options)
    options = replace(options, device=str(resolve_device(options.device)))
    text = common_text(options.text, subjects)
    held_out = _held_out(subjects, text)
    seen = _seen(subjects, text if options.output is not None else replace(text, samples=0))
    rows = [describe(subject) for subject in subjects]
    _measure_quality(rows, subjects, held_out, options, progress)
    if options.speed:
        _measure_speed(rows, subjects, options, progress)
    notes = [*_tokenizer_notes(rows), *_skipping_notes(rows, options), *_export_notes(rows, options)]
    result = {"rows": rows, "notes": notes, "output": None if options.output is None else str(options.output)}
    if options.output is not None:
        pairs = zip(subjects, seen, strict=True)
        statistics = [_statistics(subject, tokens_SL, options, progress) for subject, tokens_SL in pairs]
        write_report(options, result, subjects, statistics, _settings(options, text))
    return result


def prepare(options: CompareOptions) -> list[Subject]:
    """Open every model and run all checks that need no measuring; nothing is written."""
    if not options.models:
        raise OptionError("name at least one model to compare")
    if options.output is not None:
        check_output(options.output, options.overwrite, COMPARISON)
        canvas.require()
    if options.speed:
        cases_for(options.prompt_tokens, options.generated_tokens)
        if options.repetitions < 1:
            raise OptionError(f"repetitions is {options.repetitions}; it must be at least 1")
    if options.tasks:
        require()
    resolve_device(options.device)
    subjects = [_subject(*names, options) for names in zip(options.models, labels(options.models), strict=True)]
    if options.skip_threshold and not any(each.skip_threshold for each in subjects if not each.is_exported):
        raise OptionError("a skip threshold needs calibrated tables, and none of these models has them; leave it at 0")
    return subjects


def _subject(name: str, label: str, options: CompareOptions) -> Subject:
    """Open a model, with the given threshold if it can skip, and 0 for dense models and models without skip tables."""
    directory = resolve(name)
    if is_exported(directory):
        return _exported_subject(name, label, directory, options)
    checkpoint = open_mixture_checkpoint(directory)
    tables = load_skip_tables(directory, checkpoint.config)
    can_skip = tables is not None and bool(checkpoint.config.moe_layers)
    threshold = options.skip_threshold if can_skip else 0.0
    own = routings_of(checkpoint, torch.float32, "cpu")
    skipping_routings(checkpoint.config, tables, threshold, own=own)  # raises an error for a threshold out of range
    return Subject(name, label, checkpoint, checkpoint.bytes, tables, threshold)


def _exported_subject(name: str, label: str, directory: Path, options: CompareOptions) -> Subject:
    """Open an export: load it once as a check, then release it, because models are in memory one after the other."""
    model = ModelDirectory(directory)
    exported = open_exported(model, options.device, options.dtype)
    return Subject(name, label, model, exported.weights_bytes, None, exported.skip_threshold)


def _dtype(checkpoint: Checkpoint, wanted: str) -> torch.dtype:
    """Return the torch dtype of the computation; "auto" is the checkpoint's own."""
    found: torch.dtype = checkpoint.model_dtype if wanted == "auto" else getattr(torch, wanted)
    return found


def labels(models: Sequence[str]) -> list[str]:
    """Return each model's last name, or its full name where two share that, with a number where a model is repeated."""
    last = [Path(model).name or model for model in models]
    found = [name if last.count(name) == 1 else model for name, model in zip(last, models, strict=True)]
    counts = [found[: index + 1].count(name) for index, name in enumerate(found)]
    return [name if count == 1 else f"{name} ({count})" for name, count in zip(found, counts, strict=True)]


def common_text(text: CalibrationOptions, subjects: Sequence[Subject]) -> CalibrationOptions:
    """Return one text and sequence length for all models, the shortest default.

    Raises OptionError where default texts differ.
    """
    asked = replace(text, samples=max(1, text.samples))
    filled = [asked.filled(subject.model) for subject in subjects]
    if len(sources := sorted({str(each.data) for each in filled})) > 1:
        raise OptionError(f"these models' default texts differ ({', '.join(sources)}); name one for all with --data")
    length = min(each.sequence_length or 0 for each in filled)
    return replace(filled[0], sequence_length=length, samples=text.samples)


def _held_out(subjects: Sequence[Subject], text: CalibrationOptions) -> list[Windows | None]:
    """Return the held-out windows in each model's own tokens; None where none are requested."""
    if text.evaluation_samples == 0:
        return [None] * len(subjects)
    return [evaluation_windows(text, load_tokenizer(each.model), text.evaluation_samples) for each in subjects]


def _seen(subjects: Sequence[Subject], text: CalibrationOptions) -> list[Tensor | None]:
    """Return the calibration text [S, L] in each model's own tokens; None where no samples are requested."""
    if text.samples == 0:
        return [None] * len(subjects)
    assert text.data is not None and text.sequence_length is not None
    common = {"samples": text.samples, "sequence_length": text.sequence_length, "seed": text.seed}
    return [token_batches(text.data, load_tokenizer(each.model), split="calibration", **common) for each in subjects]


def describe(subject: Subject) -> dict[str, Any]:
    """Return a row with the figures that need no measuring; the others are None until they are measured."""
    model = subject.model
    config, provenance = model.config, model.provenance
    unexported = "checkpoint" if provenance is None else "artifact"
    return {
        "model": subject.name,
        "label": subject.label,
        "kind": "onnx" if subject.is_exported else unexported,
        "method": None if provenance is None else str(provenance.get("method")),
        "architecture": config.architecture.model_type,
        "layers": len(config.layers),
        "experts_per_layer": list(config.experts_per_layer),
        "experts_per_token": config.experts_per_token if config.moe_layers else None,
        "bytes": subject.bytes,
        "parameters": model.parameters,
        "active_parameters": model.active_parameters,
        "perplexity": None,
        "perplexity_stderr": None,
        "perplexity_ratio": None,
        "perplexity_ratio_low": None,
        "perplexity_ratio_high": None,
        "perplexity_without_skipping": None,
        "perplexity_without_skipping_stderr": None,
        "perplexity_tokens": None,
        "perplexity_documents": None,
        "perplexity_group": None,
        "tasks": None,
        "tasks_without_skipping": None,
        "prefill_tokens_per_second_mean": None,
        "prefill_tokens_per_second_sd": None,
        "decode_tokens_per_second_mean": None,
        "decode_tokens_per_second_sd": None,
        "time_to_first_token_seconds": None,
        "peak_memory_bytes": None,
        "skip_threshold": subject.skip_threshold,
        "experts_skipped_share": None,
        "decode_experts_skipped_share": None,
    }


# Quality


def _measure_quality(
    rows: Sequence[dict[str, Any]],
    subjects: Sequence[Subject],
    held_out: Sequence[Windows | None],
    options: CompareOptions,
    progress: Progress,
) -> None:
    groups: list[tuple[Tensor, Losses]] = []
    for row, subject, windows in zip(rows, subjects, held_out, strict=True):
        threshold = 0.0 if subject.is_exported else subject.skip_threshold or 0.0
        if windows is not None:
            losses, row["experts_skipped_share"] = _losses(subject, windows.tokens_SL, threshold, options, progress)
            row["perplexity_group"], first = _group(windows.tokens_SL, losses, groups)
            row |= _perplexity(windows, losses, first)
            if threshold:
                unskipped, _ = _losses(subject, windows.tokens_SL, 0.0, options, progress)
                row["perplexity_without_skipping"] = unskipped.perplexity
                row["perplexity_without_skipping_stderr"] = unskipped.standard_error(windows.documents_S)
        if options.tasks:
            row["tasks"] = _tasks(subject, threshold, options, progress)
            if threshold:
                row["tasks_without_skipping"] = _tasks(subject, 0.0, options, progress)


def _group(tokens_SL: Tensor, losses: Losses, groups: list[tuple[Tensor, Losses]]) -> tuple[int, Losses]:
    """Return the number, from 1, of the group of models that read the same token ids, and its first model's losses.

    groups: the token ids and the first model's losses of each group; a new group is appended.
    """
    for index, (other_SL, first) in enumerate(groups, start=1):
        if torch.equal(tokens_SL, other_SL):
            return index, first
    groups.append((tokens_SL, losses))
    return len(groups), losses


def _perplexity(windows: Windows, losses: Losses, first: Losses) -> dict[str, Any]:
    """Return the figures of a model's perplexity; its ratio is to the first model of the same group."""
    ratio = losses.ratio_to(first, windows.documents_S)
    return {
        "perplexity": losses.perplexity,
        "perplexity_stderr": losses.standard_error(windows.documents_S),
        "perplexity_ratio": ratio.value,
        "perplexity_ratio_low": ratio.low,
        "perplexity_ratio_high": ratio.high,
        "perplexity_tokens": windows.predictions,
        "perplexity_documents": windows.documents,
    }


def _tasks(subject: Subject, threshold: float, options: CompareOptions, progress: Progress) -> dict[str, dict[str, float]]:
    """Return the metrics of every task at this skip threshold."""
    engine = Engine.open(
        subject.name,
        device="auto" if subject.is_exported else options.device,
        dtype=options.dtype,
        skip_threshold=threshold,
        skip_rule=options.skip_rule,
        progress=progress,
    )
    return task_figures(run_tasks(engine, list(options.tasks), limit=options.limit, progress=progress))


def _losses(
    subject: Subject, tokens_SL: Tensor, threshold: float, options: CompareOptions, progress: Progress
) -> tuple[Losses, float | None]:
    """Return (losses, share of skipped expert evaluations or None for a dense model) at this skip threshold."""
    checkpoint, config = subject.model, subject.model.config
    if not isinstance(checkpoint, Checkpoint):
        return _exported_losses(subject, tokens_SL, progress)
    own = routings_of(checkpoint, torch.float32, options.device)
    skipping = skipping_routings(config, subject.tables, threshold, device=options.device, own=own, rule=options.skip_rule)
    return routed_losses(
        checkpoint,
        tokens_SL,
        skipping,
        dtype=_dtype(checkpoint, options.dtype),
        device=options.device,
        progress=lambda layers: progress(layers, f"perplexity of {subject.label} (layers)"),
    )


def _exported_losses(subject: Subject, tokens_SL: Tensor, progress: Progress) -> tuple[Losses, float | None]:
    """Return the losses of an export by onnxruntime, and its share of skipped evaluations or None for a dense model."""
    decoder = open_exported(subject.model)
    counter = ExportedSkipCounter(decoder)
    counter.attach()
    described = f"perplexity of {subject.label} (sequences)"
    losses = exported_losses(subject.model, decoder, tokens_SL, lambda rows: progress(rows, described))
    return losses, counter.share if subject.model.config.moe_layers else None


def task_figures(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the metrics of lm-evaluation-harness by task. Its names are "NAME,FILTER"; the filter "none" is left out."""
    return {
        task: {
            name.removesuffix(",none"): float(value)
            for name, value in own.items()
            if "," in name and isinstance(value, int | float) and not isinstance(value, bool) and value == value
        }
        for task, own in results.items()
    }


# Speed


def _measure_speed(
    rows: Sequence[dict[str, Any]], subjects: Sequence[Subject], options: CompareOptions, progress: Progress
) -> None:
    cases = cases_for(options.prompt_tokens, options.generated_tokens)
    specs = [
        BenchSpec(
            subject.name,
            "onnx" if subject.is_exported else "torch",
            device="cpu" if subject.is_exported else options.device,
            dtype=options.dtype,
            threads=options.threads,
            skip_threshold=0.0 if subject.is_exported else subject.skip_threshold or 0.0,
            skip_rule=options.skip_rule,
            seed=options.text.seed,
        )
        for subject in subjects
    ]
    found = iter(bench(specs, cases, options.repetitions, lambda rounds: progress(rounds, "speed (rounds)")))
    for row in rows:
        for case in cases:
            measured = next(found)
            kind = "prefill" if case.kind == "pp" else "decode"
            row[f"{kind}_tokens_per_second_mean"] = measured["tokens_per_second_mean"]
            row[f"{kind}_tokens_per_second_sd"] = measured["tokens_per_second_sd"]
            row["peak_memory_bytes"] = measured["peak_memory_bytes"]
            if case.kind == "pp":
                # The prefill test ends when the first new token has been chosen.
                row["time_to_first_token_seconds"] = case.tokens / measured["tokens_per_second_median"]
            elif row["experts_per_layer"]:
                row["decode_experts_skipped_share"] = measured["experts_skipped_share"]


# Notes on the figures


def _tokenizer_notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    groups: dict[int, list[str]] = {}
    for row in rows:
        if row["perplexity_group"] is not None:
            groups.setdefault(row["perplexity_group"], []).append(row["label"])
    if len(groups) < 2:
        return []
    named = "; ".join(f"[{group}] {', '.join(names)}" for group, names in groups.items())
    return [f"Tokenizers differ, so perplexities compare only inside a group: {named}."]


def _skipping_notes(rows: Sequence[dict[str, Any]], options: CompareOptions) -> list[str]:
    tabled = [row for row in rows if row["kind"] != "onnx"]
    without = [row["label"] for row in tabled if options.skip_threshold and row["skip_threshold"] == 0]
    notes = []
    if without:
        notes.append(f"Without tables for skipping, so with threshold 0: {', '.join(without)}.")
    return notes


def _export_notes(rows: Sequence[dict[str, Any]], options: CompareOptions) -> list[str]:
    exports = [row for row in rows if row["kind"] == "onnx"]
    notes = []
    if exports and options.skip_threshold:
        thresholds = ["unknown" if row["skip_threshold"] is None else f"{row['skip_threshold']:g}" for row in exports]
        own = [f"{row['label']} ({threshold})" for row, threshold in zip(exports, thresholds, strict=True)]
        notes.append(f"Exports skip by the threshold that they were exported with: {', '.join(own)}.")
    if exports and options.device != "cpu":
        notes.append(f"Exports run on the cpu: {', '.join(row['label'] for row in exports)}.")
    return notes


def _settings(options: CompareOptions, text: CalibrationOptions) -> dict[str, Any]:
    """Return how the figures were measured, in words for the page."""
    settings: dict[str, Any] = {}
    if text.evaluation_samples:
        settings["perplexity"] = (
            f"{text.evaluation_samples} held-out sequences of {text.sequence_length} tokens of {text.data}, {text.windows}, "
            f"seed {text.seed}"
        )
    if options.tasks:
        limit = "" if options.limit is None else f", first {options.limit} examples each"
        settings["tasks"] = f"{', '.join(options.tasks)}, by lm-evaluation-harness{limit}"
    if options.speed:
        settings["speed"] = (
            f"prompt of {options.prompt_tokens} tokens, {options.generated_tokens} generated, batch 1, mean of "
            f"{options.repetitions} interleaved repetitions, each model in its own process"
        )
    if text.samples:
        settings["expert usage"] = f"{text.samples} sequences of {text.sequence_length} tokens of {text.data}"
    if options.skip_threshold:
        settings["skip threshold"] = options.skip_threshold
    settings |= {"dtype": options.dtype, "device": options.device}
    settings["threads"] = options.threads or torch.get_num_threads()
    return settings | {"versions": ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))}


# The report


def _statistics(
    subject: Subject, tokens_SL: Tensor | None, options: CompareOptions, progress: Progress
) -> Statistics | None:
    """Return the statistics of a model; None for a dense model, an export, or a comparison without samples."""
    checkpoint = subject.model
    if tokens_SL is None or not checkpoint.config.moe_layers or not isinstance(checkpoint, Checkpoint):
        return None
    return collect(
        checkpoint,
        tokens_SL,
        dtype=_dtype(checkpoint, options.dtype),
        device=options.device,
        seed=options.text.seed,
        progress=lambda layers: progress(layers, f"experts of {subject.label} (layers)"),
    )


def write_report(
    options: CompareOptions,
    result: dict[str, Any],
    subjects: Sequence[Subject],
    statistics: Sequence[Statistics | None],
    settings: dict[str, Any],
) -> None:
    """Write comparison.json, comparison.csv, PNG pictures and index.html, all or none of them."""
    assert options.output is not None
    with whole_or_nothing(options.output, options.overwrite, COMPARISON) as directory:
        write_json(directory / COMPARISON, {"schema_version": 1} | result | {"settings": settings})
        with writing(directory, "the comparison"):
            (directory / "comparison.csv").write_text(to_csv(result["rows"]), encoding="utf-8")
            pictures = draw(directory, result["rows"], subjects, statistics)
            html = page(
                result["rows"],
                title=heading([subject.label for subject in subjects]),
                notes=result["notes"],
                settings=settings,
                pictures=pictures,
            )
            (directory / "index.html").write_text(html, encoding="utf-8")


def heading(labels: Sequence[str]) -> str:
    """Return the models in one line: the first and a count where there are many."""
    if len(labels) <= MOST_IN_HEADING:
        return " · ".join(canvas.short(label) for label in labels)
    return f"{canvas.short(labels[0])} and {len(labels) - 1} others"


def draw(
    directory: Path, rows: Sequence[dict[str, Any]], subjects: Sequence[Subject], statistics: Sequence[Statistics | None]
) -> list[Picture]:
    """Draw every picture for which these models have data; return the PNG files of the directory in the page's order."""
    pictures = []
    y_label = "held-out perplexity (lower is better)"
    if points := _points(rows, "bytes", "", 1e-6):
        figure = scatter(points, "weights in MB", y_label)
        about = "Down and to the left is better."
        pictures.append(save(directory, "quality_and_size", figure, "Quality against size", about))
    if points := _points(rows, "decode_tokens_per_second_mean", "decode_tokens_per_second_sd"):
        figure = scatter(points, "decode, tokens per second", y_label)
        about = "Down and to the right is better; bars are standard deviations."
        pictures.append(save(directory, "quality_and_speed", figure, "Quality against speed", about))
    pairs = zip(subjects, statistics, strict=True)
    return pictures + draw_experts(directory, [model for pair in pairs for model in _pictured(*pair)])


def _points(rows: Sequence[dict[str, Any]], key: str, deviation: str, scale: float = 1.0) -> list[Point]:
    """Return the points of the rows that have both figures.

    The points are perplexity over `key`, with the standard deviation under `deviation`.
    """
    return [
        Point(
            name=row["label"],
            x=row[key] * scale,
            y=row["perplexity"],
            group=row["perplexity_group"],
            x_sd=row.get(deviation) or 0.0,
            series=row["method"],
        )
        for row in rows
        if row[key] is not None and row["perplexity"] is not None
    ]


def _pictured(subject: Subject, statistics: Statistics | None) -> list[Pictured]:
    """Return the experts of a model as measured now, or else as its artifact recorded them, after those of its source."""
    model, kept, units = subject.model, None, None
    # the plan of an artifact of a later version, for example; its experts are then numbered from 0
    with suppress(PlanError):
        plan, figures = plan_from_json((model.provenance or {}).get("plan")), (model.provenance or {}).get("figures", {})
        kept, before = kept_experts(plan, model.config), (figures.get("units_before"), figures.get("experts_before"))
        if all(type(count) is int and count > 0 for count in before):
            units = unit_shares(plan, model.config, before[0] // before[1])
    scores, counts = load_scores(model.directory), model.config.experts_by_layer
    record = load_record(model.directory) if statistics is None and counts else None
    if record is None or {layer: len(own) for layer, own in record.after.routed.items()} != counts:
        return [Pictured(subject.label, counts, statistics, kept, scores, units=units)]
    source = Pictured(f"{subject.label} (before)", {}, recorded=record.before)
    return [source, Pictured(subject.label, counts, None, kept, scores, units=units, recorded=record.after)]
