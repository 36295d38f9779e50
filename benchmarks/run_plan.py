"""Estimates of `compress plan-run` against measured runs, for models of three sizes.

python benchmarks/run_plan.py [--sizes 60,210,810] [--methods frequency,naee,diep]

Every run is a process of its own. Its wall time is from its start to its end, and its peak is reported by the operating
system. Measurements are saved, so that sizes can be measured one by one. The table shows all of them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from random_model import shape, write_random_model
from results import RESULTS, markdown, remember, remembered, save

SHAPES = {
    60: {"hidden": 512, "layers": 4, "experts": 8, "top_k": 2, "width": 1024},
    210: {"hidden": 768, "layers": 5, "experts": 16, "top_k": 4, "width": 1024},
    810: {"hidden": 1024, "layers": 11, "experts": 8, "top_k": 2, "width": 2816},
}
"""Shapes by millions of parameters."""
VOCABULARY = 8000
OPTIONS = ["--sparsity", "0.5", "--samples", "16", "--sequence-length", "256", "--evaluation-samples", "4", "--epochs", "1"]
MEMORY = RESULTS / "run_plan.jsonl"


def ran(command: list[str]) -> tuple[dict[str, Any], float]:
    """Return the JSON object of a command, and its wall time."""
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "cli", *command, "--json"], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout), time.perf_counter() - started


def measure(size: int, methods: list[str]) -> None:
    """Plan and run each method on a model of this size."""
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary) / "model"
        write_random_model(model, shape(**SHAPES[size]) | {"vocab_size": VOCABULARY})
        for method in methods:
            options = [str(model), "--method", method, *OPTIONS]
            plan, _ = ran(["plan-run", *options])
            output = ["--data", "stdlib", "-o", str(Path(temporary) / "pruned"), "--overwrite"]
            figures, seconds = ran(["prune", *options, *output])
            measured = {"seconds": seconds, "peak_memory_bytes": figures["peak_memory_bytes"]}
            del plan["model"]  # the place of the temporary model
            remember(MEMORY, {"size": size, "method": method, "measured": measured, "plan": plan})


def table(figures: dict[str, Any]) -> str:
    """Return planned and measured time and peak of each run, and how far the plan was off."""
    rows = []
    for line in figures["runs"]:
        plan, measured = line["plan"], line["measured"]
        seconds, peak = (plan[key] / measured[key] for key in ("seconds", "peak_memory_bytes"))
        rows.append(
            [
                f"{line['size']} M parameters, {line['method']}",
                *(f"{each['seconds']:.1f}" for each in (plan, measured)),
                f"{seconds - 1:+.0%}",
                *(f"{each['peak_memory_bytes'] / 1e6:,.0f}" for each in (plan, measured)),
                f"{peak - 1:+.0%}",
            ]
        )
    head = ["", "planned s", "measured s", "off", "planned peak, MB", "measured peak, MB", "off"]
    return markdown(head, rows)


def quoted(figures: dict[str, Any]) -> dict[str, str]:
    """Return the largest error of planned times and of planned peaks."""

    def farthest(key: str) -> str:
        return f"{max(abs(line['plan'][key] / line['measured'][key] - 1) for line in figures['runs']) * 100:.0f} %"

    return {"seconds_off": farthest("seconds"), "memory_off": farthest("peak_memory_bytes")}


TABLES = {"run_plan": table}
IN_TEXT = {"run_plan": quoted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default=",".join(map(str, SHAPES)))
    parser.add_argument("--methods", default="frequency,naee,diep")
    arguments = parser.parse_args()
    for size in filter(None, arguments.sizes.split(",")):
        measure(int(size), arguments.methods.split(","))
    latest = {(line["size"], line["method"]): line for line in remembered(MEMORY)}
    save("run_plan", {"options": OPTIONS, "runs": [latest[key] for key in sorted(latest)]})


if __name__ == "__main__":
    main()
