"""Block sizes of low-bit weights for onnxruntime's block-wise operators, whose packing equals ours."""

from __future__ import annotations

from typing import NamedTuple

BLOCKS = (32, 16)
"""Numbers of weights that share a scale; the first one that divides the number of inputs is used."""


class Packing(NamedTuple):
    """Bits and block size of a quantized weight."""

    bits: int
    block: int


class Written(NamedTuple):
    """Result of writing a checkpoint as a graph."""

    weights_bytes: int
    packings: dict[str, Packing]
    """Packing of each quantized weight, by its name in the checkpoint."""


def block_size(*inputs: int) -> int | None:
    """Return the largest block size that divides all of these numbers; None if there is none."""
    return next((block for block in BLOCKS if all(size % block == 0 for size in inputs)), None)
