"""A limit on the resident memory of this process, and the means to keep it.

The means are smaller batches, activations in files, and releasing the pages of memory-mapped weights between experts.
The limit belongs to the process, like the number of threads. Without a limit, nothing here has an effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from torch import Tensor, nn

from engine.passes import heap

if TYPE_CHECKING:
    import psutil

TOKENS_PER_BATCH = 4096
KEPT_BYTES = 256 << 20
"""Activations above this size go to a file."""
KEPT_WITHIN_LIMIT_BYTES = 16 << 20
"""Limit on activations in memory under a memory limit: several are held at a time, and the page cache holds the files."""


@dataclass(frozen=True)
class MemoryBudget:
    """A memory limit, and the batch sizes that were found to fit into it (memory_need.py)."""

    limit: int
    """Maximum resident bytes, including memory-mapped weights."""
    batch: int
    """Bytes that a batch may need in a layer; pages are released before the batch if less is left."""
    piece: int
    """Bytes that one expert may need."""
    tokens_per_batch: int = TOKENS_PER_BATCH


_current: MemoryBudget | None = None


def current() -> MemoryBudget | None:
    """Return the limit of this process; None for no limit."""
    return _current


@contextmanager
def limited(budget: MemoryBudget | None) -> Iterator[None]:
    """Apply a limit during the body; None leaves the current limit in force."""
    global _current
    before = _current
    _current = budget or before
    try:
        yield
    finally:
        _current = before


def kept_bytes() -> int:
    """Return the size in bytes above which activations go to a file."""
    return KEPT_BYTES if _current is None else min(KEPT_BYTES, KEPT_WITHIN_LIMIT_BYTES)


def sequences_per_batch(length: int) -> int:
    """Return the number of sequences of this length that go through a layer together."""
    tokens = TOKENS_PER_BATCH if _current is None else min(TOKENS_PER_BATCH, _current.tokens_per_batch)
    return max(1, tokens // length)


def batches(sequences: int, length: int) -> Iterator[slice]:
    """Yield slices of sequences, with about as many tokens each as may go through a layer together."""
    size = sequences_per_batch(length)
    for start in range(0, sequences, size):
        yield slice(start, min(start + size, sequences))


def relieve(release: Callable[[], None], next_bytes: int | None = None) -> None:
    """Call `release`, which releases mapped pages, if the limit leaves less than the next step needs (None: one expert)."""
    if _current is not None and resident_memory_bytes() > _current.limit - (next_bytes or _current.piece):
        release()
        heap.give_back()


def resident_memory_bytes() -> int:
    """Return the resident memory of this process, including memory-mapped weights."""
    return int(_process().memory_info().rss)


def relieved_between_experts(layer: nn.Module, expert: type[nn.Module], release: Callable[[], None]) -> None:
    """Check the limit before a layer runs and after each of its modules of class `expert`, in the backward pass too."""
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
    import psutil  # here: only what measures memory needs it

    return psutil.Process()
