"""How weights of few bits are cut into blocks for onnxruntime's block-wise operators; they pack them as we do."""

from __future__ import annotations

from typing import NamedTuple

BLOCKS = (32, 16)
"""Weights that share a scale: the first size that divides what it has to."""


class Packing(NamedTuple):
    """How a weight is rounded."""

    bits: int
    block: int


class Written(NamedTuple):
    """What was made of a checkpoint."""

    weights_bytes: int
    packings: dict[str, Packing]
    """By name in the checkpoint, of the weights that were rounded."""


def block_size(*inputs: int) -> int | None:
    """The largest block that divides all of these; None where none does."""
    return next((block for block in BLOCKS if all(size % block == 0 for size in inputs)), None)
