"""The scheduler's runner for our decoder: one forward pass for all decoding sequences, with a shared paged cache.

Shape suffixes: B sequences, L positions, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.batching.request_state import RequestState
from engine.batching.token_skipping import TokenSkipping
from engine.decoder.block_pool import BlockPool
from engine.decoder.model import Decoder
from engine.decoder.paged_cache import PagedBatch, PagedCache
from engine.generation.generate import Engine, torch_products
from engine.kernels.kernel_choice import KernelChoice


class PagedRunner:
    """Runner for our decoder."""

    def __init__(self, engine: Engine, decoder: Decoder, kv_cache_bytes: int, block_size: int, sequences: int) -> None:
        """kv_cache_bytes: size of the KV cache. sequences: how many run at once. CheckpointError for damaged skip tables."""
        self._decoder, self._dtype, self._device = decoder, engine.dtype, engine.device
        self._prompt_kernels, self._decoding_kernels = engine.prompt_kernels, engine.decoding_kernels
        self._skipping = TokenSkipping(engine, decoder)
        self.cache = PagedCache(
            engine.checkpoint.config, kv_cache_bytes, engine.kv_cache_dtype, engine.device, block_size, sequences
        )
        engine.prepare()

    @property
    def pool(self) -> BlockPool:
        return self.cache.pool

    @property
    def cache_bytes(self) -> int:
        return self.cache.bytes

    @property
    def counts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self._skipping.counts

    def clear(self) -> None:
        self.cache.clear()

    def check(self, threshold: float | None) -> None:
        self._skipping.check(threshold)

    def kind(self, state: RequestState) -> bytes:
        scale = self._decoder.rotary.scale_of(len(state.request.prompt))
        return f"{scale} {self._threshold(state)} {state.request.namespace}".encode()

    def piece_end(self, state: RequestState, end: int) -> int:
        return end

    def decode(self, states: Sequence[RequestState]) -> Tensor:
        choice = self._decoding_kernels
        with torch_products(len(states), self._dtype, self._device):
            return self._decoder.logits(self._forward(states, 1, choice)[:, 0], choice)

    def read(self, state: RequestState, end: int) -> Tensor | None:
        start = state.table.length
        hidden_LD = self._forward([state], end - start, self._prompt_kernels)[0]
        if state.asks_for_prompt:
            state.take_prompt(start, end, lambda first, last: self._decoder.logits(hidden_LD[first:last]))
        return None if state.unread else self._decoder.logits(hidden_LD[-1:])

    def _forward(self, states: Sequence[RequestState], new: int, choice: KernelChoice) -> Tensor:
        """Read `new` more tokens of each sequence into the cache and return the hidden states [B, L, D]."""
        batch = PagedBatch(self.cache, [state.table for state in states], new, [len(s.request.prompt) for s in states])
        lengths = [state.table.length + new for state in states]
        tokens = [state.tokens[end - new : end] for state, end in zip(states, lengths, strict=True)]
        tokens_BL = torch.tensor(tokens, device=self._device)
        thresholds = [threshold for state in states for threshold in [self._threshold(state)] * new]
        with self._skipping.applied(thresholds):
            hidden_BLD = self._decoder.hidden_states(tokens_BL, None, batch, choice)
        for state, length in zip(states, lengths, strict=True):
            self.pool.fill(state.table, state.tokens, length)
        return hidden_BLD

    def _threshold(self, state: RequestState) -> float:
        asked = state.request.skip_threshold
        return self._skipping.own_threshold if asked is None else asked
