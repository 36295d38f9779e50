"""The scheduler's runner for exported models: each sequence runs alone, with its own contiguous KV cache.

A graph's attention needs the positions of a sequence in one contiguous tensor, and its products of several rows may
differ in the last bits from products of one row. Running each sequence alone makes a request's result independent of
the other requests.

Shape suffixes: L positions, T tokens, M MoE layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.batching.request_state import RequestState
from engine.decoder.block_pool import BlockPool, BlockTable
from engine.decoder.kv_cache import KeyValueCache, position_bytes
from engine.errors import OptionError
from engine.families.config import DecoderConfig
from engine.families.rotary_embedding import Rotary
from engine.onnx.runtime import OnnxDecoder


class SequenceCaches(BlockPool):
    """A pool whose blocks are only counted: a sequence's positions are in its own cache, which no other sequence shares."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, count: int, block_size: int) -> None:
        super().__init__(count, block_size)
        self._config, self._dtype = config, dtype
        self._caches: dict[BlockTable, KeyValueCache] = {}

    def of(self, table: BlockTable) -> KeyValueCache:
        """Return the cache of a sequence, sized for its blocks.

        While the cache grows, its keys or its values exist twice.
        """
        capacity = len(table.blocks) * self.block_size
        if table not in self._caches:
            self._caches[table] = KeyValueCache(self._config, 1, capacity, self._dtype)
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


class OnnxRunner:
    """Runner for a model exported to ONNX."""

    def __init__(self, decoder: OnnxDecoder, kv_cache_bytes: int, block_size: int) -> None:
        self._decoder = decoder
        config = decoder.config
        self._block_bytes = position_bytes(config, decoder.dtype) * block_size
        self.pool = SequenceCaches(config, decoder.dtype, kv_cache_bytes // self._block_bytes, block_size)
        self._switch = Rotary(config).switch
        self._slots = [layer.moe.experts_per_token for layer in config.layers if layer.moe is not None]
        self._tokens, self._skipped_M = 0, torch.zeros(len(self._slots), dtype=torch.int64)

    @property
    def cache_bytes(self) -> int:
        return self.pool.count * self._block_bytes

    @property
    def counts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        skipped = self._skipped_M.tolist()
        return tuple(self._tokens * each - own for each, own in zip(self._slots, skipped, strict=True)), tuple(skipped)

    def clear(self) -> None:
        self.pool = SequenceCaches(self._decoder.config, self._decoder.dtype, self.pool.count, self.pool.block_size)

    def check(self, threshold: float | None) -> None:
        baked = self._decoder.skip_threshold
        if threshold is not None and threshold != baked:
            own = "a threshold that its compression.json does not name" if baked is None else f"{baked:g}"
            raise OptionError(
                f"skip_threshold is {threshold}, and skipping is baked into the graph of an exported model, which skips by "
                f"{own}; leave the parameter out, or export the model with --skip-threshold {threshold}"
            )

    def kind(self, state: RequestState) -> bytes:
        return b""

    def piece_end(self, state: RequestState, end: int) -> int:
        """Keep a piece on one side of the rotary switch: one call uses the angles of its last position."""
        if self._switch is None or state.table.length > self._switch:
            return end
        if len(state.request.prompt) > self._switch:
            return max(end, self._switch + 1)
        return min(end, self._switch) if state.table.length < self._switch else end

    def decode(self, states: Sequence[RequestState]) -> Tensor:
        return torch.cat([self._forward(state, len(state.tokens), every=False) for state in states])

    def read(self, state: RequestState, end: int) -> Tensor | None:
        start, asked = state.table.length, state.asks_for_prompt
        logits_LV = self._forward(state, end, every=asked)
        if asked:
            state.take_prompt(start, end, lambda first, last: logits_LV[first:last])
        return None if state.unread else logits_LV[-1:]

    def _forward(self, state: RequestState, end: int, every: bool) -> Tensor:
        """Read the tokens up to `end` into the cache; return the logits [L, V] of each, or [1, V] of the last one only."""
        cache = self.pool.of(state.table)
        tokens_1L = torch.tensor([state.tokens[cache.length : end]])
        before, self._decoder.observer = self._decoder.observer, self._count
        self._tokens += tokens_1L.shape[1]
        try:
            logits_LV = (
                self._decoder(tokens_1L, None, cache)[0] if every else self._decoder.last_logits(tokens_1L, None, cache)
            )
        finally:
            self._decoder.observer = before
        self.pool.fill(state.table, state.tokens, end)
        return logits_LV

    def _count(self, skipped_TM: Tensor) -> None:
        self._skipped_M += skipped_TM.sum(dim=0)
