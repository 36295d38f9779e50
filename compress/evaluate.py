"""Evaluation: perplexity by this project's streaming forward pass, and tasks by lm-evaluation-harness."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from typing import Any

from calibrate.text import token_batches
from compress.options.evaluate import EvaluateOptions
from compress.report.figures import EvaluateFigures, TaskFigures
from compress.run.perplexity import exported_perplexity, perplexity
from engine.checkpoint.checkpoint import Checkpoint, ModelDirectory, resolve
from engine.checkpoint.remote_code import check_loadable
from engine.checkpoint.tokenizer import load_tokenizer, load_transformers_tokenizer
from engine.errors import DataError, OptionError
from engine.kernels.devices import resolve_device
from engine.onnx.runtime import backend_of, open_exported
from engine.passes.memory_need import MemoryDemand, budget_for
from engine.progress import Progress, no_progress
from engine.transformers_models.transformers_model import load_decoder


def tasks(checkpoint: Checkpoint, names: list[str], *, limit: int | None = None, device: str = "cpu") -> dict[str, Any]:
    """Return the results of lm-evaluation-harness tasks, given by name or as YAML files, run through transformers."""
    check_loadable(checkpoint.directory, checkpoint.raw_config)
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise OptionError("tasks need lm-evaluation-harness; install it with `pip install moe-compress[tasks]`") from error
    loaded = load_decoder(checkpoint.directory, checkpoint.raw_config).to(device)
    tokenizer = load_transformers_tokenizer(checkpoint)
    try:
        known = _task_manager(all(Path(name).is_file() for name in names))
        # Loaded objects instead of a path, so that this project decides which code transformers runs.
        model = HFLM(pretrained=loaded, tokenizer=tokenizer, device=device)
        results = lm_eval.simple_evaluate(model=model, tasks=names, task_manager=known, limit=limit)
    except Exception as error:  # several libraries raise errors for unknown names and data that cannot be downloaded
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise DataError(
            f"tasks {','.join(names)}: lm-evaluation-harness failed ({reason}); check names and network"
        ) from error
    scores: dict[str, Any] = results["results"]
    return scores


@cache
def _task_manager(only_files: bool) -> Any:
    """Return the available tasks, cached for all models: the harness reads thousands of files for its own tasks."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=not only_files)


def evaluate_model(options: EvaluateOptions, progress: Progress = no_progress) -> EvaluateFigures:
    """Run `compress evaluate`; return the perplexity of a model.

    An export runs on the CPU for "auto" and has no memory limit.
    """
    started = time.monotonic()
    directory, dtype, memory_limit = resolve(options.model), options.dtype, options.memory_limit
    exported = backend_of(directory, options.backend) == "onnx"
    if exported and memory_limit is not None:
        raise OptionError(f"{options.model}: an exported model is read whole by onnxruntime; leave out --memory-limit")
    described = ModelDirectory(directory) if exported else Checkpoint(directory)
    filled = options.calibration.filled(described)
    assert filled.data is not None and filled.sequence_length is not None
    tokens = token_batches(
        filled.data,
        load_tokenizer(described),
        samples=filled.samples,
        sequence_length=filled.sequence_length,
        seed=filled.seed,
        split=options.split,
    )
    if isinstance(described, Checkpoint):
        dtype = dtype or described.model_dtype
        budget = budget_for(memory_limit, described, MemoryDemand(dtype, tokens.shape[1]))
        value = perplexity(
            described,
            tokens,
            dtype=dtype,
            device=resolve_device(options.device),
            budget=budget,
            progress=lambda layers: progress(layers, "perplexity (layers)"),
        )
    else:
        asked = "auto" if dtype is None else str(dtype).removeprefix("torch.")
        decoder = open_exported(described, options.device, asked)
        value = exported_perplexity(described, decoder, tokens, lambda rows: progress(rows, "perplexity (sequences)"))
    return {
        "metric": "perplexity",
        "value": value,
        "tokens": tokens.numel() - len(tokens),
        "seconds": time.monotonic() - started,
        "data": filled.data,
        "split": options.split,
    }


def evaluate_tasks(model: str, names: list[str], *, limit: int | None, device: str) -> TaskFigures:
    """Run `compress evaluate --tasks` with lm-evaluation-harness."""
    started = time.monotonic()
    checkpoint = Checkpoint(resolve(model))
    results = tasks(checkpoint, names, limit=limit, device=device)
    return {"metric": "tasks", "value": results, "tokens": None, "seconds": time.monotonic() - started}
