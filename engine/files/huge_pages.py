"""Huge pages of memory, where the system gives them.

A processor looks up where each page of memory lies, and remembers some thousand pages. Usual pages have 4 kB, and huge ones
2 MB. Where a step reads much more memory than the remembered pages hold, it waits for lookups, longest in virtual machines,
which look up twice.
"""

from __future__ import annotations

import mmap
from functools import cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
"""Where Linux says which huge pages it gives."""
_LEAST_PAGES = 4
"""Huge pages that the last two dimensions of a tensor fill at least. Such a part may be used from its beginning on, and it
then takes whole pages."""


@cache
def huge_page_bytes(settings: Path = SETTINGS) -> int:
    """Return the size of the huge pages that the system gives where a process asks for them; 0 for none."""
    try:
        is_never = "[never]" in (settings / "enabled").read_text()
        return 0 if is_never or not hasattr(mmap, "MADV_HUGEPAGE") else int((settings / "hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return 0


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return `torch.zeros`, in huge pages if its last two dimensions are large and it is in main memory.

    Pages that nobody has used take no memory.
    """
    import torch  # here: files are read without it

    size, page = prod(shape) * dtype.itemsize, huge_page_bytes()
    is_small = not page or prod(shape[-2:]) * dtype.itemsize < _LEAST_PAGES * page
    if is_small or torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, size + page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # torch says best that there is no memory
        return torch.zeros(shape, dtype=dtype)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % page
    return whole[begin : begin + size].view(dtype).view(shape)
