"""Pages of libraries' code: most of what was read from disk while a program started is never used again."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from engine.passes.heap import advise

_MAPS = Path("/proc/self/smaps")
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ (\d+)")
"""The first line of a mapping: its addresses, what it allows, and the number of its file, 0 for none."""


def release_library_pages() -> None:
    """Take the code of libraries out of resident memory. Where it runs again, the system brings its pages back.

    The system would do so itself if memory were short: code is read from files, and never changes. Does nothing where the
    system does not say what is mapped (all but Linux).
    """
    try:
        lines = _MAPS.read_text().splitlines()
    except OSError:
        return
    for begin, end in code_ranges(lines):
        advise(begin, end - begin, mmap.MADV_DONTNEED)


def code_ranges(lines: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Yield first address and end of each mapping of a file that can only be read and run, and that nobody has changed."""
    found: tuple[int, int] | None = None
    for line in lines:
        if mapping := _MAPPING.match(line):
            begin, end, allowed, file = mapping.groups()
            found = (int(begin, 16), int(end, 16)) if allowed == "r-xp" and file != "0" else None
        elif found is not None and line.startswith("Anonymous:") and int(line.split()[1]) == 0:
            yield found
