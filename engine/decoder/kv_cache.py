"""The KV cache of a batch whose sequences advance together (left padding keeps them aligned).

Latent attention stores its latent vectors as keys and its rotated keys as values (DecoderConfig.cached).

Shape suffixes: B batch, G key-value heads, L positions, E head dimension.
"""

from __future__ import annotations

from copy import copy
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.families.config import DecoderConfig
from engine.files.huge_pages import zeros

KV_CACHE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "int8": torch.int8}
_LARGEST = 127
COMPILED_DTYPES = (torch.bfloat16, torch.int8)
"""Dtypes of keys and values that the compiled kernels read as they are stored."""


class Scaled(NamedTuple):
    """Keys or values in 8 bits: `integers` int8 [..., P, E] times `scales` float32 [..., P], one per head and position."""

    integers: Tensor
    scales: Tensor

    def dequantized(self) -> Tensor:
        """Return the float32 values."""
        return self.integers * self.scales[..., None]


def to_int8(x: Tensor) -> Scaled:
    """Round to int8, symmetrically and to nearest, over the last dimension: scale = max|x| / 127."""
    wide = x.float()
    scales = wide.abs().amax(-1) / _LARGEST
    return Scaled((wide / scales.clamp_min(torch.finfo(torch.float32).tiny)[..., None]).round().to(torch.int8), scales)


def position_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Return the bytes of the keys and values of one position in all layers, stored in `dtype`."""
    scales = 2 * torch.float32.itemsize if dtype == torch.int8 else 0
    sizes = map(config.cached_by, config.caching_layers)
    return sum(groups * ((key + value) * dtype.itemsize + scales) for groups, key, value in sizes)


class Stored(NamedTuple):
    """Memory for the keys and values of all layers that cache positions, a tensor for each layer."""

    keys: list[Tensor]
    values: list[Tensor]
    scales: list[Tensor] | None
    """Scales of keys and of values in 8 bits, [2, ...] for each layer; None for other dtypes."""

    @property
    def bytes(self) -> int:
        """Allocated bytes."""
        return sum(part.nbytes for part in (*self.keys, *self.values, *(self.scales or ())))

    def scales_of(self, row: int) -> Tensor:
        """Return the scales of one layer's keys and values."""
        assert self.scales is not None
        return self.scales[row]

    def addresses(self, row: int) -> list[int]:
        """Return the addresses of one layer's keys, its values and the scales of both, 0 where there are no scales."""
        scales = [0, 0] if self.scales is None else [part.data_ptr() for part in self.scales[row]]
        return [self.keys[row].data_ptr(), self.values[row].data_ptr(), *scales]


def allocated(
    config: DecoderConfig, before: tuple[int, ...], positions: int, dtype: torch.dtype, device: torch.device | str
) -> Stored:
    """Allocate keys and values, [*before, G, positions, E] for each layer. The content is zero."""
    keys, values, scales = list[Tensor](), list[Tensor](), list[Tensor]()
    for groups, key, value in map(config.cached_by, config.caching_layers):
        shape = (*before, groups, positions)
        keys.append(zeros((*shape, key), dtype, device))
        values.append(zeros((*shape, value), dtype, device))
        if dtype == torch.int8:
            scales.append(torch.zeros((2, *shape), device=device))
    return Stored(keys, values, scales or None)


Kept = Tensor | Scaled


States = tuple[Tensor, ...]
"""The tensors of the state of one layer of linear attention, as `LinearConfig.state_shapes` says."""


def zero_states(
    config: DecoderConfig, dtype: torch.dtype, device: torch.device | str, batch: tuple[int, ...] = ()
) -> list[States]:
    """Return the state of each layer of linear attention before the first position, [*batch, ...].

    dtype: of keys and values.
    """
    kept = state_dtype(dtype)
    return [
        tuple(torch.zeros((*batch, *shape), dtype=kept, device=device) for shape in sizes.state_shapes)
        for sizes in config.linear_layers.values()
    ]


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the states, given the dtype of keys and values."""
    return torch.promote_types(dtype, torch.float32)


def state_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Return the bytes of one sequence's states, given the dtype of keys and values."""
    shapes = [shape for sizes in config.linear_layers.values() for shape in sizes.state_shapes]
    return sum(map(prod, shapes)) * state_dtype(dtype).itemsize


def row_of_layers(config: DecoderConfig) -> dict[int, int]:
    """Return each layer's index among the layers with cached positions, or among the layers with a state."""
    return {layer: row for kind in (config.caching_layers, config.linear_layers) for row, layer in enumerate(kind)}


class KeyValueCache:
    """Preallocated keys and values of every layer that has them; `length` positions are filled.

    They are stored in `dtype`, which may differ from the compute dtype. Layers without them have a state or cache nothing.
    """

    def __init__(
        self, config: DecoderConfig, batch: int, capacity: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self._rows = row_of_layers(config)
        self.states = zero_states(config, dtype, device, (batch,))
        """State of each layer that has one, tensors [B, ...]."""
        self.stored = allocated(config, (batch,), capacity, dtype, device)
        self.placement = object()
        """Another one whenever keys and values move."""
        self._batch = batch
        self.capacity = capacity
        self.length = 0
        self.read_as = 0
        """Minimum length of the text that the positions belong to, for rotary scalings that depend on it."""

    @property
    def bytes(self) -> int:
        """Allocated bytes."""
        return self.stored.bytes + sum(part.nbytes for state in self.states for part in state)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of keys and values."""
        return self.stored.keys[0].dtype

    @property
    def device(self) -> torch.device:
        """Device of keys and values."""
        return self.stored.keys[0].device

    def addresses(self, layer: int) -> list[int]:
        """Return the addresses of one layer, as `Stored.addresses`, for the compiled kernels."""
        return self.stored.addresses(self._rows[layer])

    def places(self, layer: int) -> tuple[Any, Any, int, bool]:
        """Location of the sequences in a layer: block indices int64 [B, 1], filled positions int64 [B], block size, and that
        no sequence is there twice.

        The format is that of a paged cache: each sequence is one block of `capacity` positions for each group.
        """
        assert self.length < self.capacity, f"cache of {self.capacity} positions is full"
        groups = self.stored.keys[self._rows[layer]].shape[1]
        batch = self._batch
        return np.arange(0, batch * groups, groups)[:, None], np.full(batch, self.length), self.capacity, False

    def group_stride(self, layer: int) -> int:
        """Number of elements from one group of a layer to the next."""
        return int(self.stored.keys[self._rows[layer]].stride(1))

    def append(self, layer: int, keys_BGLE: Tensor, values_BGLE: Tensor) -> tuple[Kept, Kept]:
        """Write one layer's new positions; return all its keys and values so far. Call `advance` after the last layer."""
        end = self.length + keys_BGLE.shape[2]
        assert end <= self.capacity, f"cache of {self.capacity} positions asked to hold {end}"
        new, row = slice(self.length, end), self._rows[layer]
        parts = self.stored.keys[row], self.stored.values[row]
        if self.stored.scales is None:
            parts[0][:, :, new], parts[1][:, :, new] = keys_BGLE, values_BGLE
            return parts[0][:, :, :end], parts[1][:, :, :end]
        kept = []
        for part, scales, x_BGLE in zip(parts, self.stored.scales_of(row), (keys_BGLE, values_BGLE), strict=True):
            part[:, :, new], scales[:, :, new] = to_int8(x_BGLE)
            kept.append(Scaled(part[:, :, :end], scales[:, :, :end]))
        return kept[0], kept[1]

    def state(self, layer: int) -> States:
        """Return the state of a layer after the positions so far, tensors [B, ...]."""
        return self.states[self._rows[layer]]

    def state_addresses(self, layer: int) -> Any:
        """Return the addresses of each sequence's state and of the last inputs of its convolution in a layer, int64 [2, B].

        A compiled kernel updates them in place. The first is 0 in a layer that has the second only.
        """
        rows = range(self._batch)
        parts = [[part.data_ptr() + row * part.stride(0) * part.itemsize for row in rows] for part in self.state(layer)]
        return np.array([*[[0] * self._batch] * (2 - len(parts)), *parts], np.int64)

    def keep_state(self, layer: int, state: States) -> None:
        """Store the state of a layer after the new positions."""
        self.states[self._rows[layer]] = state

    def advance(self, positions: int) -> None:
        """Count `positions` as filled, once every layer has appended them."""
        self.length += positions

    def extend(self, capacity: int) -> None:
        """Move to larger memory for `capacity` positions, layer by layer, to save memory."""
        self.placement = object()
        for parts in (self.stored.keys, self.stored.values):
            for row, part in enumerate(parts):
                parts[row] = part.new_zeros((*part.shape[:2], capacity, part.shape[3]))
                parts[row][:, :, : self.length] = part[:, :, : self.length]
        scales = self.stored.scales or []
        for row, part in enumerate(scales):
            scales[row] = part.new_zeros((*part.shape[:-1], capacity))
            scales[row][..., : self.length] = part[..., : self.length]
        self.capacity = capacity

    def of_rows(self, rows_R: Tensor) -> KeyValueCache:
        """Return a copy of the cache with some of the sequences only. rows_R: int64 [R]."""
        made = copy(self)
        made.placement = object()
        keys, values = ([part[rows_R] for part in parts] for parts in (self.stored.keys, self.stored.values))
        scales = None if self.stored.scales is None else [part[:, rows_R] for part in self.stored.scales]
        made.stored, made._batch = Stored(keys, values, scales), len(rows_R)
        made.states = [tuple(part[rows_R] for part in state) for state in self.states]
        return made
