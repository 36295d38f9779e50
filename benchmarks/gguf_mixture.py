"""A trained mixture as GGUF files, whole and pruned, in this engine and in llama.cpp: perplexity of the same text.

pip install llama-cpp-python
python benchmarks/gguf_mixture.py MODEL --data TEXT --text FILE [--peer-python PYTHON] [--windows 20] [--samples 64]

MODEL is a directory, such as examples/real_mixture.py and training make. Pruning is calibrated on TEXT, and perplexity is
that of FILE, in windows of 512 tokens without overlap; errors are over windows, and ratios are paired by window. Files are
made by `compress prune` and `compress export`. Both programs read them as they do by default; ours reads windows as prompts,
and token by token as in decoding. llama.cpp may be installed for another Python.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gguf_smollm2 import PEER, WINDOW, WORKERS, Contender, compared, with_error
from results import NOT_POSSIBLE_HERE, ROOT, markdown, require, save

from compress.report.columns import with_interval

PRUNED = {
    "whole": (),
    "a quarter of the experts removed": ("--method", "fisher", "--granularity", "expert"),
    "a quarter of the units removed": ("--method", "unit-fisher"),
}
"""Options of `compress prune` by the name of a row; none for the model itself."""
QUARTER = ("--sparsity", "0.25", "--uniform", "--evaluation-samples", "0")
TYPES = {"whole": ("bf16", "q8_0", "q4_0")}
"""Types that a row's model is written in, where it is not bf16 alone."""


def table(figures: dict[str, Any]) -> str:
    """Return a row for each file."""
    rows = [
        [
            row["title"],
            row["type"],
            f"{row['bytes'] / 1e6:.0f}",
            f"{with_error(row['ours'])} ({row['ours']['perplexity_decoding']:.2f})",
            with_error(row[PEER]),
            with_interval(*(row[f"perplexity_ratio{end}"] for end in ("", "_low", "_high")), digits=4),
        ]
        for row in figures["rows"]
    ]
    return markdown(["model", "type", "MB", "this engine (decoding)", PEER, "ratio, 95 %"], rows)


def in_text(figures: dict[str, Any]) -> dict[str, str]:
    """Return the largest difference of the two programs over all files."""
    return {"most": f"{max(abs(row['perplexity_ratio'] - 1) for row in figures['rows']):.2%}"}


TABLES = {"gguf_mixture": table}
IN_TEXT = {"gguf_mixture": in_text}


def compress(*words: str) -> None:
    """Run a command of this package in a process of its own."""
    subprocess.run([sys.executable, "-m", "cli", *words], cwd=ROOT, check=True, stdout=sys.stderr)


def read_by_both(file: Path, arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what both programs say of a file, and what is known of llama.cpp."""
    found: dict[str, Any] = {"bytes": file.stat().st_size}
    about = {}
    for kind in WORKERS:
        reader = Contender(kind, arguments, file, arguments.windows)
        found[kind] = reader.ask("perplexity")
        if kind == PEER:
            about = reader.ask("about")
        reader.end()
    tokens = [found[kind].pop("tokens") for kind in WORKERS]
    assert tokens[0] == tokens[1], "the programs read other tokens"
    return found | compared({kind: found[kind] for kind in WORKERS}), about


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="directory of a trained mixture")
    parser.add_argument("--data", type=Path, help="text for calibration")
    parser.add_argument("--text", type=Path, help="text file whose perplexity is measured")
    parser.add_argument("--peer-python", default=sys.executable, help="Python that has llama-cpp-python")
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--samples", type=int, default=64, help="calibration sequences of 256 tokens")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    if None in (arguments.model, arguments.data, arguments.text):
        print("needs a model, --data and --text", file=sys.stderr)
        sys.exit(NOT_POSSIBLE_HERE)
    if arguments.peer_python == sys.executable:
        require("llama_cpp")
    rows, about = [], dict[str, Any]()
    text = ("--data", str(arguments.data.resolve()), "--samples", str(arguments.samples), "--sequence-length", "256")
    with tempfile.TemporaryDirectory() as place:
        for title, words in PRUNED.items():
            model, file = arguments.model.resolve(), Path(place) / "model.gguf"
            if words:
                model = Path(place) / title.replace(" ", "-")
                compress("prune", str(arguments.model.resolve()), *words, *QUARTER, *text, "-o", str(model))
            for kind in TYPES.get(title, ("bf16",)):
                compress("export", str(model), "--format", "gguf", "--type", kind, "-o", str(file), "--overwrite")
                found, about = read_by_both(file, arguments)
                rows.append({"title": title, "type": kind} | found)
    figures = {"text": arguments.text.name, "windows": arguments.windows, "window": WINDOW, "samples": arguments.samples}
    save("gguf_mixture", figures | {"rows": rows}, {PEER: {"package": "llama-cpp-python", **about}})


if __name__ == "__main__":
    main()
