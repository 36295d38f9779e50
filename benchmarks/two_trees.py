"""Decode, prefill and load speed of two versions of this project, measured in turn.

    git worktree add /tmp/old COMMIT
    python benchmarks/two_trees.py /tmp/old [--rounds 7] [--threads 1]

Each round runs `compress bench` once from either tree, in fresh processes and alternating order, on the demo model and on a
random mixture of 0.37 B parameters in bfloat16 and in 8 and 4 bits. A figure is the median over rounds of the ratio new to
old within a round; beside it are the smallest and the largest ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from random_model import shape, write_random_model
from results import ROOT, markdown, save

PROMPT, GENERATED, REPETITIONS = 256, 96, 3
BITS = (8, 4)


def bench(tree: Path, models: dict[str, str], threads: int, work: Path) -> dict[tuple[str, str], float]:
    """Tokens per second of prefill and decode, and seconds of loading, by model and test."""
    found: dict[tuple[str, str], float] = {}
    for name, model in models.items():
        command = [sys.executable, "-m", "cli", "bench", model, "--json", "--threads", str(threads)]
        sizes = ["-p", str(PROMPT), "-n", str(GENERATED), "-r", str(REPETITIONS)]
        environment = os.environ | {"PYTHONPATH": str(tree), "COMPRESS_KERNELS": "compiled"}
        done = subprocess.run([*command, *sizes], cwd=work, env=environment, capture_output=True, text=True, check=True)
        rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
        for row in rows:
            found[name, "prefill" if row["test"].startswith("pp") else "decode"] = row["tokens_per_second_median"]
        found[name, "load"] = 1.0 / rows[0]["load_seconds"]
    return found


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        write_random_model(work / "mixture", shape(hidden=1024, layers=8, experts=8, width=1408))
        models = {"demo": "demo", "random mixture": str(work / "mixture")}
        for bits in BITS:
            target = work / f"mixture-{bits}"
            command = [
                "quantize",
                str(work / "mixture"),
                "--bits",
                str(bits),
                "--evaluation-samples",
                "0",
                "-o",
                str(target),
            ]
            subprocess.run([sys.executable, "-m", "cli", *command], cwd=ROOT, check=True, capture_output=True)
            models[f"random mixture, {bits} bits"] = str(target)
        trees = {"old": options.old.resolve(), "new": ROOT}
        for tree in trees.values():  # compiles kernels and fills the caches of files
            bench(tree, models, options.threads, work)
        rounds = []
        for number in range(options.rounds):
            order = sorted(trees, reverse=number % 2 == 1)
            found = {name: bench(trees[name], models, options.threads, work) for name in order}
            rounds.append(found)
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
    rows, figures = [], []
    for model in models:
        for test in ("prefill", "decode", "load"):
            ratios = [found["new"][model, test] / found["old"][model, test] for found in rounds]
            old, new = (statistics.median(found[tree][model, test] for found in rounds) for tree in ("old", "new"))
            middle = statistics.median(ratios)
            unit = "s" if test == "load" else "tokens/s"
            shown = [f"{1 / each:.3f}" if test == "load" else f"{each:,.0f}" for each in (old, new)]
            rows.append([f"{model}: {test}, {unit}", *shown, f"{middle:.3f}", f"{min(ratios):.3f} to {max(ratios):.3f}"])
            figures.append({"model": model, "test": test, "old": old, "new": new, "ratios": ratios})
    table = markdown(["model and test", "old", "new", "speed of new to old", "range"], rows)
    save("two_trees", {"threads": options.threads, "rounds": options.rounds, "rows": figures}, table)


if __name__ == "__main__":
    main()
