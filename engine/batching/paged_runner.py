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
        choice, rows = self._decoding_kernels, [state for state in states for _ in range(1 + len(state.drafted))]
        tokens = [token for state in states for token in (state.tokens[-1], *state.drafted)]
        ahead = [place for state in states for place in range(1 + len(state.drafted))]
        with torch_products(len(rows), self._dtype, self._device):
            hidden_TLD = self._forward(rows, torch.tensor(tokens)[:, None], choice, ahead if any(ahead) else None)
            logits_TV = self._decoder.logits(hidden_TLD[:, 0], choice)
        for state in states:  # which drafted tokens stay is not known yet
            self.pool.fill(state.table, state.tokens, len(state.tokens))
        return logits_TV

    def read(self, state: RequestState, end: int) -> Tensor | None:
        start = state.table.length
        hidden_LD = self._forward([state], torch.tensor([state.tokens[start:end]]), self._prompt_kernels)[0]
        self.pool.fill(state.table, state.tokens, end)
        if state.asks_for_prompt:
            state.take_prompt(start, end, lambda first, last: self._decoder.logits(hidden_LD[first:last]))
        return None if state.unread else self._decoder.logits(hidden_LD[-1:])

    def _forward(
        self, states: Sequence[RequestState], tokens_BL: Tensor, choice: KernelChoice, ahead: Sequence[int] | None = None
    ) -> Tensor:
        """Read tokens after the content of the tables, whose lengths stay; return the hidden states [B, L, D].

        ahead: how far after it each token is, where a sequence has several rows.
        """
        tables, new = [state.table for state in states], tokens_BL.shape[1]
        batch = PagedBatch(self.cache, tables, new, [len(state.request.prompt) for state in states], ahead)
        thresholds = [threshold for state in states for threshold in [self._threshold(state)] * new]
        with self._skipping.applied(thresholds):
            return self._decoder.hidden_states(tokens_BL.to(self._device), None, batch, choice)

    def _threshold(self, state: RequestState) -> float:
        asked = state.request.skip_threshold
        return self._skipping.own_threshold if asked is None else asked
