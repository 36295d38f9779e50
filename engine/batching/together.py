"""Many prompts continued together by one decoder: no requests and no queue, for code that holds the model itself.

Prompts are read into a paged cache; then each step reads the next token of all sequences that go on. A sequence that ends
leaves the step and gives its blocks back, and a prompt that waits takes its place.

Shape suffixes: B sequences, L positions, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.decoder.block_pool import BlockTable
from engine.decoder.kv_cache import position_bytes
from engine.decoder.model import Decoder
from engine.decoder.paged_cache import BLOCK_SIZE, PagedBatch, PagedCache
from engine.generation.generate import torch_products
from engine.generation.options import SamplingOptions
from engine.generation.sampling import sample
from engine.kernels.kernel_choice import COMPILED_MAX_ROWS, DECODING, PROMPT, KernelChoice

MOST_TOKENS = 4096
"""Tokens of prompts that are read in one forward pass."""


@dataclass
class _Sequence:
    """A prompt and what follows it."""

    prompt: Sequence[int]
    limit: int
    """Most tokens that follow."""
    row: int
    """Its row of the random numbers."""
    written: list[int] = field(default_factory=list)
    table: BlockTable = field(default_factory=BlockTable)
    """Its blocks of the cache, which do not hold the last token yet."""

    @property
    def longest(self) -> int:
        """Number of positions at its limit."""
        return len(self.prompt) + self.limit


@torch.inference_mode()
def continue_together(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    end_tokens: Collection[int],
    sampling: SamplingOptions,
    numbers_BL: Tensor,
    max_batch_size: int = COMPILED_MAX_ROWS,
) -> list[list[int]]:
    """Return what follows each prompt: up to an end token, which is included, or so many tokens as its limit.

    Each prompt has at least one token, and each limit is at least 1. numbers_BL: the uniform number, float64, that each
    token is drawn by, so that it does not depend on the other prompts. max_batch_size: sequences that go on at a time.
    Raises CheckpointError if a logit is NaN or infinite.
    """
    assert all(prompts), "a prompt has no tokens"
    sequences = list(map(_Sequence, prompts, limits, range(len(prompts))))
    batch = min(max_batch_size, len(sequences))
    reader = _Reader(decoder, batch, max((each.longest for each in sequences), default=1))
    waiting, going = deque(sequences), list[_Sequence]()
    while waiting or going:
        added = [waiting.popleft() for _ in range(min(len(waiting), batch - len(going)))]
        logits = [reader.next(going)] if going else []
        logits += [reader.prompts(group) for group in _groups(added, reader.reads_together)]
        going += added
        rows, places = ([each.row for each in going], [len(each.written) for each in going])
        drawn_B = sample(torch.cat(logits), sampling, numbers_BL[rows, places])
        for each, token in zip(going, drawn_B.tolist(), strict=True):
            each.written.append(token)
            if token in end_tokens or len(each.written) >= each.limit:
                reader.release(each)
        going = [each for each in going if each.table.blocks]
    return [each.written for each in sequences]


def _groups(sequences: list[_Sequence], reads_together: bool) -> Iterator[list[_Sequence]]:
    """Yield sequences in order, so many that their prompts have at most MOST_TOKENS; one by one unless `reads_together`."""
    group: list[_Sequence] = []
    for each in sequences:
        tokens = sum(len(other.prompt) for other in [*group, each])
        if group and (not reads_together or tokens > MOST_TOKENS):
            yield group
            group = []
        group.append(each)
    if group:
        yield group


class _Reader:
    """A decoder with a cache that holds a batch of the longest sequences."""

    def __init__(self, decoder: Decoder, batch: int, longest: int) -> None:
        self._decoder = decoder
        each = position_bytes(decoder.config, decoder.dtype) * BLOCK_SIZE
        size = batch * -(-longest // BLOCK_SIZE) * each
        self._cache = PagedCache(decoder.config, size, decoder.dtype, decoder.device, sequences=batch)
        self.reads_together = self._cache.pool.shares
        """Whether one pass reads several prompts: recurrent states are of one text at a time."""

    def prompts(self, group: list[_Sequence]) -> Tensor:
        """Read the prompts; return the logits [B, V] that follow them."""
        tokens_1L = torch.tensor([[token for each in group for token in each.prompt]])
        lengths = [len(each.prompt) for each in group]
        hidden_LD = self._read(self._decoder.hidden_states, group, tokens_1L, PROMPT, lengths)[0]
        last = torch.tensor(lengths, device=hidden_LD.device).cumsum(0) - 1
        return self._decoder.logits(hidden_LD[last], DECODING)

    def next(self, going: list[_Sequence]) -> Tensor:
        """Read the last token of each sequence; return the logits [B, V] that follow it."""
        tokens_B1 = torch.tensor([[each.written[-1]] for each in going])
        return self._read(self._decoder.last_logits, going, tokens_B1, DECODING)

    def release(self, sequence: _Sequence) -> None:
        """Give a sequence's blocks back."""
        self._cache.pool.release(sequence.table)

    def _read(
        self,
        read: Callable[..., Tensor],
        sequences: list[_Sequence],
        tokens_BL: Tensor,
        choice: KernelChoice,
        new: Sequence[int] | None = None,
    ) -> Tensor:
        """Read new tokens, `new` of each sequence or one; return what `read`, a function of the decoder, makes of them."""
        counts = [1] * len(sequences) if new is None else new
        for each, count in zip(sequences, counts, strict=True):
            self._cache.pool.extend(each.table, each.table.length + count)
        tables, read_as = zip(*((each.table, len(each.prompt)) for each in sequences), strict=True)
        batch = PagedBatch(self._cache, tables, new, read_as)
        with torch_products(tokens_BL.numel(), self._decoder.dtype, self._decoder.device):
            made = read(tokens_BL.to(self._decoder.device), None, batch, choice)
        for each, count in zip(sequences, counts, strict=True):
            each.table.length += count
        return made
