"""Tensors in huge pages: they are zeros like any others, and take memory only where they were used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.files import huge_pages
from engine.files.huge_pages import huge_page_bytes, zeros
from engine.passes.memory_budget import resident_memory_bytes

PAGE = huge_page_bytes()
needs_huge_pages = pytest.mark.skipif(not PAGE, reason="the system gives no huge pages")


@pytest.mark.parametrize(
    ("enabled", "size", "expected"),
    [
        ("always [madvise] never", "2097152\n", 2 << 20),
        ("[always] madvise never", "2097152\n", 2 << 20),
        ("always madvise [never]", "2097152\n", 0),
        ("always [madvise] never", None, 0),
        (None, "2097152\n", 0),
    ],
)
@needs_huge_pages
def test_the_system_says_what_it_gives(tmp_path: Path, enabled: str | None, size: str | None, expected: int) -> None:
    for name, text in (("enabled", enabled), ("hpage_pmd_size", size)):
        if text is not None:
            (tmp_path / name).write_text(text)
    assert huge_page_bytes(tmp_path) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float32])
@pytest.mark.parametrize("shape", [(3, 5), (3, 11, 1 << 20)])
def test_they_are_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    made = zeros(shape, dtype)
    assert made.shape == shape and made.dtype == dtype and made.is_contiguous() and not made.any()
    made[-1, -1] = 3
    assert float(made.sum(dtype=torch.float32)) == 3 * made[-1, -1].numel()


@needs_huge_pages
def test_large_ones_begin_with_a_page_and_take_no_memory_before_their_use() -> None:
    before = resident_memory_bytes()
    made = zeros((64 * PAGE,), torch.int8)
    assert made.data_ptr() % PAGE == 0
    assert resident_memory_bytes() - before < 4 * PAGE
    made[5 * PAGE : 7 * PAGE] = 1
    assert resident_memory_bytes() - before < 8 * PAGE
    del made
    assert resident_memory_bytes() - before < 4 * PAGE


def test_a_system_without_huge_pages_gives_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "huge_page_bytes", lambda: 0)
    monkeypatch.delattr(huge_pages.mmap, "mmap")
    assert not zeros((32 << 20,), torch.int8).any()


@needs_huge_pages
def test_small_parts_have_no_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group of a large cache would take a huge page for its first position."""
    monkeypatch.delattr(huge_pages.mmap, "mmap")
    assert not zeros((64, PAGE // 64, 64), torch.int8).any()
