"""Losses and perplexity by the streaming forward pass of this project, and the number of tokens routed to each expert."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.run.losses import Losses
from compress.run.work_directory import read_value, write_value
from engine.adapted.adapted_pass import negative_log_likelihood
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_directory import ModelDirectory
from engine.decoder.experts import MoeBlock
from engine.decoder.kv_cache import KeyValueCache
from engine.decoder.model import DecoderLayer
from engine.decoder.routing import NO_EXPERT, Routing, Selection
from engine.errors import CheckpointError
from engine.families.rotary_embedding import Rotary
from engine.onnx.runtime import OnnxDecoder
from engine.passes import processes
from engine.passes.memory_budget import UNLIMITED, MemoryBudget
from engine.passes.streaming import Visit

PIECE = 512
"""Number of positions whose logits an exported model computes at a time."""


def perplexity(checkpoint: Checkpoint, tokens_SL: Tensor, **options: Any) -> float:
    """Return exp of the mean negative log-likelihood of all tokens but each sequence's first; options: of `losses`."""
    return losses(checkpoint, tokens_SL, **options).perplexity


def losses(
    checkpoint: Checkpoint,
    tokens_SL: Tensor,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    visit: Visit = lambda index, layer: None,
    budget: MemoryBudget = UNLIMITED,
    directory: Path | None = None,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> Losses:
    """Return the losses of a model on each sequence, computed layer by layer.

    visit: may change a layer before it runs. directory: holds the state of an interrupted pass, which is continued.
    Several processes share the sequences, and all return the losses of all sequences.
    """
    rows = processes.own_rows(*tokens_SL.shape, budget=budget)
    kept = None if directory is None else processes.own_directory(directory, rows)
    summed_S = torch.zeros(len(tokens_SL), dtype=torch.float64)
    summed_S[rows] = negative_log_likelihood(
        checkpoint,
        tokens_SL[rows],
        dtype=dtype,
        device=device,
        visit=visit,
        budget=budget,
        directory=kept,
        progress=progress,
    )
    processes.add_up([summed_S])
    if not summed_S.isfinite().all():
        raise CheckpointError(f"{checkpoint.directory}: the loss is not finite; activations overflow, try --dtype float32")
    return Losses(summed_S, tokens_SL.shape[1] - 1)


def exported_losses(
    model: ModelDirectory,
    decoder: OnnxDecoder,
    tokens_SL: Tensor,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> Losses:
    """Return the losses of an exported model, sequence by sequence, PIECE positions at a time.

    Where long texts use other rotation angles, the first piece is long enough to select them.
    """
    sequences, length = tokens_SL.shape
    summed_S = torch.zeros(sequences, dtype=torch.float64)
    switch = Rotary(decoder.config).switch
    first = PIECE if switch is None or length <= switch else max(PIECE, switch + 1)
    for row in progress(range(sequences)):
        cache = KeyValueCache(decoder.config, 1, length, decoder.dtype)
        for begin in (0, *range(first, length, PIECE)):
            end = min(begin + PIECE if begin else first, length)
            logits_LV = decoder(tokens_SL[row : row + 1, begin:end], None, cache)[0].float()
            following_L = tokens_SL[row, begin + 1 : end + 1]
            summed_S[row] += float(F.cross_entropy(logits_LV[: len(following_L)], following_L, reduction="sum"))
    if not summed_S.isfinite().all():
        raise CheckpointError(f"{model.directory}: the loss is not finite; activations overflow, export it in float32")
    return Losses(summed_S, length - 1)


def routed_losses(
    checkpoint: Checkpoint, tokens_SL: Tensor, routings: Sequence[Routing], **options: Any
) -> tuple[Losses, float | None]:
    """Return `losses` with these Routings of the MoE layers, and the share of skipped expert evaluations.

    options: of `losses`. The share is None for a dense model.
    """
    counted = _SkippedSlots()
    found = losses(checkpoint, tokens_SL, visit=_layers_routed_by(checkpoint, routings, counted), **options)
    return found, counted.share


@dataclass
class _SkippedSlots:
    """Number of expert evaluations of a pass, and how many of them were skipped."""

    slots: int = 0
    skipped: int = 0

    @property
    def share(self) -> float | None:
        """Share of skipped evaluations; None for a dense model."""
        return self.skipped / self.slots if self.slots else None


def _layers_routed_by(checkpoint: Checkpoint, routings: Sequence[Routing], counted: _SkippedSlots) -> Visit:
    """Return a `visit` that gives each MoE layer its Routing of `routings`, and adds its empty slots to `counted`."""
    of_layer = dict(zip(checkpoint.config.moe_layers, routings, strict=True))

    def observe(x_TD: Tensor, logits_TN: Tensor, selection: Selection) -> None:
        counted.slots += selection.experts.numel()
        counted.skipped += int((selection.experts == NO_EXPERT).sum())

    def visit(index: int, layer: DecoderLayer) -> Callable[[], None] | None:
        if isinstance(layer.feed_forward, MoeBlock):
            layer.feed_forward.routing, layer.feed_forward.observer = of_layer[index], observe
        return None

    return visit


def routed_counts(counts: dict[int, list[int]], directory: Path | None = None) -> Visit:
    """Return a `visit` that records, by decoder layer index, the tokens routed to each expert, at almost no cost.

    counts: the result, summed over all processes. directory: where the counts are stored too, so that an interrupted
    pass restores them.
    """
    noted = [] if directory is None else directory.glob("routed-*.json")
    counts |= {int(path.stem.removeprefix("routed-")): read_value(path, "routed tokens") for path in noted}

    def visit(index: int, layer: DecoderLayer) -> Callable[[], None] | None:
        block = layer.feed_forward
        if not isinstance(block, MoeBlock):
            return None
        experts = len(block.experts)
        total_N = torch.zeros(experts, dtype=torch.long, device=block.device)

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
