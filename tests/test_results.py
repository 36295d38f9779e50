"""The README shows the tables that the benchmarks wrote, word for word."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_readme_shows_the_last_results() -> None:
    spec = importlib.util.spec_from_file_location("results", ROOT / "benchmarks" / "results.py")
    assert spec is not None and spec.loader is not None
    results = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(results)
    readme = (ROOT / "README.md").read_text()
    assert results.with_tables(readme) == readme, "run: python benchmarks/results.py"
    for path in results.RESULTS.glob("*.md"):
        assert path.read_text() in readme, f"{path.name} is not in the README"
