"""Quality: perplexity by our own streaming forward, tasks through lm-evaluation-harness."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from engine import remote_code
from engine.checkpoint import Checkpoint
from engine.errors import CheckpointError, DataError, OptionError
from engine.streaming import stream_negative_log_likelihood


def perplexity(
    checkpoint: Checkpoint,
    tokens_SL: Tensor,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> float:
    """exp of the mean negative log-likelihood of each sequence's tokens after its first, layer by layer."""
    total, count = stream_negative_log_likelihood(checkpoint, tokens_SL, dtype=dtype, device=device, progress=progress)
    if not math.isfinite(total):
        raise CheckpointError(f"{checkpoint.directory}: the loss is not finite; activations overflow, try --dtype float32")
    return math.exp(min(total / count, 700.0))


def tasks(checkpoint: Checkpoint, names: list[str], *, limit: int | None = None, device: str = "cpu") -> dict[str, Any]:
    """Results of lm-evaluation-harness tasks by name, through transformers."""
    own_code = remote_code.is_needed(checkpoint.directory, checkpoint.raw_config)
    try:
        import lm_eval
    except ImportError as error:
        raise OptionError("tasks need lm-evaluation-harness; install it with `pip install moe-compress[tasks]`") from error
    model = {"pretrained": str(checkpoint.directory), "trust_remote_code": own_code}
    try:
        results = lm_eval.simple_evaluate(model="hf", model_args=model, tasks=names, limit=limit, device=device)
    except Exception as error:  # unknown names, data that cannot be fetched: errors of several libraries
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise DataError(
            f"tasks {','.join(names)}: lm-evaluation-harness failed ({reason}); check names and network"
        ) from error
    scores: dict[str, Any] = results["results"]
    return scores
