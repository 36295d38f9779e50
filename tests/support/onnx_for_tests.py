"""Tiny models exported to ONNX, and the difference between their logits and those of our engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.kv_cache import KeyValueCache
from engine.decoder.model import Decoder, own_routings, routed_by
from engine.decoder.routing import Routing
from engine.onnx.decoder import write_decoder
from engine.onnx.runtime import OnnxDecoder

PREFILL, STEPS, PADDING = 15, 8, 6


def exported(
    checkpoint: Checkpoint, directory: Path, routings: Sequence[Routing] | None = None, **options: Any
) -> OnnxDecoder:
    """Write a checkpoint's graph into a new directory and load it."""
    own = own_routings(checkpoint.config, checkpoint.source(torch.float32))
    directory.mkdir()
    options = {"dtype": torch.float32, "portable": False} | options
    write_decoder(checkpoint, directory, own if routings is None else routings, **options)
    return OnnxDecoder(directory, checkpoint.config, threads=1)


@torch.no_grad()
def differences(checkpoint: Checkpoint, found: OnnxDecoder, routings: Sequence[Routing] | None = None) -> dict[str, float]:
    """Return the largest |logit difference| from our engine: prefill, 8 steps after it, and both in a padded batch.

    Our engine reads the same input as the graph, in the same pieces.
    """
    decoder = Decoder(checkpoint.config, checkpoint.source(torch.float32))
    own = [block.routing for block in decoder.moe_blocks] if routings is None else routings
    tokens_BL = torch.randint(
        3, checkpoint.config.vocabulary_size, (2, PREFILL + STEPS), generator=torch.Generator().manual_seed(1)
    )
    real_BL = torch.ones(2, PREFILL + STEPS, dtype=torch.bool)
    with routed_by(decoder, own):
        alone = [(read(found, tokens_BL[:1], None), read(decoder, tokens_BL[:1], None))]
        real_BL[1, :PADDING] = False
        padded = tokens_BL.masked_fill(~real_BL, 0)
        together = (read(found, padded, real_BL) - read(decoder, padded, real_BL))[real_BL]
    off = (alone[0][0] - alone[0][1]).abs()
    return {
        "prefill": float(off[:, :PREFILL].max()),
        "decode": float(off[:, PREFILL:].max()),
        "padded batch": float(together.abs().max()),
    }


def read(decoder: Any, tokens_BL: Tensor, real_BL: Tensor | None) -> Tensor:
    """Return the logits of a prefill and of the steps after it, [B, L, V]."""
    cache = KeyValueCache(decoder.config, len(tokens_BL), tokens_BL.shape[1], torch.float32)
    ends = [PREFILL, *range(PREFILL + 1, tokens_BL.shape[1] + 1)]
    pieces = []
    for begin, end in zip([0, *ends], ends, strict=False):
        pieces.append(decoder(tokens_BL[:, begin:end], None if real_BL is None else real_BL[:, :end], cache))
    return torch.cat(pieces, dim=1)
