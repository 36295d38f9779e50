"""`compress calibrate`: the statistics of a model as a file."""

from __future__ import annotations

import hashlib
import time
from typing import Any

from calibrate.batches import calibration_texts
from calibrate.collect import collect, held_bytes
from compress.options.calibrate import CalibrateOptions
from compress.run.claims import claiming
from compress.run.job import check_weights
from compress.run.work_directory import WorkDirectory
from engine.adapted.adapted_checkpoint import open_mixture_checkpoint
from engine.checkpoint.artifact import check_file_output
from engine.checkpoint.model_directory import resolve
from engine.checkpoint.tokenizer import load_tokenizer
from engine.errors import OptionError
from engine.generation.report import peak_memory_bytes
from engine.passes import processes
from engine.passes.memory_need import MemoryDemand, budget_for
from engine.progress import Progress, no_progress


def calibrate_to_file(options: CalibrateOptions, progress: Progress = no_progress) -> dict[str, Any]:
    """Save the statistics of a model in a file; return the figures of `compress calibrate --json`.

    With `resume` a run continues from the layer where an earlier one was interrupted.

    Several processes share the text, and the first writes.
    """
    started = time.monotonic()
    output = options.output
    with claiming(None, output):
        if processes.is_first():
            check_file_output(output, options.overwrite)
        checkpoint = open_mixture_checkpoint(resolve(options.model))
        if not checkpoint.config.moe_layers:
            raise OptionError(f"{options.model}: is not a mixture of experts, so there is nothing to calibrate")
        filled = options.calibration.filled(checkpoint)
        tokens, _ = calibration_texts(filled, load_tokenizer(checkpoint), checkpoint.config.vocabulary_size)
        dtype, work = options.dtype or checkpoint.model_dtype, WorkDirectory(output)
        needed = MemoryDemand(dtype, tokens.shape[1], other_bytes=held_bytes(checkpoint.config), tokens=tokens.numel())
        budget = budget_for(options.memory_limit, checkpoint, needed)
        with work.until_whole(work.path):
            text = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()
            work.begin(checkpoint.identity() | {"tokens": text, "dtype": str(dtype), "seed": filled.seed}, options.resume)
            check_weights(checkpoint, progress)
            statistics = collect(
                checkpoint,
                tokens,
                dtype=dtype,
                device=options.device,
                seed=filled.seed,
                budget=budget,
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
        "unselected_share_per_layer": [float(own.unselected_probability_share) for own in statistics.layers.values()],
        "seconds": time.monotonic() - started,
        "peak_memory_bytes": peak_memory_bytes(),
    }
