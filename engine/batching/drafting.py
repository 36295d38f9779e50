"""Drafts of a batch: a smaller model proposes the next few tokens of each sequence, and the model reads them all at once.

The model chooses each token as it does without a draft, with the same random number, and goes on to the next row while its
choice is the drafted token. The text is therefore that without a draft, whatever is drafted and whenever. The draft chooses
with the random number of the same place too, so that both choose one token as often as their distributions allow without
knowing each other (engine/generation/race.py). Leviathan et al. (2023) accept a little more, and their text depends on the
draft.

Shape suffixes: B sequences, L positions, T rows, D hidden, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.batching.draft_switch import DraftSwitch
from engine.batching.masks_ahead import MasksAhead
from engine.batching.request import DraftLoad
from engine.batching.request_state import Piece, RequestState, passes
from engine.decoder.block_pool import BlockPool, BlockTable, OutOfBlocksError
from engine.decoder.model import Decoder
from engine.decoder.paged_cache import PagedBatch, PagedCache
from engine.generation.generate import Engine, torch_products
from engine.generation.sampling import are_finite, largest
from engine.kernels.kernel_choice import COMPILED_MAX_ROWS, KernelChoice

FEW_UNREAD = 2
"""Most unread tokens of a sequence that is drafted for: the last token, and the last drafted one if all were kept."""


def cache_sizes(engine: Engine) -> tuple[int, int]:
    """Return the bytes of the caches of a model and its draft for each position, and for a sequence's states."""
    position, states = zip(*(each.cache_sizes for each in engine.both), strict=True)
    return sum(position), sum(states)


class Drafting:
    """The draft of one engine, with its own cache of the sequences, and the choice of when it drafts."""

    def __init__(self, engine: Engine, blocks: int, block_size: int, prefill_chunk: int, masks: MasksAhead) -> None:
        """blocks: number of blocks of the draft's cache. prefill_chunk: tokens of prompts that it reads in one step."""
        draft = engine.draft
        assert draft is not None and isinstance(draft.decoder, Decoder), "Engine.open refuses any other draft"
        self._decoder, self._most, self._chunk, self._masks = draft.decoder, engine.draft_tokens, prefill_chunk, masks
        self._kernels = draft.prompt_kernels, draft.decoding_kernels
        self._positions = draft.checkpoint.config.max_positions
        size = blocks * block_size * draft.cache_sizes[0]
        self._cache = PagedCache(draft.checkpoint.config, size, draft.kv_cache_dtype, draft.device, block_size)
        self._tables: dict[RequestState, BlockTable] = {}
        self._unusable: set[RequestState] = set()
        """Requests for which the draft has given NaN or infinite logits."""
        self.switch = DraftSwitch()
        self.clock: Callable[[], float] = time.perf_counter
        self._drafted = self._accepted = 0
        self._is_on = True
        self._began, self._spent_reading = 0.0, 0.0
        draft.prepare(self._cache.bytes)

    @property
    def cache_bytes(self) -> int:
        """Size of the draft's cache in bytes."""
        return self._cache.bytes

    @property
    def pool(self) -> BlockPool:
        """The pool that owns the blocks of the draft's cache."""
        return self._cache.pool

    @property
    def load(self) -> DraftLoad:
        """The counts since the start, and whether the last step was to have drafted tokens."""
        return DraftLoad(self._drafted, self._accepted, self._is_on)

    def propose(self, decoding: Sequence[RequestState], pool: BlockPool, running: int) -> None:
        """Draft the next tokens of the sequences that a step decodes, where that pays.

        pool: that of the model, in which positions for the drafted tokens are taken. running: number of sequences that may
        soon need a block.
        """
        self._began, self._spent_reading = self.clock(), 0.0
        if not decoding:
            return
        most = self._most_for(len(decoding))
        self._is_on = most > 0 and self.switch.wants(len(decoding))
        if not self._is_on:
            return
        limits = {state: self._limit(state, most, pool, running) for state in decoding}
        going = self._read_prompts([state for state, limit in limits.items() if limit > 0])
        while going:
            with self._masks.computed(going):
                logits_BV = self._read_next(going)
            going = [state for state in self._extended(going, logits_BV) if len(state.drafted) < limits[state]]

    def settle(self, decoding: Sequence[RequestState]) -> None:
        """End the drafting of a step, after the model has read the drafted tokens and before it chooses."""
        for state in decoding:
            state.settle()

    def note(self, state: RequestState, drafted: int, kept: int) -> None:
        """Count the drafted tokens of a sequence and those that were kept, and forget the others."""
        self._drafted, self._accepted = self._drafted + drafted, self._accepted + kept
        if (table := self._tables.get(state)) is not None:
            self.pool.fill(table, state.tokens, min(table.length, len(state.tokens) - 1))

    def end_step(self, sequences: int, tokens: int) -> None:
        """Take the time of a step in which the model read no prompt. tokens: number of new tokens."""
        if sequences and self._most_for(sequences):
            self.switch.measured(sequences, tokens, self.clock() - self._began - self._spent_reading)

    def release(self, state: RequestState) -> None:
        """Forget a sequence that has left the batch."""
        state.drafted.clear()
        if (table := self._tables.pop(state, None)) is not None:
            self.pool.release(table)
        if state.finished:
            self._unusable.discard(state)
            timings = state.timings
            if timings.generated_tokens:
                self.switch.has_ended(timings.prompt_tokens - timings.cached_tokens, timings.generated_tokens)

    def clear(self) -> None:
        """Delete the whole content of the cache."""
        self._cache.clear()
        self._tables.clear()
        self._unusable.clear()

    def _most_for(self, sequences: int) -> int:
        """Return how many tokens may be drafted for each of so many sequences, within the rows of one step."""
        return max(0, min(self._most, COMPILED_MAX_ROWS // sequences - 1))

    def _limit(self, state: RequestState, most: int, pool: BlockPool, running: int) -> int:
        """Return how many tokens may be drafted for a sequence, with room for them in both caches."""
        length = len(state.tokens)
        most = min(most, state.room - 1, self._positions - length)
        if most < 1 or state in self._unusable:
            return 0
        if pool.blocks_for(length + most) - len(state.table.blocks) <= pool.unused - running:
            pool.extend(state.table, length + most)
        else:  # no sequence is preempted for a draft
            most = min(most, len(state.table.blocks) * pool.block_size - length)
            if most < 1:
                return 0
        table = self._table(state)
        try:
            self.pool.extend(table, length + most)
        except OutOfBlocksError:
            self.pool.release(self._tables.pop(state))
            return 0
        return most

    def _table(self, state: RequestState) -> BlockTable:
        """Return the place of a sequence in the draft's cache, which may begin with what the draft has read before."""
        if state not in self._tables:
            prompt = len(state.request.prompt)
            kind = f"{self._decoder.rotary.scale_of(prompt)} {state.request.namespace}".encode()
            self._tables[state] = table = self.pool.find(state.tokens, kind)
            self.pool.take(table)
        return self._tables[state]

    def _read_prompts(self, states: Sequence[RequestState]) -> list[RequestState]:
        """Read what the draft has not read of these texts, together at most a chunk; return those that it has read."""
        left, began, pieces = self._chunk, self.clock(), list[Piece]()
        for state in states:
            start = self._tables[state].length
            new = min(left, len(state.tokens) - 1 - start)
            if new >= FEW_UNREAD:
                pieces.append((state, start + new))
                left -= new
        for group in passes(pieces, self.pool.shares):
            self._read(group)
        if left < self._chunk:
            if self._decoder.device.type == "cuda":
                torch.cuda.synchronize(self._decoder.device)  # the time below is that of the computation
            self._spent_reading = self.clock() - began
            self.switch.has_read(self._chunk - left, self._spent_reading)
        return [state for state in states if len(state.tokens) - self._tables[state].length <= FEW_UNREAD]

    def _read(self, pieces: Sequence[Piece]) -> None:
        """Read pieces of texts in one pass."""
        own = [(state, self._tables[state], end) for state, end in pieces]
        new = [end - table.length for _, table, end in own]
        tokens = [token for state, table, end in own for token in state.tokens[table.length : end]]
        read_as = [len(state.request.prompt) for state, _, _ in own]
        batch = PagedBatch(self._cache, [table for _, table, _ in own], new, read_as)
        self._forward(torch.tensor([tokens]), batch, self._kernels[0])
        for state, table, end in own:
            self.pool.fill(table, state.tokens, end)

    def _read_next(self, states: Sequence[RequestState]) -> Tensor:
        """Read the last tokens of each text, drafted ones included; return the draft's logits [B, V] after it."""
        tables = [self._tables[state] for state in states]
        unread = [
            state.tokens[table.length :] + state.drafted[max(0, table.length - len(state.tokens)) :]
            for state, table in zip(states, tables, strict=True)
        ]
        rows = [row for row, tokens in enumerate(unread) for _ in tokens]
        ahead = [place for tokens in unread for place in range(len(tokens))]
        read_as = [len(states[row].request.prompt) for row in rows]
        batch = PagedBatch(self._cache, [tables[row] for row in rows], None, read_as, ahead if any(ahead) else None)
        tokens_T1 = torch.tensor([[token] for tokens in unread for token in tokens])
        hidden_TLD = self._forward(tokens_T1, batch, self._kernels[1])
        for table, tokens in zip(tables, unread, strict=True):
            table.length += len(tokens)
        last = torch.tensor([len(tokens) for tokens in unread]).cumsum(0) - 1
        return self._decoder.logits(hidden_TLD[last.to(hidden_TLD.device), 0], self._kernels[1])

    def _extended(self, states: Sequence[RequestState], logits_BV: Tensor) -> list[RequestState]:
        """Append a drafted token to each sequence; return those for which another one may be drafted."""
        wide_BV, more = logits_BV.float(), []
        finite, greedy = are_finite(wide_BV).tolist(), largest(wide_BV).tolist()
        for row, (state, usable, token) in enumerate(zip(states, finite, greedy, strict=True)):
            if not usable:
                self._unusable.add(state)
                self.pool.forget(self._tables[state])
                self.pool.release(self._tables.pop(state))
            elif state.draft(wide_BV[row], token):
                more.append(state)
        return more

    def _forward(self, tokens_BL: Tensor, batch: PagedBatch, choice: KernelChoice) -> Tensor:
        """Read tokens after the content of the tables, whose lengths stay; return the hidden states [B, L, D]."""
        decoder = self._decoder
        with torch_products(tokens_BL.numel(), decoder.dtype, decoder.device):
            return decoder.hidden_states(tokens_BL.to(decoder.device), None, batch, choice)
