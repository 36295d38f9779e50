"""Memory of the C allocator: returning freed memory to the operating system."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

_MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of malloc.h."""


def give_back() -> None:
    """Let the C library return freed memory to the operating system; does nothing without malloc_trim (all but glibc).

    glibc keeps freed blocks below 32 MB. A pass over layers whose experts get varying numbers of tokens leaves holes
    between the blocks in use, so resident memory would grow from layer to layer.
    """
    if (trim := of_libc("malloc_trim")) is not None:
        trim(0)


def give_back_large() -> None:
    """Make the C library return every freed block of 1 MB or more at once; each new block then needs new pages.

    This is for code that repeatedly holds large tensors for a short time and has no suitable point to call `give_back`.
    """
    if (set_option := of_libc("mallopt")) is not None:
        set_option(_MMAP_THRESHOLD, 1 << 20)


@cache
def of_libc(name: str) -> Any | None:
    """Return a function of the C library; None where it has none of this name."""
    try:
        found: Any = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return None
    return found


def advise(begin: int, size: int, advice: int) -> None:
    """Call madvise for memory at an address; does nothing where the system has none, or refuses."""
    if (function := of_libc("madvise")) is not None:
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        function(begin, size, advice)
