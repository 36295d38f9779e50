"""The documents show the tables that the benchmarks wrote, word for word."""

from __future__ import annotations

import importlib.util
import re
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


def test_ratios_in_the_readme_are_those_of_the_tables() -> None:
    speed = (ROOT / "benchmarks" / "results" / "engine_speed.md").read_text()
    ratios = re.findall(r"(\d+\.\d\d) times", (ROOT / "README.md").read_text())
    assert ratios and all(f"({ratio}×)" in speed for ratio in ratios)
