"""Notes on the figures of a comparison, and how they were measured."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch

from calibrate.options import CalibrationOptions
from compress.options.compare import CompareOptions


def notes_on(rows: Sequence[dict[str, Any]], options: CompareOptions) -> list[str]:
    """Return what a reader of these rows has to know, a sentence each."""
    return [*_tokenizer_notes(rows), *_skipping_notes(rows, options), *_export_notes(rows, options)]


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


def settings_of(options: CompareOptions, text: CalibrationOptions) -> dict[str, Any]:
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
