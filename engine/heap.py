"""The allocator's own memory: what was freed goes back to the system, not only weights that were mapped."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

_MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of malloc.h."""


def give_back() -> None:
    """Let the C library return freed memory; nothing where it has no such call (all but glibc).

    It keeps freed blocks below 32 MB, and a pass over layers whose experts get ever other numbers of tokens leaves holes
    between those in use: resident memory would grow from layer to layer.
    """
    if (trim := _malloc_trim()) is not None:
        trim(0)


def give_back_large() -> None:
    """From here on let it return each block from 1 MB on as soon as that is freed, at the price of new pages for the next.

    For those who hold large tensors for a moment, over and over, and have no moment of their own to call `give_back`.
    """
    try:
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 20)
    except (AttributeError, OSError, TypeError):
        return


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
