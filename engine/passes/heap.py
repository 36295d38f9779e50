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
    if (trim := _of_libc("malloc_trim")) is not None:
        trim(0)


def give_back_large() -> None:
    """From here on let it return each block from 1 MB on as soon as that is freed, at the price of new pages for the next.

    For those who hold large tensors for a moment, over and over, and have no moment of their own to call `give_back`.
    """
    if (set_option := _of_libc("mallopt")) is not None:
        set_option(_MMAP_THRESHOLD, 1 << 20)


@cache
def _of_libc(name: str) -> Callable[..., int] | None:
    try:
        found: Callable[..., int] = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return None
    return found
