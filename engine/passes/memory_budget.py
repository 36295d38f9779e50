"""`MemoryBudget`: how much memory a pass may use, and the means to stay below a limit.

The means are smaller batches, activations in files, and releasing the pages of memory-mapped weights between experts. A job
makes one budget (memory_need.py) and hands it to each of its passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from engine.passes import heap

if TYPE_CHECKING:
    import psutil

CONTROL_GROUPS = Path("/sys/fs/cgroup")


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


def free_memory_bytes(groups: Path = CONTROL_GROUPS) -> int:
    """Return the main memory that is free for this process: of the machine, and within the limit of a container.

    groups: where the system shows control groups (version 2).
    """
    import psutil  # here: only what measures memory needs it

    free = int(psutil.virtual_memory().available)
    with suppress(OSError, ValueError):  # no control groups, or of version 1
        (own,) = (line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        place = groups / own.strip("/")
        chain = (group for group in (place, *place.parents) if group.is_relative_to(groups))
        free = min([free, *(left for group in chain if (left := _left_in(group)) is not None)])
    return free


def _left_in(group: Path) -> int | None:
    """Return the memory that the limit of a control group leaves; None for a group without a limit."""
    limit = group / "memory.max"
    if not limit.exists() or (most := limit.read_text().strip()) == "max":
        return None
    kept = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    used = int((group / "memory.current").read_text()) - int(kept.get("inactive_file", 0))  # pages that can be given back
    return max(int(most) - used, 0)


@cache
def _process() -> psutil.Process:
    import psutil  # here: only what measures memory needs it

    return psutil.Process()
