"""Peak memory of calibration, pruning and evaluation of a checkpoint that is far larger than `--memory-limit`.

python benchmarks/memory_limit_prune.py [DIRECTORY] [--memory-limit 3GB] [--samples 8] [--sequence-length 256] [--layers 24]

DIRECTORY (by default a temporary one) gets a random mixture of 12 GB in bfloat16, unless it exists, and the results made
from it: 27 GB in all. Each command runs in a process of its own, whose peak is reported by the system (VmHWM). Figures of
finished commands are kept in DIRECTORY and not measured again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from memory_limit import run_watched
from random_model import shape, write_random_model
from results import markdown, remember, remembered, save


def measured(command: list[str]) -> dict[str, Any]:
    """Return the JSON that a command prints last, with the peak of its process's resident memory."""
    done, peak = run_watched([sys.executable, "-m", "cli", *command, "--json"])
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    said = {key: value for key, value in json.loads(done.stdout).items() if key not in ("artifact", "statistics")}
    return said | {"resident_peak_bytes": peak}


def table(figures: dict[str, Any]) -> str:
    """Return the peak of each command's resident memory, and its time."""
    runs = figures["runs"].items()
    rows = [
        ["checkpoint", f"{figures['checkpoint_bytes'] / 1e9:.2f} GB", ""],
        ["limit", figures["limit"].replace("GB", " GB"), ""],
        *([name, f"{line['resident_peak_bytes'] / 1e9:.2f} GB", f"{line['seconds']:.0f}"] for name, line in runs),
    ]
    return markdown(["", "size, or peak of resident memory", "seconds"], rows)


TABLES = {"memory_limit_prune": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, nargs="?")
    parser.add_argument("--memory-limit", default="3GB")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--only", help="Run this command and no other that has not run.")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        run(arguments.directory or Path(temporary), arguments)


def run(directory: Path, arguments: argparse.Namespace) -> None:
    """Run every command that has not run yet, and save the figures when all have."""
    model, pruned = directory / "model", directory / "pruned"
    if not (model / "config.json").is_file():
        write_random_model(model, shape(hidden=2048, layers=arguments.layers, experts=8, width=5120))
    limit = ["--memory-limit", arguments.memory_limit]
    text = ["--data", "stdlib", "--samples", str(arguments.samples), "--sequence-length", str(arguments.sequence_length)]
    search = ["--sparsity", "0.5", "--epochs", "1", "--batch-size", str(arguments.samples // 2), "--start", "zero"]
    commands = {
        "calibrate": [
            "calibrate",
            str(model),
            "-o",
            str(directory / "statistics.safetensors"),
            "--overwrite",
            *text,
        ],
        "prune, DiEP": [
            *("prune", str(model), "--method", "diep", *search, "--evaluation-samples", "2", *text),
            *("-o", str(pruned), "--resume"),
        ],
        "prune, hidden units and refit": [
            *("prune", str(model), "--method", "unit-magnitude", "--sparsity", "0.5", "--evaluation-samples", "2", *text),
            *("-o", str(directory / "narrow"), "--resume"),
        ],
        "evaluate": ["evaluate", str(model), *text],
        "evaluate what is left": ["evaluate", str(pruned), *text],
    }
    path = directory / "figures.jsonl"
    for name, command in commands.items():
        known = {line["name"] for line in remembered(path)}
        if name not in known and arguments.only in (None, name):
            remember(path, {"name": name, "limit": arguments.memory_limit} | measured([*command, *limit]))
    runs = {line["name"]: line for line in remembered(path)}
    if runs.keys() < commands.keys():
        return
    stored = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    save("memory_limit_prune", {"checkpoint_bytes": stored, "limit": arguments.memory_limit, "runs": runs})


if __name__ == "__main__":
    main()
