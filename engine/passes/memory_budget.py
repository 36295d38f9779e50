"""A limit on the memory that this process may have resident, and what obeys it: small batches, activations that go to files,
pages of mapped weights that are given back between experts.

The limit belongs to the process, as its number of threads does. Without one nothing here changes anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import psutil
from torch import Tensor, nn

from engine.passes import heap

TOKENS_PER_BATCH = 4096
KEPT_BYTES = 256 << 20
"""Activations above this size go to a file."""
KEPT_WITHIN_LIMIT_BYTES = 16 << 20
"""The same within a limit: a few are held at a time, and the page cache has room of its own."""


@dataclass(frozen=True)
class MemoryBudget:
    """A limit, and how a run was found to fit into it (memory_need.py)."""

    limit: int
    """Bytes that may be resident, mapped weights included."""
    batch: int
    """Bytes that a batch may take in a layer: before it, pages go back where less is left."""
    piece: int
    """The same of one expert."""
    tokens_per_batch: int = TOKENS_PER_BATCH


_current: MemoryBudget | None = None


def current() -> MemoryBudget | None:
    """What this process keeps to; None for no limit."""
    return _current


@contextmanager
def limited(budget: MemoryBudget | None) -> Iterator[None]:
    """Keep to it inside the `with`; None lifts nothing and sets nothing."""
    global _current
    before = _current
    _current = budget or before
    try:
        yield
    finally:
        _current = before


def kept_bytes() -> int:
    """The largest activations that stay in memory."""
    return KEPT_BYTES if _current is None else min(KEPT_BYTES, KEPT_WITHIN_LIMIT_BYTES)


def sequences_per_batch(length: int) -> int:
    """The most sequences of so many tokens that go through a layer together."""
    tokens = TOKENS_PER_BATCH if _current is None else min(TOKENS_PER_BATCH, _current.tokens_per_batch)
    return max(1, tokens // length)


def batches(sequences: int, length: int) -> Iterator[slice]:
    """Slices of about as many tokens each as go through a layer together."""
    size = sequences_per_batch(length)
    for start in range(0, sequences, size):
        yield slice(start, min(start + size, sequences))


def relieve(release: Callable[[], None], next_bytes: int | None = None) -> None:
    """Call `release`, which gives mapped pages back, where the limit leaves less than comes next; None: one expert."""
    if _current is not None and resident_memory_bytes() > _current.limit - (next_bytes or _current.piece):
        release()
        heap.give_back()


def resident_memory_bytes() -> int:
    """What this process has resident, mapped weights included."""
    return int(_process().memory_info().rss)


def relieved_between_experts(layer: nn.Module, expert: type[nn.Module], release: Callable[[], None]) -> None:
    """Let a layer look at the limit before it runs and after each of its modules of this class, in the backward pass too."""
    if _current is None:
        return
    batch = _current.batch

    def after(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        relieve(release)
        if output.requires_grad:
            output.register_hook(lambda gradient: relieve(release))

    layer.register_forward_pre_hook(lambda module, given: relieve(release, batch))
    for module in layer.modules():
        if isinstance(module, expert):
            module.register_forward_hook(after)


@cache
def _process() -> psutil.Process:
    return psutil.Process()
