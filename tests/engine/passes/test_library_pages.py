"""Code that ran once leaves resident memory, and comes back where it runs again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.passes import library_pages
from engine.passes.library_pages import code_ranges, release_library_pages
from engine.passes.memory_budget import resident_memory_bytes

MAPPINGS = """\
7f0000000000-7f0000002000 r-xp 00001000 fe:00 7 /usr/lib/libm.so.6
Rss:                   8 kB
Anonymous:             0 kB
7f0000002000-7f0000003000 r--p 00003000 fe:00 7 /usr/lib/libm.so.6
Anonymous:             0 kB
7f0000004000-7f0000005000 r-xp 00001000 fe:00 8 /usr/lib/changed.so
Anonymous:             4 kB
7f0000005000-7f0000006000 r-xp 00000000 00:00 0
Anonymous:             0 kB
7f0000006000-7f0000007000 rwxp 00001000 fe:00 9 /usr/lib/writable.so
Anonymous:             0 kB
7f0000007000-7f0000009000 r-xp 00001000 fe:00 9 /usr/lib/with a space.so
Anonymous:             0 kB
"""


def test_only_unchanged_code_of_files_is_chosen() -> None:
    assert list(code_ranges(MAPPINGS.splitlines())) == [
        (0x7F0000000000, 0x7F0000002000),
        (0x7F0000007000, 0x7F0000009000),
    ]


def test_resident_memory_shrinks_and_code_goes_on_running() -> None:
    values = torch.arange(64.0).reshape(8, 8)
    expected = values @ values
    before = resident_memory_bytes()
    release_library_pages()
    assert before - resident_memory_bytes() > 10 << 20
    assert torch.equal(values @ values, expected)


def test_a_system_that_does_not_tell_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library_pages, "_MAPS", tmp_path / "smaps")
    release_library_pages()
