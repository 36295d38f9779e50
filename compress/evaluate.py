"""Quality: perplexity by our own streaming forward, tasks through lm-evaluation-harness."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from calibrate.options import CalibrationOptions
from calibrate.text import Split, token_batches
from compress.work_directory import read_value, write_value
from engine import processes
from engine.attention import Rotary
from engine.checkpoint import Checkpoint, ModelDirectory, resolve
from engine.errors import CheckpointError, DataError, OptionError
from engine.experts import MoeBlock
from engine.generate import resolve_device
from engine.kv_cache import KeyValueCache
from engine.memory_budget import limited
from engine.memory_need import Work, budget_for
from engine.model import DecoderLayer
from engine.onnx_runtime import OnnxDecoder, backend_of, open_exported
from engine.progress import Progress, no_progress
from engine.remote_code import check_loadable
from engine.routing import NO_EXPERT, Selection
from engine.streaming import Visit, stream_negative_log_likelihood
from engine.tokenizer import load_tokenizer
from engine.transformers_model import load_decoder

PIECE = 512
"""Positions whose logits an exported model gives at a time."""


def perplexity(
    checkpoint: Checkpoint,
    tokens_SL: Tensor,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    visit: Visit = lambda index, layer: None,
    directory: Path | None = None,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> float:
    """exp of the mean negative log-likelihood of each sequence's tokens after its first, layer by layer.

    `visit` may change a layer before it runs. What an interrupted pass has left in `directory` is gone on with. Several
    processes share out the sequences, and all get the value.
    """
    rows = processes.own_rows(*tokens_SL.shape)
    kept = None if directory is None else processes.own_directory(directory, rows)
    total, count = processes.added_up(
        stream_negative_log_likelihood(
            checkpoint, tokens_SL[rows], dtype=dtype, device=device, visit=visit, directory=kept, progress=progress
        )
    )
    if not math.isfinite(total):
        raise CheckpointError(f"{checkpoint.directory}: the loss is not finite; activations overflow, try --dtype float32")
    return math.exp(min(total / count, 700.0))


def exported_perplexity(
    model: ModelDirectory,
    decoder: OnnxDecoder,
    tokens_SL: Tensor,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> float:
    """The same of an exported model and its decoder, sequence by sequence, PIECE positions at a time.

    Where the angles of a long text are others, its first piece is as long as it takes to tell that it is one.
    """
    total, (sequences, length) = 0.0, tokens_SL.shape
    switch = Rotary(decoder.config).switch
    first = PIECE if switch is None or length <= switch else max(PIECE, switch + 1)
    for row in progress(range(sequences)):
        cache = KeyValueCache(decoder.config, 1, length, decoder.dtype)
        for begin in (0, *range(first, length, PIECE)):
            end = min(begin + PIECE if begin else first, length)
            logits_LV = decoder(tokens_SL[row : row + 1, begin:end], None, cache)[0].float()
            following_L = tokens_SL[row, begin + 1 : end + 1]
            total += float(F.cross_entropy(logits_LV[: len(following_L)], following_L, reduction="sum"))
    if not math.isfinite(total):
        raise CheckpointError(f"{model.directory}: the loss is not finite; activations overflow, export it in float32")
    return math.exp(min(total / (sequences * (length - 1)), 700.0))


def routed_counts(counts: dict[int, list[int]], directory: Path | None = None) -> Visit:
    """A `visit` that notes, by decoder layer index, the tokens routed to each expert; it costs next to nothing.

    Of all processes together, where there are several. With a `directory` it is noted there too; what was is in `counts`.
    """
    noted = [] if directory is None else directory.glob("routed-*.json")
    counts |= {int(path.stem.removeprefix("routed-")): read_value(path, "routed tokens") for path in noted}

    def visit(index: int, layer: DecoderLayer) -> Callable[[], None] | None:
        block = layer.feed_forward
        if not isinstance(block, MoeBlock):
            return None
        experts = len(block.experts)
        total_N = torch.zeros(experts, dtype=torch.long, device=block.router_ND.device)

        def observe(x_TD: Tensor, logits_TN: Tensor, selection: Selection) -> None:
            chosen = selection.experts[selection.experts != NO_EXPERT]
            total_N.add_(torch.bincount(chosen, minlength=experts))

        def finish() -> None:
            processes.add_up([total_N])
            counts[index] = total_N.tolist()
            if directory is not None and processes.is_first():
                write_value(directory / f"routed-{index}.json", counts[index])

        block.observer = observe
        return finish

    return visit


def tasks(checkpoint: Checkpoint, names: list[str], *, limit: int | None = None, device: str = "cpu") -> dict[str, Any]:
    """Results of lm-evaluation-harness tasks, by name or as YAML files of their own, through transformers."""
    check_loadable(checkpoint.directory, checkpoint.raw_config)
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise OptionError("tasks need lm-evaluation-harness; install it with `pip install moe-compress[tasks]`") from error
    loaded = load_decoder(checkpoint.directory, checkpoint.raw_config).to(device)
    tokenizer = load_tokenizer(checkpoint)
    try:
        known = _task_manager(all(Path(name).is_file() for name in names))
        # A model and a tokenizer, not a path: the harness would leave to transformers what to run there.
        model = HFLM(pretrained=loaded, tokenizer=tokenizer, device=device)
        results = lm_eval.simple_evaluate(model=model, tasks=names, task_manager=known, limit=limit)
    except Exception as error:  # unknown names, data that cannot be fetched: errors of several libraries
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise DataError(
            f"tasks {','.join(names)}: lm-evaluation-harness failed ({reason}); check names and network"
        ) from error
    scores: dict[str, Any] = results["results"]
    return scores


@cache
def _task_manager(only_files: bool) -> Any:
    """Which tasks there are, once for all models: the harness reads thousands of files for those that it brings along."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=not only_files)


def evaluate_model(
    model: str,
    calibration: CalibrationOptions,
    *,
    split: Split,
    dtype: torch.dtype | None,
    device: str,
    backend: str = "auto",
    memory_limit: int | None = None,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """`compress evaluate`: perplexity of a model. `device` "auto" is the CPU for an export; it takes no `memory_limit`."""
    started = time.monotonic()
    directory = resolve(model)
    exported = backend_of(directory, backend) == "onnx"
    if exported and memory_limit is not None:
        raise OptionError(f"{model}: an exported model is read whole by onnxruntime; leave out --memory-limit")
    described = ModelDirectory(directory) if exported else Checkpoint(directory)
    filled = calibration.filled(described)
    assert filled.data is not None and filled.sequence_length is not None
    tokens = token_batches(
        filled.data,
        load_tokenizer(described),
        samples=filled.samples,
        sequence_length=filled.sequence_length,
        seed=filled.seed,
        split=split,
    )
    if isinstance(described, Checkpoint):
        dtype = dtype or described.model_dtype
        with limited(budget_for(memory_limit, described, Work(dtype, tokens.shape[1]))):
            value = perplexity(
                described,
                tokens,
                dtype=dtype,
                device=resolve_device(device),
                progress=lambda layers: progress(layers, "perplexity (layers)"),
            )
    else:
        asked = "auto" if dtype is None else str(dtype).removeprefix("torch.")
        decoder = open_exported(described, device, asked)
        value = exported_perplexity(described, decoder, tokens, lambda rows: progress(rows, "perplexity (sequences)"))
    return {
        "metric": "perplexity",
        "value": value,
        "tokens": tokens.numel() - len(tokens),
        "seconds": time.monotonic() - started,
        "data": filled.data,
        "split": split,
    }


def evaluate_tasks(model: str, names: list[str], *, limit: int | None, device: str) -> dict[str, Any]:
    """`compress evaluate --tasks`: lm-evaluation-harness tasks."""
    started = time.monotonic()
    checkpoint = Checkpoint(resolve(model))
    results = tasks(checkpoint, names, limit=limit, device=device)
    return {"metric": "tasks", "value": results, "tokens": None, "seconds": time.monotonic() - started}
