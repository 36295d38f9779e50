"""Weights in huge pages of memory, in the place of mapped files, whose pages have 4 kB (engine/files/huge_pages.py)."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

from torch import Tensor

from engine.errors import OptionError
from engine.files.huge_pages import huge_page_bytes
from engine.files.json_file import reading
from engine.files.mapped_file import Extent, MappedFile, extent_of, read_part
from engine.passes.heap import advise, of_libc

LEAST_BYTES = 64 << 20
"""Bytes of weights from which they are moved. Most processors' caches and tables of pages hold less."""
_GAP_BYTES = 2 << 20
"""Bytes between two weights that are read too, so that the weights around them share huge pages."""
_COLLAPSE = 25
"""MADV_COLLAPSE, which Linux has since 6.1."""
_FIXED = 0x10
"""MAP_FIXED of Linux."""
_BYTES_OF_A_CALL = 8 << 20
_MOST_THREADS = 4


def hold_weights(files: Sequence[MappedFile], weights: Iterable[Tensor], most_bytes: int) -> bool:
    """Read mapped weights into huge pages that take the place of the mapping; tensors stay where they are.

    Other weights get huge pages where they are. The rest of each file stays mapped. No other thread may read the weights
    meanwhile. Returns whether that was done: not where the system gives no huge pages, not for weights of less than
    LEAST_BYTES, and not if more than `most_bytes` had to be read. Raises OptionError if the system has no memory for them,
    and CheckpointError for a file that cannot be read; the weights are then lost.
    """
    size, every = huge_page_bytes() if of_libc("mmap") else 0, list(weights)
    if not size or sum(weight.nbytes for weight in every) < LEAST_BYTES:
        return False
    mapped = [(file, address) for file in files if (address := file.address) is not None]
    held = [_spans((weight for weight in every if _lies_in(weight, *each)), each[1]) for each in mapped]
    if sum(span.size for spans in held for span in spans) > most_bytes:
        return False
    for weight in every:
        if not any(_lies_in(weight, *each) for each in mapped):
            _collapse(extent_of(weight, 0), size)
    for (file, address), spans in zip(mapped, held, strict=True):
        _hold(file, address, spans)
    return True


def _lies_in(weight: Tensor, file: MappedFile, address: int) -> bool:
    return address <= weight.data_ptr() < address + file.size


def _spans(weights: Iterable[Tensor], address: int) -> list[Extent]:
    """Return the pages of a file that hold these weights, in as few parts as possible."""
    page = mmap.PAGESIZE
    spans: list[Extent] = []
    for extent in sorted(extent_of(weight, address) for weight in weights):
        begin, end = extent.begin // page * page, -(-extent.end // page) * page
        if spans and begin <= spans[-1].end + _GAP_BYTES:
            begin, end = spans[-1].begin, max(end, spans.pop().end)
        spans.append(Extent(begin, end))
    return spans


def _hold(file: MappedFile, address: int, spans: Sequence[Extent]) -> None:
    """Replace pages of a file's mapping, which begins at an address, by huge pages with the same content."""
    if not spans:
        return
    with reading(file.path, file.what) as opened, ThreadPoolExecutor(_MOST_THREADS) as pool:
        file.check_unchanged(opened)
        waiting = []
        for span in spans:
            _clear(address + span.begin, span.size)
            file.keep(span.begin, span.end)
            places = [*range(span.begin, min(span.end, file.size), _BYTES_OF_A_CALL), min(span.end, file.size)]
            waiting += [pool.submit(_read, file, opened.fileno(), address, *each) for each in pairwise(places)]
        for each in waiting:
            each.result()


def _clear(address: int, size: int) -> None:
    """Map new memory at an address, in place of what was mapped there."""
    own = _libc_mmap()(
        address, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED, -1, 0
    )
    if own != address:
        raise OptionError(f"the system has no {size / 1e9:.1f} GB of memory for weights; give --load-mode mapped")
    advise(address, size, mmap.MADV_HUGEPAGE)


def _read(file: MappedFile, descriptor: int, address: int, begin: int, end: int) -> None:
    """Read a part of a file to its place in memory."""
    target = memoryview((ctypes.c_char * (end - begin)).from_address(address + begin)).cast("B")
    read_part(file.path, descriptor, target, begin, end - begin)


def _collapse(addresses: Extent, size: int) -> None:
    """Move what lies at these addresses to huge pages, as far as it fills them. A system that cannot changes nothing."""
    first, last = -(-addresses.begin // size) * size, addresses.end // size * size
    if first < last:
        advise(first, last - first, mmap.MADV_HUGEPAGE)
        advise(first, last - first, _COLLAPSE)


@cache
def _libc_mmap() -> Any:
    function = of_libc("mmap")
    assert function is not None, "hold_weights has looked for it"
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    function.restype = ctypes.c_void_p
    return function
