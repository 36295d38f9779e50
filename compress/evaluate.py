"""Evaluation: perplexity by this project's streaming forward pass, and tasks of lm-evaluation-harness."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor

from calibrate.batches import evaluation_windows
from compress.options.evaluate import EvaluateOptions
from compress.report.figures import EvaluateFigures, TaskFigures
from compress.run.losses import Losses
from compress.run.perplexity import exported_losses, routed_losses
from compress.tasks.run import require, run_tasks
from engine.adapted.adapted_checkpoint import open_mixture_checkpoint
from engine.adapted.adapted_pass import routings_of
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_directory import ModelDirectory, resolve
from engine.checkpoint.tokenizer import load_tokenizer
from engine.decoder.skip_tables import load_skip_tables, skipping_routings
from engine.errors import OptionError
from engine.generation.generate import Engine
from engine.kernels.devices import resolve_device
from engine.onnx.runtime import backend_of, open_exported
from engine.passes.memory_need import MemoryDemand, budget_for
from engine.progress import Progress, no_progress


def evaluate_model(options: EvaluateOptions, progress: Progress = no_progress) -> EvaluateFigures:
    """Run `compress evaluate`; return the perplexity of a model.

    An export runs on the CPU for "auto" and has no memory limit.
    """
    started = time.monotonic()
    directory = resolve(options.model)
    exported = backend_of(directory, options.backend) == "onnx"
    if exported and options.memory_limit is not None:
        raise OptionError(f"{options.model}: an exported model is read whole by onnxruntime; leave out --memory-limit")
    if exported and options.skip_threshold:
        raise OptionError("an exported model has a fixed skip threshold; give the skip threshold to the export")
    described = ModelDirectory(directory) if exported else open_mixture_checkpoint(directory)
    filled = options.calibration.filled(described)
    assert filled.data is not None
    windows = evaluation_windows(filled, load_tokenizer(described), filled.samples, options.split)
    tokens = windows.tokens_SL
    share = None
    if isinstance(described, Checkpoint):
        found, share = _streamed(options, described, tokens, progress)
    else:
        decoder = open_exported(described, options.device, _dtype_name(options))
        found = exported_losses(described, decoder, tokens, lambda rows: progress(rows, "perplexity (sequences)"))
    return {
        "metric": "perplexity",
        "value": found.perplexity,
        "value_stderr": found.standard_error(windows.documents_S),
        "tokens": windows.predictions,
        "documents": windows.documents,
        "skip_threshold": options.skip_threshold,
        "experts_skipped_share": share,
        "seconds": time.monotonic() - started,
        "data": filled.data,
        "split": options.split,
        "windows": filled.windows,
    }


def _streamed(
    options: EvaluateOptions, checkpoint: Checkpoint, tokens_SL: Tensor, progress: Progress
) -> tuple[Losses, float | None]:
    """Return the losses of a checkpoint, layer by layer, and the share of skipped experts; None where none can be."""
    dtype, device, config = options.dtype or checkpoint.model_dtype, resolve_device(options.device), checkpoint.config
    passing: dict[str, Any] = {
        "dtype": dtype,
        "device": device,
        "budget": budget_for(
            options.memory_limit, checkpoint, MemoryDemand(dtype, tokens_SL.shape[1], tokens=tokens_SL.numel())
        ),
        "progress": lambda layers: progress(layers, "perplexity (layers)"),
    }
    tables = load_skip_tables(checkpoint.directory, config) if options.skip_threshold else None
    own = routings_of(checkpoint, dtype, device)
    threshold, kept, rule = options.skip_threshold, options.skip_min_experts, options.skip_rule
    routings = skipping_routings(config, tables, threshold, kept, device, own=own, rule=rule)
    return routed_losses(checkpoint, tokens_SL, routings, **passing)


def evaluate_tasks(options: EvaluateOptions, progress: Progress = no_progress) -> TaskFigures:
    """Run `compress evaluate --tasks`: the tasks of lm-evaluation-harness, on our engine."""
    started = time.monotonic()
    require()
    engine = Engine.open(
        options.model,
        device=options.device,
        dtype=_dtype_name(options),
        skip_threshold=options.skip_threshold,
        skip_min_experts=options.skip_min_experts,
        skip_rule=options.skip_rule,
        backend=options.backend,
        progress=progress,
    )
    results = run_tasks(engine, list(options.tasks), limit=options.limit, progress=progress)
    return {
        "metric": "tasks",
        "value": results,
        "tokens": None,
        "skip_threshold": options.skip_threshold,
        "experts_skipped_share": None if engine.skip_counter is None else engine.skip_counter.share,
        "seconds": time.monotonic() - started,
    }


def _dtype_name(options: EvaluateOptions) -> str:
    return "auto" if options.dtype is None else str(options.dtype).removeprefix("torch.")
