"""How alike the experts of a layer are: copies of one network stand for each other, and may go as wholes."""

from __future__ import annotations

import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.families.experts import DOWN
from engine.families.tensor_names import expert_tensor
from engine.kernels.stored.quantized_weight import as_tensor

ROWS = 64
"""Rows of each matrix that are compared."""


def likeness(checkpoint: Checkpoint) -> float | None:
    """Return the mean cosine of the down projections of a layer's first two experts; None without two of one width."""
    found = []
    for layer, widths in checkpoint.config.ffn_widths().items():
        if len(widths) > 1 and widths[0] == widths[1]:
            names = (expert_tensor(checkpoint.config.architecture, layer, expert, DOWN) for expert in (0, 1))
            first, second = (as_tensor(checkpoint.stored(name))[:ROWS].flatten().double() for name in names)
            found.append(float(torch.nn.functional.cosine_similarity(first, second, dim=0)))
            checkpoint.release()
    return sum(found) / len(found) if found else None
