"""Quality of the models of a comparison: perplexity on the same text, and tasks of lm-evaluation-harness.

Perplexity is measured per token, so it is comparable only between models whose tokenizers split the text into the same
tokens. Rows have a `perplexity_group`; the models of one group read exactly the same token ids. Other tokenizers are
accepted, since size, speed and tasks are still comparable. The groups are marked wherever perplexities are shown, and a
note explains them.

Shape suffixes: S sequences, L positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from calibrate.windows import Windows
from compress.comparison.subject import Subject, dtype_of
from compress.options.compare import CompareOptions
from compress.run.losses import Losses
from compress.run.perplexity import exported_losses, routed_losses
from compress.tasks.run import run_tasks
from engine.adapted.adapted_pass import routings_of
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.skip_tables import skipping_routings
from engine.generation.generate import Engine
from engine.generation.report import ExportedSkipCounter
from engine.onnx.runtime import open_exported
from engine.progress import Progress


def measure_quality(
    rows: Sequence[dict[str, Any]],
    subjects: Sequence[Subject],
    held_out: Sequence[Windows | None],
    options: CompareOptions,
    progress: Progress,
) -> None:
    """Write the perplexity and the tasks of each model into its row, with and without skipping.

    held_out: the windows in each model's own tokens; None where perplexity is not requested.
    """
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
    return {
        "perplexity": losses.perplexity,
        "perplexity_stderr": losses.standard_error(windows.documents_S),
        **losses.ratio_to(first, windows.documents_S).figures("perplexity"),
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
        dtype=dtype_of(checkpoint, options.dtype),
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
