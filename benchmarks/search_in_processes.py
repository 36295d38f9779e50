"""DiEP in two processes that hold the whole model, shards, or one layer at a time: peak memory of each, and the time.

python benchmarks/search_in_processes.py [--directory DIR] [--samples 16] [--sequence-length 256] [--layers 11]

DIRECTORY gets a random mixture of 810 M parameters in bfloat16, unless it exists. Peaks are reported by the system for each
process (VmHWM), including its share of the memory-mapped checkpoint. The larger of the two counts.
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
from results import markdown, save

SHAPE = {"hidden": 1024, "experts": 8, "top_k": 2, "width": 2816}
HELD = {"whole": [], "in pieces (`--shard`)": ["--shard"], "a layer (`--memory-limit 2GB`)": ["--memory-limit", "2GB"]}


def ran(command: list[str]) -> tuple[dict[str, Any], int]:
    """Return the JSON that two processes of `compress` print last, and the larger of their peaks."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--", "cli"]
    done, peak = run_watched([*start, *command], with_children=True, environment={"OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout), peak


def table(figures: dict[str, Any]) -> str:
    """Return peak and time of each way, and whether it keeps the same experts as the first."""
    rows, first = [], next(iter(figures["runs"].values()))
    for name, run in figures["runs"].items():
        kept = "" if run is first else "the same" if run["plan"] == first["plan"] else "others"
        rows.append([name, f"{run['peak_memory_bytes'] / 1e6:,.0f}", f"{run['seconds']:.0f}", kept])
    head = [f"{figures['bytes'] / 1e9:.2f} GB, two processes", "peak of each, MB", "seconds", "experts that stay"]
    return markdown(head, rows)


TABLES = {"search_in_processes": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--layers", type=int, default=11)
    arguments = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        model = arguments.directory or Path(temporary) / "model"
        if not (model / "config.json").is_file():
            write_random_model(model, shape(layers=arguments.layers, **SHAPE) | {"vocab_size": 8000})
        search = ["--method", "diep", "--epochs", "1", "--start", "zero", "--sparsity", "0.5", "--evaluation-samples", "0"]
        text = ["--data", "stdlib", "--samples", str(arguments.samples), "--sequence-length", str(arguments.sequence_length)]
        for number, (name, own) in enumerate(HELD.items()):
            output = f"{temporary}/{number}"
            figures, peak = ran(["prune", str(model), *search, *text, *own, "-o", output, "--json"])
            plan = json.loads(Path(output, "compression.json").read_text())["plan"]
            found[name] = {"peak_memory_bytes": peak, "seconds": figures["seconds"], "plan": plan}
    save("search_in_processes", {"bytes": figures["bytes_before"], "runs": found})


if __name__ == "__main__":
    main()
