"""`FileMemory`: memory in the place of a file's mapping, with the same layout, whose parts are read and given back by hand.

A byte of the file lies at its own offset in the memory, so tensors and tables of addresses stay valid whatever is loaded at
the moment. Parts are read by direct I/O where the file system has it: no byte goes through the page cache.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import cast

from torch import Tensor

from engine.errors import CheckpointError
from engine.files.mapped_file import Extent, MappedFile, extent_of, read_part
from engine.passes.heap import of_libc

PAGE = max(4096, mmap.PAGESIZE)
"""Bytes of a page. Direct I/O takes offsets, addresses and lengths that are multiples of it on every usual disk."""
_MOVE = 1 | 2 | 4
"""MREMAP_MAYMOVE, MREMAP_FIXED and MREMAP_DONTUNMAP: the old place stays, without memory. Linux has it since 5.7."""
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""A mapping larger than memory is refused without it. Linux's value is 0x4000."""


class FileMemory:
    """Memory with the layout of one file, empty at first."""

    def __init__(self, file: MappedFile) -> None:
        """Make `file` return its tensors from this memory. Raises CheckpointError for a file that cannot be opened."""
        self.path = file.path
        self._size = file.size
        self.map = mmap.mmap(-1, _up(file.size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        self._bytes = memoryview(self.map)
        self._descriptor, self.is_direct = _open(file)
        self._users: Counter[int] = Counter()
        """Number of loaded extents that begin or end in each page."""
        file.serve_from(self.map)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    def holds(self, address: int) -> bool:
        """Whether an address lies in this memory."""
        return self._address <= address < self._address + self._size

    def extent_of(self, tensor: Tensor) -> Extent:
        """Return the bytes of the file from a tensor's first to its last, whatever its strides are."""
        return extent_of(tensor, self._address)

    def read(self, extent: Extent) -> None:
        """Read a part of the file, from page to page. Several threads may read at once.

        Raises CheckpointError for a disk that fails and for a file that has become shorter.
        """
        place, end = _down(extent.begin), _up(extent.end)
        read_part(self.path, self._descriptor, self._bytes[place:end], place, min(end, self._size) - place)
        if not self.is_direct:
            os.posix_fadvise(self._descriptor, place, end - place, os.POSIX_FADV_DONTNEED)

    def hold(self, extent: Extent) -> int:
        """Note that a part is loaded, before it is read. Returns the bytes of memory that this takes."""
        return self._change(extent, 1)

    def drop(self, extent: Extent, *, lends: bool = False) -> int:
        """Give the memory of a part back, but for pages at its ends that other loaded parts share. Returns its bytes.

        lends: keep the pages that lie in the part as a whole until `take_pages` or `give_back`.
        """
        first, last = extent.begin // PAGE, (extent.end - 1) // PAGE
        freed = self._change(extent, -1)
        begin = first if not self._users[first] else first + 1
        end = last + 1 if not self._users[last] else last
        kept = _whole_pages(extent) if lends else (end, end)
        self._discard(begin, min(end, kept[0]))
        self._discard(max(begin, kept[1]), end)
        return freed

    def take_pages(self, extent: Extent, other: FileMemory, given: Extent) -> None:
        """Move the memory that another part has lent to a part that is read next. Its content is worthless.

        New memory is cleared by the system, which takes a third of the time of reading it. What the system cannot move, and
        what the part does not need, is given back.
        """
        (first, last), (source, end) = _whole_pages(extent), _whole_pages(given)
        pages = max(0, min(last - first, end - source))
        place, target = other._address + source * PAGE, self._address + first * PAGE
        if pages > 0 and (
            (mremap := _mremap()) is None or mremap(place, pages * PAGE, pages * PAGE, _MOVE, target) != target
        ):
            pages = 0
        other._discard(source + pages, end)

    def give_back(self, extent: Extent) -> None:
        """Give the memory back that a part has lent, and that nothing took."""
        self._discard(*_whole_pages(extent))

    def _discard(self, begin: int, end: int) -> None:
        """Give pages back to the system."""
        if begin < end:
            self.map.madvise(mmap.MADV_DONTNEED, begin * PAGE, (end - begin) * PAGE)

    def _change(self, extent: Extent, change: int) -> int:
        """Count one user more or less of the pages at the ends. Returns the bytes that are taken or freed."""
        first, last = extent.begin // PAGE, (extent.end - 1) // PAGE
        pages = max(0, last - first - 1)
        for page in {first, last}:
            before = self._users[page]
            self._users[page] = before + change
            pages += not before or not before + change
            if not self._users[page]:
                del self._users[page]
        return pages * PAGE

    def close(self) -> None:
        """Close the file. The memory lives as long as its tensors."""
        os.close(self._descriptor)


def most_mappings() -> int:
    """Return how many mappings the system lets a process have; 0 where it does not say."""
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return 0


def _whole_pages(extent: Extent) -> tuple[int, int]:
    """Return the first page that lies in an extent as a whole, and the one after the last."""
    return _up(extent.begin) // PAGE, _down(extent.end) // PAGE


@cache
def _mremap() -> Callable[..., int] | None:
    """Return Linux's function that moves pages, or None."""
    found = of_libc("mremap")
    if found is None:
        return None
    found.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    found.restype = ctypes.c_void_p
    return cast("Callable[..., int]", found)


def _open(file: MappedFile) -> tuple[int, bool]:
    """Return a descriptor of the file, and whether it reads past the page cache."""
    for flag in (getattr(os, "O_DIRECT", 0), 0):
        try:
            descriptor = os.open(file.path, os.O_RDONLY | flag)
        except OSError as error:
            if flag:
                continue  # a file system without direct I/O
            reason = error.strerror or type(error).__name__
            raise CheckpointError(f"{file.path}: weights cannot be read ({reason}); check permissions") from error
        with os.fdopen(os.dup(descriptor), "rb", buffering=0) as opened:
            file.check_unchanged(opened)
        return descriptor, bool(flag)
    raise AssertionError("the second attempt returns or raises")


def _down(place: int) -> int:
    return place // PAGE * PAGE


def _up(place: int) -> int:
    return -(-place // PAGE) * PAGE
