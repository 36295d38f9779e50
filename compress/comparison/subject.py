"""The models of a comparison: how they are opened, named and described before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from calibrate.options import CalibrationOptions
from compress.options.compare import CompareOptions
from engine.adapted.adapted_checkpoint import open_mixture_checkpoint
from engine.adapted.adapted_pass import routings_of
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.kinds import is_exported
from engine.checkpoint.model_directory import ModelDirectory, resolve
from engine.decoder.skip_tables import SkipTables, load_skip_tables, skipping_routings
from engine.errors import OptionError
from engine.onnx.runtime import open_exported


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


def opened(name: str, label: str, options: CompareOptions) -> Subject:
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


def dtype_of(checkpoint: Checkpoint, wanted: str) -> torch.dtype:
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
