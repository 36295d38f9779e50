"""Peak memory of calibration, pruning and evaluation of a checkpoint that is far larger than `--memory-limit`.

python benchmarks/memory_limit_prune.py [DIRECTORY] [--memory-limit 3GB] [--samples 8] [--sequence-length 256] [--layers 24]
    [--adapted]

DIRECTORY (by default a temporary one) gets a random mixture of 12 GB in bfloat16, unless it exists, and the results made
from it: 27 GB in all. Each command runs in a process of its own, whose peak is reported by the system (VmHWM). Figures of
finished commands are kept in DIRECTORY and not measured again. With --adapted the mixture is of a family that transformers
runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from memory_limit import run_watched
from random_adapted_model import adapted_shape, write_random_adapted_model
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


TABLES = {"memory_limit_prune": table, "memory_limit_adapted": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, nargs="?")
    parser.add_argument("--memory-limit", default="3GB")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--adapted", action="store_true", help="Measure a family that transformers runs.")
    parser.add_argument("--only", help="Run this command and no other that has not run.")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        run(arguments.directory or Path(temporary), arguments)


def run(directory: Path, arguments: argparse.Namespace) -> None:
    """Run every command that has not run yet, and save the figures when all have."""
    model = directory / "model"
    if not (model / "config.json").is_file():
        if arguments.adapted:  # smaller layers, of which a pass holds one whole
            sizes = {"hidden": 1024, "layers": 2 * arguments.layers, "experts": 16, "width": 2560}
            write_random_adapted_model(model, adapted_shape(**sizes))
        else:
            write_random_model(model, shape(hidden=2048, layers=arguments.layers, experts=8, width=5120))
    limit = ["--memory-limit", arguments.memory_limit]
    commands = (adapted_commands if arguments.adapted else own_commands)(directory, arguments)
    path = directory / "figures.jsonl"
    for name, command in commands.items():
        known = {line["name"] for line in remembered(path)}
        if name not in known and arguments.only in (None, name):
            remember(path, {"name": name, "limit": arguments.memory_limit} | measured([*command, *limit]))
    runs = {line["name"]: line for line in remembered(path)}
    if runs.keys() < commands.keys():
        return
    stored = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    name = "memory_limit_adapted" if arguments.adapted else "memory_limit_prune"
    save(name, {"checkpoint_bytes": stored, "limit": arguments.memory_limit, "runs": runs})


def own_commands(directory: Path, arguments: argparse.Namespace) -> dict[str, list[str]]:
    """Return what is measured of a model that our own decoder runs, by name."""
    text = _text(arguments)
    search = ["--sparsity", "0.5", "--epochs", "1", "--batch-size", str(arguments.samples // 2), "--start", "zero"]
    units = ["--method", "unit-magnitude", "--sparsity", "0.5"]
    return {
        "calibrate": _calibrate(directory, arguments),
        "prune, DiEP": _prune(directory, "pruned", ["--method", "diep", *search, *_measured_on(text)]),
        "prune, hidden units and refit": _prune(directory, "narrow", [*units, *_measured_on(text)]),
        "evaluate": ["evaluate", str(directory / "model"), *text],
        "evaluate what is left": ["evaluate", str(directory / "pruned"), *text],
    }


def adapted_commands(directory: Path, arguments: argparse.Namespace) -> dict[str, list[str]]:
    """Return what is measured of a model that transformers runs, by name."""
    text, half = _text(arguments), ["--sparsity", "0.5", "--uniform"]
    return {
        "calibrate": _calibrate(directory, arguments),
        "prune, whole experts": _prune(
            directory, "pruned", ["--granularity", "expert", "--method", "reap", *half, *_measured_on(text)]
        ),
        "prune, hidden units and refit": _prune(
            directory, "narrow", ["--method", "unit-magnitude", *half, *_measured_on(text)]
        ),
        "evaluate": ["evaluate", str(directory / "model"), *text],
        "evaluate what is left": ["evaluate", str(directory / "pruned"), *text],
    }


def _text(arguments: argparse.Namespace) -> list[str]:
    return ["--data", "stdlib", "--samples", str(arguments.samples), "--sequence-length", str(arguments.sequence_length)]


def _measured_on(text: list[str]) -> list[str]:
    return ["--evaluation-samples", "2", *text]


def _calibrate(directory: Path, arguments: argparse.Namespace) -> list[str]:
    output = str(directory / "statistics.safetensors")
    return ["calibrate", str(directory / "model"), "-o", output, "--overwrite", *_text(arguments)]


def _prune(directory: Path, output: str, options: list[str]) -> list[str]:
    return ["prune", str(directory / "model"), *options, "-o", str(directory / output), "--resume"]


if __name__ == "__main__":
    main()
