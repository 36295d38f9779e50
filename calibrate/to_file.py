"""`compress calibrate`: the statistics of a model as a file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from calibrate.collect import collect
from calibrate.options import CalibrationOptions, calibration_texts
from engine import processes
from engine.artifact import check_file_output
from engine.checkpoint import Checkpoint, load_tokenizer, resolve
from engine.errors import OptionError
from engine.progress import Progress, no_progress
from engine.report import peak_memory_bytes


def calibrate_to_file(
    model: str,
    output: Path,
    calibration: CalibrationOptions,
    *,
    dtype: torch.dtype | None,
    device: str,
    overwrite: bool,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """`compress calibrate`: statistics of a model into a file. Several processes share the text, and the first writes."""
    started = time.monotonic()
    if processes.is_first():
        check_file_output(output, overwrite)
    checkpoint = Checkpoint(resolve(model))
    if not checkpoint.config.moe_layers:
        raise OptionError(f"{model}: is not a mixture of experts, so there is nothing to calibrate")
    filled = calibration.filled(checkpoint)
    tokens, _ = calibration_texts(filled, load_tokenizer(checkpoint), checkpoint.config.vocabulary_size)
    checkpoint.check_finite(lambda names: progress(processes.share(list(names)), "checking weights"))
    statistics = collect(
        checkpoint,
        tokens,
        dtype=dtype or checkpoint.model_dtype,
        device=device,
        seed=filled.seed,
        progress=lambda layers: progress(layers, "calibrating (layers)"),
    )
    statistics.header |= {"data": filled.data}
    if processes.is_first():
        statistics.save(output)
    return {
        "statistics": str(output),
        "tokens": tokens.numel(),
        "seconds": time.monotonic() - started,
        "peak_memory_bytes": peak_memory_bytes(),
    }
