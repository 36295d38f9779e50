"""Perplexity and size of the demo model's exports in each precision, beside this engine in float32.

python benchmarks/onnx_perplexity.py [--samples 256]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from results import ROOT, markdown, save

from compress.export.formats import PRECISIONS

ENGINE = "engine, float32"


def ran(*words: str) -> dict[str, Any]:
    """Return the JSON of a command."""
    command = [sys.executable, "-m", "cli", *words, "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(figures: dict[str, Any]) -> str:
    """Return the perplexity of each precision, and how far it is from the engine's."""
    rows = figures["rows"]
    whole = rows[0]["perplexity"]
    cells = []
    for row in rows:
        beside = "" if row is rows[0] else f" ({row['perplexity'] / whole - 1:+.2%})"
        size = f"{row['bytes'] / 1e6:.1f} MB" if row["bytes"] else ""
        cells.append([row["title"], f"{row['perplexity']:.4f} ± {row['stderr']:.2f}{beside}", size])
    about = f"{figures['tokens']:,} tokens of held-out text are predicted; errors are over documents.\n\n"
    return about + markdown(["precision", "perplexity of the demo model", "weights"], cells)


TABLES = {"onnx_perplexity": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=256)
    text = ["--samples", str(parser.parse_args().samples)]
    whole = ran("evaluate", "demo", "--dtype", "float32", *text)
    rows = [{"title": ENGINE, "perplexity": whole["value"], "stderr": whole["value_stderr"], "bytes": None}]
    with tempfile.TemporaryDirectory() as scratch:
        for precision in PRECISIONS:
            made = Path(scratch) / precision
            ran("export", "demo", "--precision", precision, "-o", str(made))
            size = sum(path.stat().st_size for path in made.glob("*.onnx*"))
            found = ran("evaluate", str(made), *text)
            rows.append({"title": precision, "perplexity": found["value"], "stderr": found["value_stderr"], "bytes": size})
    save("onnx_perplexity", {"tokens": whole["tokens"], "rows": rows})


if __name__ == "__main__":
    main()
