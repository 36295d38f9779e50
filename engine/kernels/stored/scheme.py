"""Storage schemes of low-bit weights: bits, and the number of inputs that share a scale. This module does not need torch."""

from __future__ import annotations

from typing import NamedTuple

BITS = (2, 3, 4, 8)
"""Widths of low-bit weights."""
PLAIN_BITS = 16
"""The width that stands for a matrix that keeps its dtype, where widths are chosen or listed."""
WHOLE_ROW = -1
"""The group size that gives each output one scale."""
_WORD_BITS = 32


class Scheme(NamedTuple):
    """Storage scheme of a low-bit weight: bits and group size."""

    bits: int
    group_size: int
    """Number of inputs that share a scale, or WHOLE_ROW."""

    def shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the shapes of the packed tensor and of the scales, for a weight [O, D]."""
        outputs, inputs = shape
        groups = 1 if self.group_size == WHOLE_ROW else inputs // self.group_size
        return (outputs, -(-inputs * self.bits // _WORD_BITS)), (outputs, groups)

    def fits(self, inputs: int) -> bool:
        """Return whether `inputs` is a multiple of the group size and each group fills whole words."""
        size = inputs if self.group_size == WHOLE_ROW else self.group_size
        return inputs % size == 0 and size * self.bits % _WORD_BITS == 0
