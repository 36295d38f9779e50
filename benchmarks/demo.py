"""The demonstration in the README: the built-in model pruned, measured and run, and a picture of size against perplexity.

    python benchmarks/demo.py [--samples N]

Runs the two commands that the README shows, then makes a few variants of the built-in model and compares them. Writes
benchmarks/results/demo.json (the commands with their output, and the figures of the comparison) and demo.png, which is the
picture that `compress compare` draws. Takes about five minutes of one core. `--samples` is for a trial with less text.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from results import RESULTS, ROOT, save

SHOWN = (
    "compress prune --sparsity 0.5 -o demo-pruned",
    'compress generate ./demo-pruned -p "class Stack:" -n 24 --temperature 0',
)
VARIANTS = {
    "25 % pruned": "prune --sparsity 0.25",
    "50 % pruned": "prune --sparsity 0.5",
    "75 % pruned": "prune --sparsity 0.75",
    "50 % pruned, one width": "prune --sparsity 0.5 --uniform",
    "50 % of the experts": "prune --sparsity 0.5 --granularity expert",
    "50 % of the experts, at random": "prune --sparsity 0.5 --method random",
    "4 bits": "quantize demo --bits 4",
    "50 % pruned, 4 bits": "prune --sparsity 0.5 --bits 4",
}
PICTURE = RESULTS / "demo.png"


def compress(arguments: str, place: Path) -> str:
    """Return the standard output of `compress ARGUMENTS` in a directory. Raises CalledProcessError if the command fails."""
    command = f"{shlex.quote(sys.executable)} -m cli {arguments}"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run(["bash", "-c", command], cwd=place, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return ran.stdout


def transcript(place: Path, options: str) -> list[str]:
    """Return the lines of the shown commands with their output."""
    lines: list[str] = []
    for command in SHOWN:
        added = options if command.startswith("compress prune") else ""
        output = compress(command.removeprefix("compress ") + added, place)
        lines += [f"$ {command}", *output.rstrip().splitlines()]
    return lines


def table(figures: dict[str, Any]) -> str:
    """Return the transcript as a fenced block."""
    return "\n".join(["```console", *figures["transcript"], "```"]) + "\n"


TABLES = {"demo": table}


def comparison(place: Path, options: str) -> list[dict[str, object]]:
    """Return the figures of the full model and all variants, and move the picture to its place."""
    for name, arguments in VARIANTS.items():
        compress(f"{arguments} -o {shlex.quote(name)}{options}", place)
    names = " ".join(shlex.quote(f"./{name}") for name in VARIANTS)
    compress(f"compare demo {names} -r 1 -o report", place)
    shutil.copyfile(place / "report" / "quality_and_size.png", PICTURE)
    return json.loads((place / "report" / "comparison.json").read_text(encoding="utf-8"))["rows"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, help="sequences of calibration and held-out text, for a trial")
    samples = parser.parse_args().samples
    options = f" --samples {samples} --evaluation-samples {samples}" if samples else ""
    with tempfile.TemporaryDirectory() as directory:
        shown = transcript(Path(directory), options)
        save("demo", {"transcript": shown, "rows": comparison(Path(directory), options)})


if __name__ == "__main__":
    main()
