"""The scheduler's runner for our decoder: one forward pass for all decoding sequences, with a shared paged cache.

Shape suffixes: B sequences, L positions, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from engine.batching.request_state import Piece, RequestState
from engine.batching.token_skipping import TokenSkipping
from engine.decoder.block_pool import BlockPool
from engine.decoder.independence import rows_are_independent
from engine.decoder.model import Decoder
from engine.decoder.paged_cache import PagedBatch, PagedCache
from engine.generation.generate import Engine, torch_products
from engine.kernels.kernel_choice import COMPILED_MAX_ROWS, TORCH, KernelChoice, has_kernels


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
        engine.prepare(self.cache.bytes)
        self.reads_together = self.pool.shares and rows_are_independent(decoder, engine.prompt_kernels)
        self._head_kernels = engine.decoding_kernels if self.reads_together else TORCH

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
        logits = []
        for own in self._parts(len(rows)):
            places = ahead[own] if any(ahead) else None
            with torch_products(len(rows[own]), self._dtype, self._device):
                new_T1, read = torch.tensor(tokens[own])[:, None], self._decoder.last_logits
                logits.append(self._forward(rows[own], new_T1, choice, places, read=read))
        for state in states:  # which drafted tokens stay is not known yet
            self.pool.fill(state.table, state.tokens, len(state.tokens))
        return torch.cat(logits)

    def _parts(self, rows: int) -> list[slice]:
        """Return the rows of each pass of a step, in equal parts: as many as the kernels for few rows take, where they sum.

        The kernels for many rows sum in another order, so a sequence would get other bits in more company.
        """
        most = COMPILED_MAX_ROWS if has_kernels(self._dtype, self._device) else rows
        each = -(-rows // -(-rows // most))
        return [slice(first, first + each) for first in range(0, rows, each)]

    def read(self, pieces: Sequence[Piece]) -> Tensor:
        states, starts = [state for state, _ in pieces], [state.table.length for state, _ in pieces]
        new = [end - start for (_, end), start in zip(pieces, starts, strict=True)]
        tokens = [token for (state, end), start in zip(pieces, starts, strict=True) for token in state.tokens[start:end]]
        hidden_TD = self._forward(states, torch.tensor([tokens]), self._prompt_kernels, new=new)[0]
        for (state, end), start, own_LD in zip(pieces, starts, hidden_TD.split(new), strict=True):
            self.pool.fill(state.table, state.tokens, end)
            if state.asks_for_prompt:
                state.take_prompt(start, end, partial(self._logits, own_LD))
        last = torch.tensor(new).cumsum(0) - 1
        ended = last[[not state.unread for state in states]].to(self._device)
        groups = hidden_TD[ended].split(COMPILED_MAX_ROWS)  # the kernels for few rows give each the bits of one alone
        return torch.cat([self._decoder.logits(group_BD, self._head_kernels) for group_BD in groups])

    def _logits(self, hidden_LD: Tensor, first: int, last: int) -> Tensor:
        return self._decoder.logits(hidden_LD[first:last])

    def _forward(
        self,
        states: Sequence[RequestState],
        tokens: Tensor,
        choice: KernelChoice,
        ahead: Sequence[int] | None = None,
        new: Sequence[int] | None = None,
        read: Callable[..., Tensor] | None = None,
    ) -> Tensor:
        """Read tokens after the content of the tables, whose lengths stay; return the hidden states [..., D].

        tokens: [B, 1], or [1, L] of texts, of which `new` has the lengths. ahead: how far after the table's content each
        token is, where a sequence has several rows. read: another function of the decoder, whose result is returned.
        """
        tables = [state.table for state in states]
        batch = PagedBatch(self.cache, tables, new, [len(state.request.prompt) for state in states], ahead)
        own = zip(states, batch.new, strict=True)
        thresholds = [threshold for state, count in own for threshold in [self._threshold(state)] * count]
        with self._skipping.applied(thresholds):
            return (read or self._decoder.hidden_states)(tokens.to(self._device), None, batch, choice)

    def _threshold(self, state: RequestState) -> float:
        asked = state.request.skip_threshold
        return self._skipping.own_threshold if asked is None else asked
