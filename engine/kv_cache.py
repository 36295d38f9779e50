"""Keys and values of what was already read, for a batch that moves in step (left padding keeps it aligned).

Shape suffixes: B batch, G key-value heads, L positions, E head dimension.
"""

from __future__ import annotations

from copy import copy
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from engine.architectures import DecoderConfig


class KeyValueCache:
    """Preallocated keys and values of every layer; `length` positions are filled."""

    def __init__(
        self, config: DecoderConfig, batch: int, capacity: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        shape = (len(config.layers), batch, config.key_value_heads, capacity, config.head_dimension)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.capacity = capacity
        self.length = 0

    @property
    def bytes(self) -> int:
        """Bytes held, filled or not."""
        return 2 * self.keys.numel() * self.keys.element_size()

    @cached_property
    def bits(self) -> tuple[Any, Any]:
        """Keys and values as NumPy arrays of the bfloat16 values' bits, on the same memory: for the compiled kernels."""
        return self.keys.view(torch.uint16).numpy(), self.values.view(torch.uint16).numpy()

    def append(self, layer: int, keys_BGLE: Tensor, values_BGLE: Tensor) -> tuple[Tensor, Tensor]:
        """Write one layer's new positions; return all its keys and values so far. `advance` moves on afterwards."""
        end = self.length + keys_BGLE.shape[2]
        assert end <= self.capacity, f"cache of {self.capacity} positions asked to hold {end}"
        self.keys[layer, :, :, self.length : end] = keys_BGLE
        self.values[layer, :, :, self.length : end] = values_BGLE
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def advance(self, positions: int) -> None:
        """Count `positions` as filled, once every layer has appended them."""
        self.length += positions

    def of_rows(self, rows_R: Tensor) -> KeyValueCache:
        """A cache of some of the sequences only, `rows_R` [R] int64; in memory of its own."""
        made = copy(self)
        made.__dict__.pop("bits", None)
        made.keys, made.values = self.keys[:, rows_R], self.values[:, rows_R]
        return made
