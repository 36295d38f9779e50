"""Comparison of several models in one run: quality on the same text, size, speed, memory, and pictures of their experts.

Shape suffixes: S sequences, L positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from calibrate.batches import evaluation_windows
from calibrate.collect import collect
from calibrate.options import CalibrationOptions
from calibrate.statistics import Statistics
from calibrate.text import token_batches
from calibrate.windows import Windows
from compress.comparison.notes import notes_on, settings_of
from compress.comparison.pages import COMPARISON, write_report
from compress.comparison.quality import measure_quality
from compress.comparison.speed import measure_speed
from compress.comparison.subject import Subject, common_text, describe, dtype_of, labels, opened
from compress.options.compare import CompareOptions
from compress.report import canvas
from compress.run.claims import claims_output
from compress.tasks.run import require
from engine.bench.side_by_side import cases_for
from engine.checkpoint.artifact import check_output
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.tokenizer import load_tokenizer
from engine.errors import OptionError
from engine.kernels.devices import resolve_device
from engine.progress import Progress, no_progress


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
    measure_quality(rows, subjects, held_out, options, progress)
    if options.speed:
        measure_speed(rows, subjects, options, progress)
    result = {
        "rows": rows,
        "notes": notes_on(rows, options),
        "output": None if options.output is None else str(options.output),
    }
    if options.output is not None:
        pairs = zip(subjects, seen, strict=True)
        statistics = [_statistics(subject, tokens_SL, options, progress) for subject, tokens_SL in pairs]
        write_report(options, result, subjects, statistics, settings_of(options, text))
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
    subjects = [opened(*names, options) for names in zip(options.models, labels(options.models), strict=True)]
    if options.skip_threshold and not any(each.skip_threshold for each in subjects if not each.is_exported):
        raise OptionError("a skip threshold needs calibrated tables, and none of these models has them; leave it at 0")
    return subjects


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
        dtype=dtype_of(checkpoint, options.dtype),
        device=options.device,
        seed=options.text.seed,
        progress=lambda layers: progress(layers, f"experts of {subject.label} (layers)"),
    )
