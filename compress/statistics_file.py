"""`compress calibrate`: the statistics of a model as a file."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import torch

from calibrate.collect import collect, held_bytes
from calibrate.options import CalibrationOptions, calibration_texts
from compress.run.claims import claiming
from compress.run.job import check_weights
from compress.run.work_directory import WorkDirectory
from engine.checkpoint.artifact import check_file_output
from engine.checkpoint.checkpoint import Checkpoint, resolve
from engine.checkpoint.tokenizer import load_tokenizer
from engine.errors import OptionError
from engine.generation.report import peak_memory_bytes
from engine.passes import processes
from engine.passes.memory_budget import limited
from engine.passes.memory_need import Work, budget_for
from engine.progress import Progress, no_progress


def calibrate_to_file(
    model: str,
    output: Path,
    calibration: CalibrationOptions,
    *,
    dtype: torch.dtype | None,
    device: str,
    overwrite: bool,
    resume: bool = False,
    memory_limit: int | None = None,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """`compress calibrate`: statistics of a model into a file; `resume` goes on from the layer where one was interrupted.

    Several processes share the text, and the first writes.
    """
    started = time.monotonic()
    with claiming(file=output):
        if processes.is_first():
            check_file_output(output, overwrite)
        checkpoint = Checkpoint(resolve(model))
        if not checkpoint.config.moe_layers:
            raise OptionError(f"{model}: is not a mixture of experts, so there is nothing to calibrate")
        filled = calibration.filled(checkpoint)
        tokens, _ = calibration_texts(filled, load_tokenizer(checkpoint), checkpoint.config.vocabulary_size)
        dtype, work = dtype or checkpoint.model_dtype, WorkDirectory(output)
        needed = Work(dtype, tokens.shape[1], other_bytes=held_bytes(checkpoint.config))
        with limited(budget_for(memory_limit, checkpoint, needed)), work.until_whole(work.path):
            text = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()
            work.begin(checkpoint.identity() | {"tokens": text, "dtype": str(dtype), "seed": filled.seed}, resume)
            check_weights(checkpoint, progress)
            statistics = collect(
                checkpoint,
                tokens,
                dtype=dtype,
                device=device,
                seed=filled.seed,
                directory=work.path / "calibration",
                progress=lambda layers: progress(layers, "calibrating (layers)"),
            )
            statistics.header |= {"data": filled.data}
            if processes.is_first():
                statistics.save(output)
            processes.wait()
    return {
        "statistics": str(output),
        "tokens": tokens.numel(),
        "seconds": time.monotonic() - started,
        "peak_memory_bytes": peak_memory_bytes(),
    }
