"""The pages show the tables that the benchmarks wrote, word for word."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_pages_show_the_last_results() -> None:
    spec = importlib.util.spec_from_file_location("results", ROOT / "benchmarks" / "results.py")
    assert spec is not None and spec.loader is not None
    results = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(results)
    pages = [path.read_text() for path in results.PAGES]
    for page in pages:
        assert results.with_tables(page) == page, "run: python benchmarks/results.py"
    for path in results.RESULTS.glob("*.md"):
        assert any(path.read_text() in page for page in pages), f"{path.name} is on no page"
