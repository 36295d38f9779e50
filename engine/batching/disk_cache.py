"""Threads that read and write the blocks of key-value caches on disk, so that no step of a scheduler waits for a disk.

A block is a mapping of names to tensors under a key. Blocks to be written are queued, up to a limit of memory; what does
not fit is dropped. Blocks to be read arrive one by one, some ahead of the scheduler that takes them. A block that cannot be
read or written is a line in the log, and is otherwise as if it had never been there.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torch import Tensor

from engine.errors import CompressError
from engine.files.kept_files import KeptFiles

Block = Mapping[str, Tensor]
MOST_QUEUED_BYTES = 256 << 20
"""Limit on the bytes of the blocks that wait to be written."""
MOST_JOBS = 10_000
"""Queue length from which uses of blocks are no longer recorded."""
AHEAD_BYTES = 64 << 20
"""Limit on the bytes that one reading holds ahead of the scheduler. Its last block may exceed the limit."""
READERS = 2
PAUSE_SECONDS = 60.0
"""Time without writing after a write that failed: a full disk has no room in the next moment either."""
STALL_SECONDS = 2.0
"""Time after which a reading without a new block is given up, and the prompt is read by the model."""
CLOSE_SECONDS = 20.0
"""Time for the blocks in memory to be written when a model or the server is closed."""
_LOG = logging.getLogger(__name__)


@dataclass
class DiskCounts:
    """Counts of one model since its start."""

    read: int = 0
    """Blocks that were read."""
    written: int = 0
    """Blocks that were written."""
    hits: int = 0
    """Requests that found a part of their prompt on disk."""
    failed: int = 0
    """Blocks that could not be read or written, or were dropped."""


class Reading:
    """Blocks that a thread reads for one request, in order, until one cannot be read."""

    def __init__(
        self, keys: Sequence[str], counts: DiskCounts, fits: Callable[[Block], bool], changed: threading.Condition
    ) -> None:
        self._keys, self._counts, self._fits, self._changed = keys, counts, fits, changed
        self._arrived: deque[Block] = deque()
        self._ahead = 0
        self._is_over = self._is_cancelled = False
        self._last_arrival = time.monotonic()

    def take(self) -> list[Block]:
        """Return the blocks that have arrived since the last call."""
        with self._changed:
            taken = list(self._arrived)
            self._arrived.clear()
            self._ahead = 0
            if taken:
                self._last_arrival = time.monotonic()
                self._changed.notify_all()
            return taken

    @property
    def has_news(self) -> bool:
        """Whether a block has arrived or none will."""
        with self._changed:
            return bool(self._arrived) or self.is_over

    @property
    def is_over(self) -> bool:
        """Whether no further block will be taken, because all were, or one failed, or the disk does not answer."""
        with self._changed:
            if self._is_cancelled or not self._arrived:
                is_stalled = time.monotonic() - self._last_arrival > STALL_SECONDS
                return self._is_over or self._is_cancelled or is_stalled
            return False

    def cancel(self) -> None:
        """Read no more. What was read stays on disk."""
        with self._changed:
            self._is_cancelled = True
            self._arrived.clear()
            self._changed.notify_all()

    def run(self, cache: DiskCache) -> None:
        """Read the blocks, in a thread of the cache."""
        done: list[str] = []
        for key in self._keys:
            if not self._has_room() or (block := cache.read(key, self._counts, self._fits)) is None:
                break
            done.append(key)
            self._add(block)
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        cache.touch(done)

    def _has_room(self) -> bool:
        """Wait until another block may be read; return False if none is wanted."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_cancelled or self._ahead < AHEAD_BYTES)
            return not self._is_cancelled

    def _add(self, block: Block) -> None:
        with self._changed:
            if not self._is_cancelled:
                self._arrived.append(block)
                self._ahead += _bytes(block)
                self._changed.notify_all()


@dataclass(eq=False)
class _Job:
    """One access to the disk of the writing thread."""

    kind: Literal["write", "touch", "remove"]
    keys: Sequence[str]
    block: Block = field(default_factory=dict)
    counts: DiskCounts = field(default_factory=DiskCounts)


class DiskCache:
    """The blocks of all models of a process, in one directory. Any thread may use it.

    Only `read`, `wait`, `close`, and `write` with a time limit wait for the disk.
    """

    def __init__(self, directory: Path, limit: int) -> None:
        """limit: maximum bytes on disk. Raises OptionError for a directory that cannot be used."""
        self._files = KeptFiles(directory, limit)
        self._changed = threading.Condition()
        """Guards the attributes below, and is notified when any of them changes."""
        self._jobs: deque[_Job] = deque()
        """Accesses of the writing thread in order; the first one is under way."""
        self._queued: dict[str, Block] = {}
        """Blocks that wait to be written, or are being written."""
        self._queued_bytes = 0
        self._readings: deque[Reading] = deque()
        self._current: list[Reading] = []
        self._is_closed = False
        self._end = math.inf
        self._writes_again = 0.0
        threading.Thread(target=self._write_all, name="cache writer", daemon=True).start()
        for number in range(READERS):
            threading.Thread(target=self._read_all, name=f"cache reader {number}", daemon=True).start()

    @property
    def secret(self) -> bytes:
        """Random bytes that belong to the directory, to derive names from what must not be stored."""
        return self._files.secret

    @property
    def memory_bytes(self) -> int:
        """Maximum bytes of the blocks that are in memory on their way to or from the disk, but for the last ones."""
        return MOST_QUEUED_BYTES + READERS * AHEAD_BYTES

    @property
    def limit(self) -> int:
        """Maximum bytes on disk."""
        return self._files.limit

    @property
    def bytes(self) -> int:
        """Bytes on disk."""
        return self._files.bytes

    def __contains__(self, key: str) -> bool:
        with self._changed:
            return key in self._queued or key in self._files

    def takes(self, size: int) -> bool:
        """Return whether `write` would queue a block of so many bytes now, so that it need not be copied in vain."""
        with self._changed:
            return self._has_room(size) and not self._is_closed and not self._pauses

    def write(self, key: str, block: Block, counts: DiskCounts, until: float = 0.0) -> bool:
        """Queue a block. Returns False if it was dropped, because the disk is too slow or does not take it.

        until: time of `time.monotonic` up to which the call may wait for room in the queue.
        """
        size = _bytes(block)
        with self._changed:
            self._wait_for(lambda: self._has_room(size) or self._pauses, until)
            if not self.takes(size):
                counts.failed += 1
                return False
            if key not in self:
                self._queued[key] = block
                self._queued_bytes += size
                self._add(_Job("write", [key], block, counts))
            return True

    def touch(self, keys: Sequence[str]) -> None:
        """Make blocks the most recently used ones, the first one most of all: the others are of no use without it."""
        with self._changed:
            if len(self._jobs) < MOST_JOBS:
                self._add(_Job("touch", list(reversed(keys))))

    def remove(self, key: str) -> None:
        """Remove a block, also one that waits to be written."""
        with self._changed:
            self._unqueue(key)
            self._files.forget(key)
            self._add(_Job("remove", [key]))

    def start(self, keys: Sequence[str], counts: DiskCounts, fits: Callable[[Block], bool]) -> Reading | None:
        """Begin to read blocks, and return the reading; None if the disk does not answer earlier ones.

        fits: returns whether a block has the dtypes and sizes of the model's blocks.
        """
        with self._changed:
            if self._is_closed or (len(self._current) == READERS and all(each.is_over for each in self._current)):
                return None
            reading = Reading(keys, counts, fits, self._changed)
            self._readings.append(reading)
            self._changed.notify_all()
            return reading

    def wait(self, readings: Sequence[Reading], seconds: float) -> None:
        """Wait until a reading has a block or is over, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: any(each.has_news for each in readings), seconds)

    def read(self, key: str, counts: DiskCounts, fits: Callable[[Block], bool]) -> Block | None:
        """Return a block; None if it is not there, cannot be read or does not fit. Such a one is removed."""
        with self._changed:
            if (queued := self._queued.get(key)) is not None:
                return queued
        if key not in self._files:
            return None
        try:
            block = self._files.read(key)
            if fits(block):
                return block
            _LOG.warning("a block of the key-value cache on disk is not used: %s is not of this model", key)
        except CompressError as error:
            if key not in self._files:
                return None  # it was removed to make room meanwhile
            _LOG.warning("a block of the key-value cache on disk is not used: %s", error)
        except Exception:
            _LOG.exception("a block of the key-value cache on disk cannot be read")
        with self._changed:
            counts.failed += 1
        self.remove(key)
        return None

    def end(self) -> float:
        """Return the time of `time.monotonic` up to which what is being closed may write blocks."""
        return min(time.monotonic() + CLOSE_SECONDS, self._end)

    def hurry(self, seconds: float) -> None:
        """Let everything that is being closed end within so many seconds from now on."""
        with self._changed:
            self._end = time.monotonic() + seconds
            self._changed.notify_all()

    def close(self) -> None:
        """Write what is queued, within some seconds, and let others use the directory. Nothing is read from now on."""
        with self._changed:
            for reading in (*self._readings, *self._current):
                reading.cancel()
            self._readings.clear()
            self._is_closed = True
            self._changed.notify_all()
            self._wait_for(lambda: not self._jobs, self.end())
            if self._jobs:
                _LOG.warning("%d blocks of the key-value cache were not written to disk in time", len(self._queued))
                self._jobs.clear()
        self._files.close()

    def _wait_for(self, is_met: Callable[[], bool], until: float) -> None:
        """Wait until a condition is met, or a time of `time.monotonic` has come; `hurry` may bring it forward."""
        while not is_met() and (left := min(until, self._end) - time.monotonic()) > 0:
            self._changed.wait(left)

    @property
    def _pauses(self) -> bool:
        """Whether nothing is written, because a write has failed."""
        return time.monotonic() < self._writes_again

    def _has_room(self, size: int) -> bool:
        return self._is_closed or not self._queued or self._queued_bytes + size <= MOST_QUEUED_BYTES

    def _add(self, job: _Job) -> None:
        self._jobs.append(job)
        self._changed.notify_all()

    def _unqueue(self, key: str) -> None:
        if (block := self._queued.pop(key, None)) is not None:
            self._queued_bytes -= _bytes(block)

    def _write_all(self) -> None:
        """Do the jobs in order, in the writing thread."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._is_closed)
                if not self._jobs:
                    return
                job = self._jobs[0]
            if job.kind == "write":
                self._write(job)
            elif job.kind == "touch":
                self._files.touch(job.keys)
            else:
                self._files.remove(job.keys[0])
            with self._changed:
                if self._jobs:  # else they were given up
                    self._jobs.popleft()
                self._changed.notify_all()

    def _write(self, job: _Job) -> None:
        """Write one block, unless it was removed meanwhile. It never raises."""
        (key,), counts = job.keys, job.counts
        if self._queued.get(key) is not job.block:
            return
        written = False
        try:
            written = not self._pauses and self._files.write(key, job.block)
        except Exception as error:
            self._writes_again = time.monotonic() + PAUSE_SECONDS
            is_bug = not isinstance(error, CompressError)
            message = "the key-value cache on disk takes no blocks for %g seconds: %s"
            _LOG.warning(message, PAUSE_SECONDS, error, exc_info=is_bug)
        with self._changed:
            counts.written += written
            counts.failed += not written
            if self._queued.get(key) is job.block:
                self._unqueue(key)
            else:
                self._files.forget(key)  # the job that removes the file follows

    def _read_all(self) -> None:
        """Run one reading after the other, in a reading thread."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._readings or self._is_closed)
                if not self._readings:
                    return
                reading = self._readings.popleft()
                self._current.append(reading)
            reading.run(self)
            with self._changed:
                self._current.remove(reading)


def _bytes(block: Block) -> int:
    return sum(tensor.nbytes for tensor in block.values())
