"""A paged KV cache: keys and values of sequences of different lengths, in blocks of one allocation of a given size.

Shape suffixes: B sequences, L new positions, P positions so far, G key-value heads, S slots (blocks times
positions of a block), E head dimension, M blocks of the longest table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from engine.decoder.block_pool import BlockPool, BlockTable
from engine.decoder.kv_cache import (
    Kept,
    Scaled,
    States,
    allocated,
    position_bytes,
    row_of_layers,
    state_bytes,
    to_int8,
    zero_states,
)
from engine.families.config import DecoderConfig

BLOCK_SIZE = 32
"""Positions per block."""
KEYS_VALUES, SCALES = "keys_values", "scales"
"""Names of the tensors of a block's content."""


class PagedCache:
    """Preallocated keys and values of every layer; a BlockPool assigns the blocks to sequences."""

    def __init__(
        self,
        config: DecoderConfig,
        size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        block_size: int = BLOCK_SIZE,
        sequences: int = 1,
    ) -> None:
        """`size`: bytes of keys and values together, rounded down to whole blocks.

        `sequences`: maximum number with states.
        """
        self.block_bytes = position_bytes(config, dtype) * block_size
        self._config, self._device = config, device
        self._state_bytes = sequences * state_bytes(config, dtype)
        self.pool = BlockPool(size // self.block_bytes, block_size, shares=not self._state_bytes)
        self.dtype = dtype
        """Dtype of keys and values."""
        self.rows = row_of_layers(config)
        self.stored = allocated(config, (), self.pool.count * block_size, dtype, device)
        """Keys and values, [G, S, E] for each layer with cached positions."""
        self.placement = object()
        """Another one for each cache: keys and values never move."""
        self._states: WeakKeyDictionary[BlockTable, list[States]] = WeakKeyDictionary()
        """States of the sequences whose tables are still referenced."""

    @property
    def bytes(self) -> int:
        """Allocated bytes, including the maximum number of states."""
        return self.pool.count * self.block_bytes + self._state_bytes

    def states(self, table: BlockTable) -> list[States]:
        """Return one sequence's state of each layer that has one; zero before its first position."""
        if table not in self._states:
            self._states[table] = zero_states(self._config, self.dtype, self._device)
        return self._states[table]

    def clear(self) -> None:
        """Delete the whole content."""
        keeper = self.pool.keeper
        self.pool = BlockPool(self.pool.count, self.pool.block_size, self.pool.shares)
        self.pool.keeper = keeper
        self._states.clear()

    def content(self, block: int) -> dict[str, Tensor]:
        """Return a copy of one block on the CPU: the layers' keys and values one after the other, and their scales."""
        keys_values, scales = self._parts(block)
        copied = {KEYS_VALUES: torch.cat([part.flatten() for part in keys_values]).cpu()}
        if scales:
            copied[SCALES] = torch.cat([part.flatten() for part in scales]).cpu()
        return copied

    def fits(self, content: Mapping[str, Tensor]) -> bool:
        """Return whether tensors have the dtypes and sizes of a block's content."""
        keys_values, scales = self._parts(0)
        expected = {KEYS_VALUES: (self.dtype, (sum(part.numel() for part in keys_values),))}
        if scales:
            expected[SCALES] = torch.float32, (sum(part.numel() for part in scales),)
        return {name: (each.dtype, tuple(each.shape)) for name, each in content.items()} == expected

    def put(self, block: int, content: Mapping[str, Tensor]) -> None:
        """Replace the content of a block by one that `content` returned."""
        keys_values, scales = self._parts(block)
        for name, parts in ((KEYS_VALUES, keys_values), (SCALES, scales)):
            if parts:
                whole = content[name].to(self._device)
                for part, own in zip(parts, whole.split([part.numel() for part in parts]), strict=True):
                    part.copy_(own.view(part.shape))

    def _parts(self, block: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return one block of every layer: views of keys and values, [G, positions, E], and of scales, [2, G, positions]."""
        place = slice(block * self.pool.block_size, (block + 1) * self.pool.block_size)
        keys_values = [part[:, place] for parts in (self.stored.keys, self.stored.values) for part in parts]
        return keys_values, [part[:, :, place] for part in self.stored.scales or ()]

    def slots(self, table: BlockTable, end: int) -> slice | Tensor:
        """Return the slots of the first `end` positions: a slice if the blocks are adjacent, otherwise int64 [P]."""
        size = self.pool.block_size
        blocks = table.blocks[: self.pool.blocks_for(end)]
        if blocks[-1] - blocks[0] == len(blocks) - 1 and blocks == sorted(blocks):
            return slice(blocks[0] * size, blocks[0] * size + end)
        slots = torch.tensor(blocks)[:, None] * size + torch.arange(size)
        return slots.flatten()[:end].to(self._device)


class PagedBatch:
    """One forward pass's view of the cache: new positions of B sequences, after the content of their tables.

    The pass's tensors are [B, 1, ...] in a step, which has one new position of each sequence, and [1, L, ...] where texts
    are read: the new positions of the first sequence, then those of the second, and so on. Adjacent blocks of a sequence are
    read as a view; other blocks are gathered.
    """

    def __init__(
        self,
        cache: PagedCache,
        tables: Sequence[BlockTable],
        new: Sequence[int] | None,
        read_as: Sequence[int],
        ahead: Sequence[int] | None = None,
    ) -> None:
        """`new`: numbers of new positions of sequences that are read; None for a step.

        `read_as`: minimum lengths of the texts that the positions belong to, for rotary scalings that depend on them.

        `ahead`: distance of each position from the end of its table's content, where the next few positions of one sequence
        are given as several sequences, in order. Each attends to those before it, with the result of reading it alone.
        """
        assert ahead is None or (new is None and cache.pool.shares), "several positions at once need a step and no states"
        assert new is None or len(new) == 1 or cache.pool.shares, "texts that are read together have no states"
        self.cache, self.is_step, self._repeats = cache, new is None, ahead is not None
        self.past = [table.length + more for table, more in zip(tables, ahead or [0] * len(tables), strict=True)]
        self.new = [1] * len(tables) if new is None else list(new)
        """Number of new positions of each sequence."""
        self._tables, self._read_as = tables, read_as

    @property
    def placement(self) -> object:
        """That of the cache."""
        return self.cache.placement

    @cached_property
    def positions_BL(self) -> Tensor:
        """Numbers of the new positions, int64."""
        own = zip(self.past, self.new, strict=True)
        places = torch.tensor([place for past, count in own for place in range(past, past + count)])
        return places[:, None] if self.is_step else places[None]

    def split(self, x: Tensor, dimension: int) -> Sequence[Tensor]:
        """Return each sequence's part of a tensor of the pass, [1, ...], whose positions lie along this dimension."""
        return torch.split(x, 1) if self.is_step else torch.split(x, self.new, dimension)

    def joined(self, parts: Sequence[Tensor], dimension: int) -> Tensor:
        """Return the tensor of which `split` gives these parts."""
        return torch.cat(list(parts), 0 if self.is_step else dimension)

    @property
    def lengths_BL(self) -> Tensor:
        """Length of the text that each position belongs to."""
        least = [length for count, length in zip(self.new, self._read_as, strict=True) for _ in range(count)]
        return (self.positions_BL + 1).maximum(torch.tensor(least).view_as(self.positions_BL))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of keys and values."""
        return self.cache.dtype

    @cached_property
    def _slots(self) -> list[slice | Tensor]:
        """Slots of all positions of each sequence, including the new ones."""
        ends = [past + count for past, count in zip(self.past, self.new, strict=True)]
        return [self.cache.slots(table, end) for table, end in zip(self._tables, ends, strict=True)]

    @cached_property
    def _new_slots_T(self) -> Tensor:
        size = self.cache.pool.block_size
        own = zip(self._tables, self.past, self.new, strict=True)
        places = [(table.blocks, place) for table, past, count in own for place in range(past, past + count)]
        slots = [blocks[place // size] * size + place % size for blocks, place in places]
        return torch.tensor(slots, device=self.cache.stored.keys[0].device)

    @property
    def has_room(self) -> bool:
        """Whether every sequence has the block of its last new position."""
        size = self.cache.pool.block_size
        own = zip(self._tables, self.past, self.new, strict=True)
        return all(past + new <= len(table.blocks) * size for table, past, new in own)

    def addresses(self, layer: int) -> list[int]:
        """Return the addresses of one layer, as `Stored.addresses`, for the compiled kernels."""
        return self.cache.stored.addresses(self.cache.rows[layer])

    def places(self, layer: int) -> tuple[Any, Any, int, bool]:
        """Location of the sequences, which is the same in all layers."""
        return self._places

    @cached_property
    def _places(self) -> tuple[Any, Any, int, bool]:
        """Location of the sequences for all layers: blocks int64 [B, M], filled positions int64 [B], the block size, and
        whether sequences may be there several times.
        """
        blocks_BM = np.zeros((len(self._tables), max(len(table.blocks) for table in self._tables)), np.int64)
        for row, table in enumerate(self._tables):
            blocks_BM[row, : len(table.blocks)] = table.blocks
        return blocks_BM, np.array(self.past), self.cache.pool.block_size, self._repeats

    def group_stride(self, layer: int) -> int:
        """Number of elements from one group of a layer to the next."""
        return int(self.cache.stored.keys[self.cache.rows[layer]].stride(0))

    def append(self, layer: int, keys_BGLE: Tensor, values_BGLE: Tensor) -> None:
        """Write one layer's new positions."""
        row, stored = self.cache.rows[layer], self.cache.stored
        targets = stored.keys[row], stored.values[row]
        for part, (target_GSE, new_BGLE) in enumerate(zip(targets, (keys_BGLE, values_BGLE), strict=True)):
            new_GTE = new_BGLE.transpose(0, 1).flatten(1, 2)
            if stored.scales is None:
                target_GSE[:, self._new_slots_T] = new_GTE.to(target_GSE.dtype)
            else:
                integers, scales = to_int8(new_GTE)
                target_GSE[:, self._new_slots_T] = integers
                stored.scales[row][part, :, self._new_slots_T] = scales

    def state(self, layer: int) -> States:
        """Return the state of a layer after the positions so far, tensors [B, ...]."""
        row = self.cache.rows[layer]
        each = [self.cache.states(table)[row] for table in self._tables]
        return tuple(torch.stack(parts) for parts in zip(*each, strict=True))

    def state_addresses(self, layer: int) -> Any:
        """Return the addresses of each sequence's state and of the last inputs of its convolution in a layer, int64 [2, B].

        A compiled kernel updates them in place. The first is 0 in a layer that has the second only.
        """
        row = self.cache.rows[layer]
        each = [[part.data_ptr() for part in self.cache.states(table)[row]] for table in self._tables]
        return np.array([[0] * (2 - len(parts)) + parts for parts in each], np.int64).T.copy()

    def keep_state(self, layer: int, state: States) -> None:
        """Store the state of a layer after the new positions."""
        row = self.cache.rows[layer]
        for part, new in enumerate(state):
            for table, own in zip(self._tables, new, strict=True):
                self.cache.states(table)[row][part].copy_(own)  # a view would keep the whole batch alive

    def of_sequence(self, layer: int, row: int, first: int = 0) -> tuple[Kept, Kept]:
        """Return keys and values [1, G, P, E] of one sequence in one layer, from position `first` on."""
        layer, stored = self.cache.rows[layer], self.cache.stored
        slots = self._slots[row]
        place = slice(slots.start + first, slots.stop) if isinstance(slots, slice) else slots[first:]
        key, value = stored.keys[layer][None, :, place], stored.values[layer][None, :, place]
        if stored.scales is None:
            return key, value
        key_scales, value_scales = stored.scales[layer][:, None, :, place]
        return Scaled(key, key_scales), Scaled(value, value_scales)
