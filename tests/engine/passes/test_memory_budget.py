"""Memory that is free: of the machine, and within the limit of a container."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from engine.passes.memory_budget import free_memory_bytes


@pytest.mark.parametrize(("limit", "expected"), [("max", 900), ("1000", 700), ("200", 0), ("5000", 900)])
def test_a_container_leaves_what_its_limit_leaves(
    limit: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """400 bytes are used, and 100 of them are pages of files that nothing reads any more."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 900}))
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("400\n")
    (tmp_path / "memory.stat").write_text("anon 250\ninactive_file 100\n")
    assert free_memory_bytes(tmp_path) == expected
    assert free_memory_bytes(tmp_path / "nothing") == 900
