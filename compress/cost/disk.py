"""The speed at which the disk under a model reads pieces of the size of an expert, measured for a moment."""

from __future__ import annotations

import mmap
import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from engine.errors import OptionError
from engine.files.safetensors_writer import PAGE_BYTES

READERS = 4
"""Threads that read at the same time: one alone leaves a fast disk idle between its reads."""
TRIAL_SECONDS = 1.0
"""Seconds after which the measurement ends, if not all pieces were read before."""
_DIRECT = getattr(os, "O_DIRECT", 0)


@dataclass(frozen=True)
class DiskSpeed:
    """A disk's speed, and where it is from."""

    bytes_per_second: float
    source: str


def measured_disk(paths: Sequence[Path], piece_bytes: int, seed: int = 0) -> DiskSpeed:
    """Return the speed of reading pieces of these files in random order, past the page cache where that is possible.

    Raises OptionError if there is nothing to read.
    """
    size = -(-piece_bytes // PAGE_BYTES) * PAGE_BYTES
    pieces = [(path, place) for path in paths for place in range(0, path.stat().st_size - size + 1, size)]
    if not pieces:
        raise OptionError(
            "no file of the model's weights is here to measure the disk on; give its speed, such as --disk-speed 3GB"
        )
    random.Random(seed).shuffle(pieces)
    for direct, how in ((_DIRECT, "direct reads"), (0, "reads through the page cache")):
        try:
            speed = _read(pieces, size, direct)
        except OSError:
            if not direct:
                raise
            continue  # this file system has no direct reads
        return DiskSpeed(speed, f"measured on the model's files: {how} of {size:,} bytes by {READERS} threads")
    raise AssertionError("reads through the page cache either succeed or raise")


def _read(pieces: Sequence[tuple[Path, int]], size: int, direct: int) -> float:
    """Return bytes per second of reading the pieces, or as many as the time allows."""
    opened = {path: os.open(path, os.O_RDONLY | direct) for path in dict.fromkeys(path for path, _ in pieces)}
    try:
        if not direct and hasattr(os, "posix_fadvise"):
            for descriptor in opened.values():  # what is in the page cache would be read from memory
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.perf_counter()
        ends = started + TRIAL_SECONDS

        def share(first: int) -> int:
            done = 0
            with mmap.mmap(-1, size) as buffer:  # begins on a page, as direct reads need it
                for path, place in pieces[first::READERS]:
                    done += os.preadv(opened[path], [buffer], place)
                    if time.perf_counter() > ends:
                        break
            return done

        with ThreadPoolExecutor(READERS) as pool:
            total = sum(pool.map(share, range(READERS)))
        return total / (time.perf_counter() - started)
    finally:
        for descriptor in opened.values():
            os.close(descriptor)
