"""`MemoryBudget`: how much memory a pass may use, and the means to stay below a limit.

The means are smaller batches, activations in files, and releasing the pages of memory-mapped weights between experts. A job
makes one budget (memory_need.py) and hands it to each of its passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from torch import Tensor, nn

from engine.passes import heap

if TYPE_CHECKING:
    import psutil


@dataclass(frozen=True)
class MemoryBudget:
    """Sizes that determine the memory of a pass over text."""

    tokens_per_batch: int = 4096
    """Number of tokens that go through a layer together; at least one sequence does."""
    kept_bytes: int = 256 << 20
    """Activations above this size go to a file."""
    limit: int | None = None
    """Maximum resident bytes, including memory-mapped weights."""
    batch_bytes: int = 0
    """Bytes that a batch may need in a layer; pages are released before the batch if the limit leaves less."""
    expert_bytes: int = 0
    """Bytes that one expert may need; pages are released after an expert if the limit leaves less."""

    def sequences_per_batch(self, length: int) -> int:
        """Return the number of sequences of this length that go through a layer together."""
        return max(1, self.tokens_per_batch // length)

    def batches(self, sequences: int, length: int) -> Iterator[slice]:
        """Yield slices of sequences, with about as many tokens each as may go through a layer together."""
        size = self.sequences_per_batch(length)
        for start in range(0, sequences, size):
            yield slice(start, min(start + size, sequences))

    def relieve(self, release: Callable[[], None], next_bytes: int | None = None) -> None:
        """Call `release` if the limit leaves less than the next step needs (None: one expert); it releases mapped pages."""
        if self.limit is not None and resident_memory_bytes() > self.limit - (next_bytes or self.expert_bytes):
            release()
            heap.give_back()

    def relieve_between_experts(self, layer: nn.Module, expert: type[nn.Module], release: Callable[[], None]) -> None:
        """Let `layer` call `relieve` before it runs and after each of its modules of class `expert`.

        The backward pass calls `relieve` after each expert too.
        """
        if self.limit is None:
            return

        def after(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
            self.relieve(release)
            if output.requires_grad:
                output.register_hook(lambda gradient: self.relieve(release))

        layer.register_forward_pre_hook(lambda module, given: self.relieve(release, self.batch_bytes))
        for module in layer.modules():
            if isinstance(module, expert):
                module.register_forward_hook(after)


UNLIMITED = MemoryBudget()
"""The budget of a pass without a memory limit."""


def resident_memory_bytes() -> int:
    """Return the resident memory of this process, including memory-mapped weights."""
    return int(_process().memory_info().rss)


@cache
def _process() -> psutil.Process:
    import psutil  # here: only what measures memory needs it

    return psutil.Process()
