"""Reads of experts that `--miss-threshold` saves, and the perplexity that it costs, measured layer by layer.

The text is read once without a threshold and once for each threshold and share of memory, all in one pass over the layers.
In each reading, a simulated cache with room for that share of a layer's experts says which of them are in memory when a
token chooses (engine/expert_cache/missing.py), as in decoding. Unlike the expert cache, whose layers share its room, each
layer has a part of its own here.

Shape suffixes: S sequences, L positions, R readings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from compress.run.losses import Losses
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.miss_costs import MissCost
from engine.decoder.experts import MoeBlock
from engine.decoder.model import DecoderLayer
from engine.expert_cache.missing import LayerCache, LimitedRouting
from engine.passes.memory_budget import UNLIMITED, MemoryBudget
from engine.passes.streaming import stream_negative_log_likelihood

MEMORY_SHARES = (0.25, 0.5, 0.75)
THRESHOLDS = (0.01, 0.03, 0.1, 0.2, 0.3)
READINGS = 1 + len(MEMORY_SHARES) * len(THRESHOLDS)


def measured_losses(
    checkpoint: Checkpoint,
    tokens_SL: Tensor,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    budget: MemoryBudget = UNLIMITED,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
    shares: Sequence[float] = MEMORY_SHARES,
    thresholds: Sequence[float] = THRESHOLDS,
) -> tuple[list[MissCost], list[Losses]]:
    """Return the costs, by share and then by threshold, and the losses: without a threshold, and then those of each cost."""
    settings = [(share, threshold) for share in shares for threshold in thresholds]
    caches: list[list[list[LayerCache]]] = []  # by MoE layer and reading

    def visit(index: int, layer: DecoderLayer) -> None:
        block = layer.feed_forward
        if isinstance(block, MoeBlock):
            count, least = len(block.experts), checkpoint.config.experts_per_token
            slots = {share: _slots(share, count, least) for share in shares}
            exact = [LayerCache(slots[share]) for share in shares]
            caches.append([exact, *([LayerCache(slots[share], threshold)] for share, threshold in settings)])
            block.routing = LimitedRouting(block.routing, caches[-1], tokens_SL.numel())

    summed_RS = stream_negative_log_likelihood(
        checkpoint,
        tokens_SL.repeat(1 + len(settings), 1),
        dtype=dtype,
        device=device,
        visit=visit,
        budget=budget,
        progress=progress,
    ).view(-1, len(tokens_SL))
    losses = [Losses(summed_S, tokens_SL.shape[1] - 1) for summed_S in summed_RS]
    costs = []
    for place, (share, threshold) in enumerate(settings):
        exact = sum(layer[0][shares.index(share)].reads for layer in caches)
        reads = sum(layer[1 + place][0].reads for layer in caches)
        found = losses[1 + place].perplexity
        costs.append(
            MissCost(
                memory_share=share,
                threshold=threshold,
                experts_read_per_token=reads / tokens_SL.numel(),
                reads_saved=1 - reads / exact if exact else None,
                perplexity=found,
                perplexity_ratio=found / losses[0].perplexity,
            )
        )
    return costs, losses


def _slots(share: float, experts: int, least: int) -> int:
    """Return the experts of a layer that a share of memory holds; those of one token always fit."""
    return min(experts, max(least, round(share * experts)))
