"""Where benchmark results are kept, and how they get into the pages: `python benchmarks/results.py` copies every table.

Each benchmark writes benchmarks/results/NAME.json (all figures, with the machine) and NAME.md (the table). A page shows
NAME.md between `<!-- NAME -->` and `<!-- /NAME -->`; a test checks that the two are equal.
"""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md")))


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with the first column aligned left and the others right."""
    lines = ["| " + " | ".join(header) + " |", "| --- |" + " ---: |" * (len(header) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def save(name: str, figures: Any, table: str) -> None:
    """Write both files and print the table."""
    import torch

    RESULTS.mkdir(exist_ok=True)
    machine = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    (RESULTS / f"{name}.json").write_text(json.dumps({"machine": machine, "figures": figures}, indent=1) + "\n")
    (RESULTS / f"{name}.md").write_text(table)
    print(table)


def remembered(path: Path) -> list[dict[str, Any]]:
    """Return the lines of an interrupted run's file, one JSON object each, without a last line that was cut off."""
    lines = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError):
            lines.append(json.loads(line))
    return lines


def remember(path: Path, line: dict[str, Any]) -> None:
    """Append a line to that file."""
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def mean_and_spread(found: Sequence[float]) -> str:
    """Return mean ± standard deviation over seeds."""
    if not found:
        return "–"
    spread = f" ± {statistics.stdev(found):.2f}" if len(found) > 1 else ""
    return f"{statistics.mean(found):z.2f}{spread}"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def with_tables(page: str) -> str:
    """Return a page's text with every marked table as the last benchmark wrote it."""
    for path in sorted(RESULTS.glob("*.md")):
        marked = re.compile(rf"(<!-- {path.stem} -->\n).*?(<!-- /{path.stem} -->)", re.DOTALL)
        table = path.read_text()
        page = marked.sub(lambda match, table=table: f"{match[1]}\n{table}\n{match[2]}", page)
    return page


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(with_tables(path.read_text()))
