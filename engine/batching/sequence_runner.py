"""Runners for models that have no paged cache: each sequence runs alone, with its own cache.

A request's result is therefore independent of the other requests. The pool only counts blocks, and prompts share none.

Shape suffixes: L positions, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from engine.batching.request_state import Piece, RequestState
from engine.decoder.block_pool import BlockPool, BlockTable


class SequenceCache(Protocol):
    """The cache of one sequence."""

    length: int
    """Number of filled positions."""

    @property
    def capacity(self) -> int:
        """Number of positions that there is room for."""

    def extend(self, capacity: int) -> None:
        """Make room for more positions."""


Own = TypeVar("Own", bound=SequenceCache)


class SequenceCaches(BlockPool, Generic[Own]):
    """A pool whose blocks are only counted: a sequence's positions are in its own cache, which no other sequence shares."""

    def __init__(self, new: Callable[[int], Own], count: int, block_size: int) -> None:
        """new: returns an empty cache for so many positions."""
        super().__init__(count, block_size, shares=False)
        self._new_cache = new
        self._caches: dict[BlockTable, Own] = {}

    def of(self, table: BlockTable) -> Own:
        """Return the cache of a sequence, sized for its blocks.

        While the cache grows, its keys or its values may exist twice.
        """
        capacity = len(table.blocks) * self.block_size
        if table not in self._caches:
            self._caches[table] = self._new_cache(capacity)
        cache = self._caches[table]
        if cache.capacity < capacity:
            cache.extend(capacity)
        return cache

    def find(self, tokens: Sequence[int], kind: bytes = b"") -> BlockTable:
        """Return an empty table: nothing is shared."""
        return BlockTable(kind)

    def fill(self, table: BlockTable, tokens: Sequence[int], length: int) -> None:
        """Record that the table now holds the first `length` tokens."""
        table.length = length

    def release(self, table: BlockTable) -> None:
        """Free all blocks and the memory. The table is empty afterwards."""
        self._caches.pop(table, None)
        super().release(table)


class SequenceRunner(ABC, Generic[Own]):
    """Runs one sequence after the other."""

    reads_together = False

    def __init__(self, new: Callable[[int], Own], block_bytes: int, kv_cache_bytes: int, block_size: int) -> None:
        """new: returns an empty cache for so many positions. block_bytes: size of the positions of one block."""
        self._new, self._block_bytes = new, block_bytes
        self.pool = SequenceCaches(new, kv_cache_bytes // block_bytes, block_size)

    @property
    def cache_bytes(self) -> int:
        return self.pool.count * self._block_bytes

    def clear(self) -> None:
        self.pool = SequenceCaches(self._new, self.pool.count, self.pool.block_size)

    def kind(self, state: RequestState) -> bytes:
        return b""

    def decode(self, states: Sequence[RequestState]) -> Tensor:
        return torch.cat([self._forward(state, len(state.tokens), every=False) for state in states])

    def read(self, pieces: Sequence[Piece]) -> Tensor:
        return torch.cat([self._read(*piece) for piece in pieces])

    def _read(self, state: RequestState, end: int) -> Tensor:
        start, asked = state.table.length, state.asks_for_prompt
        logits_LV = self._forward(state, end, every=asked)
        if asked:
            state.take_prompt(start, end, lambda first, last: logits_LV[first:last])
        return logits_LV[len(logits_LV) if state.unread else -1 :]

    def _forward(self, state: RequestState, end: int, every: bool) -> Tensor:
        """Read the tokens up to `end` into the cache; return the logits [L, V] of each, or [1, V] of the last one only."""
        cache = self.pool.of(state.table)
        logits_LV = self._logits(state, torch.tensor([state.tokens[cache.length : end]]), cache, every)
        self.pool.fill(state.table, state.tokens, end)
        return logits_LV

    @abstractmethod
    def _logits(self, state: RequestState, tokens_1L: Tensor, cache: Own, every: bool) -> Tensor:
        """Return the logits [L, V] of new tokens, or [1, V] of the last one only."""
