"""The first piece of a text, read on a GPU as a CUDA graph.

A short prompt takes a GPU a fraction of the time in which Python launches its kernels. The graph reads the text into a cache
of its own, whose content is then copied into that of the sequence, so that it serves every cache. Lengths are rounded up: in
a causal model, padding at the end changes nothing before it.

Shape suffixes: L positions, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.decoder.attention import Cache
from engine.decoder.kv_cache import KeyValueCache
from engine.decoder.paged_cache import PagedBatch
from engine.kernels.gpu.launching import power_of_two, recorded

LONGEST, SHORTEST = 512, 16
"""Numbers of positions of the longest and of the shortest graph."""


class PromptGraphs:
    """Graphs of the first piece of a text, by length."""

    def __init__(
        self,
        read: Callable[[Tensor, KeyValueCache], Tensor],
        new_cache: Callable[[int], KeyValueCache],
        pool: Any,
    ) -> None:
        """read: returns the hidden states [1, L, D] of tokens [1, L], which it reads into a cache. new_cache: makes one."""
        self._read, self._new_cache, self._pool = read, new_cache, pool
        self._graphs: dict[int, tuple[Tensor, KeyValueCache, Tensor, torch.cuda.CUDAGraph | None]] = {}

    def __call__(self, tokens_1L: Tensor, cache: Cache) -> Tensor:
        """Return the hidden states [1, L, D] of a text's first tokens, which are then in the cache."""
        length = tokens_1L.shape[1]
        padded = max(SHORTEST, power_of_two(length))
        if padded not in self._graphs:
            self._graphs[padded] = self._recorded(tokens_1L.new_zeros(1, padded))
        own_1L, own_cache, hidden_1LD, graph = self._graphs[padded]
        own_1L[:, :length].copy_(tokens_1L)
        own_1L[:, length:].zero_()
        if graph is None:
            hidden_1LD.copy_(self._whole(own_1L, own_cache))
        else:
            graph.replay()
        _copy(own_cache, cache, length)
        return hidden_1LD[:, :length].clone()

    def _recorded(self, own_1L: Tensor) -> tuple[Tensor, KeyValueCache, Tensor, torch.cuda.CUDAGraph | None]:
        """Return the memory of a graph, and the graph; None on a CPU, where tests launch the kernels one by one."""
        own_cache = self._new_cache(own_1L.shape[1])
        hidden_1LD = self._whole(own_1L, own_cache)  # compiles the kernels
        if not own_1L.is_cuda:
            return own_1L, own_cache, hidden_1LD, None
        made: list[Tensor] = []
        graph = recorded(lambda: made.append(self._whole(own_1L, own_cache)), self._pool)
        return own_1L, own_cache, made[0], graph

    def _whole(self, own_1L: Tensor, own_cache: KeyValueCache) -> Tensor:
        own_cache.length = 0
        return self._read(own_1L, own_cache)


def serves_prompt(tokens_BL: Tensor, real_BP: Tensor | None, cache: Cache) -> bool:
    """Return whether these are the first tokens of one text, short enough, and with room in the cache."""
    batch, length = tokens_BL.shape
    if batch != 1 or not 1 < length <= LONGEST or real_BP is not None:
        return False
    if isinstance(cache, PagedBatch):
        return not cache.is_step and len(cache.past) == 1 and cache.past[0] == 0
    return cache.length == 0 and length <= cache.capacity


def _copy(source: KeyValueCache, target: Cache, length: int) -> None:
    """Copy the first positions of every layer."""
    kept: Any = zip(source.stored.keys, source.stored.values, strict=True)
    for layer, (key_1GLE, value_1GLE) in enumerate(kept):
        target.append(layer, key_1GLE[:, :, :length], value_1GLE[:, :, :length])
    if isinstance(target, KeyValueCache):
        target.advance(length)
