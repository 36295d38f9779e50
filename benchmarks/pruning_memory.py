"""Peak memory of one-shot pruning of a 3 GB checkpoint, from the operating system, minus that of an interpreter with
imports.

python benchmarks/pruning_memory.py [--directory DIR] [--samples 16] [--sequence-length 512] [--layers 16]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from random_model import shape, write_random_model
from results import markdown, save

BASELINE = """
import json, sys
import cli, compress.prune, transformers
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.tokenizer import load_tokenizer
from engine.generation.report import peak_memory_bytes
load_tokenizer(Checkpoint(__import__("pathlib").Path(sys.argv[1])))
print(json.dumps(peak_memory_bytes()))
"""


def last_json(command: list[str]) -> object:
    """Return the JSON that a command prints last."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def table(figures: dict[str, Any]) -> str:
    """Return the peak above the interpreter, with what was pruned."""
    rows = [
        ["checkpoint", f"{figures['bytes_before'] / 1e9:.2f} GB"],
        ["calibration", f"{figures['samples']} × {figures['sequence_length']} tokens"],
        ["interpreter with imports and tokenizer", f"{figures['baseline'] / 1e9:.2f} GB"],
        ["peak above that", f"{figures['above'] / 1e9:.2f} GB"],
        ["seconds", f"{figures['seconds']:.0f}"],
    ]
    return markdown(["frequency, 50 %", ""], rows)


TABLES = {"pruning_memory": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--layers", type=int, default=16)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        model = arguments.directory or Path(temporary) / "model"
        if not model.is_dir():
            write_random_model(model, shape(layers=arguments.layers))
        baseline = last_json([sys.executable, "-c", BASELINE, str(model)])
        command = [sys.executable, "-m", "cli", "prune", str(model), "--method", "frequency", "--sparsity", "0.5"]
        command += ["--data", "stdlib", "--samples", str(arguments.samples), "--evaluation-samples", "4", "--json"]
        command += ["--sequence-length", str(arguments.sequence_length), "-o", f"{temporary}/pruned"]
        figures = last_json(command)
    assert isinstance(figures, dict)
    assert isinstance(baseline, int)
    text = {"samples": arguments.samples, "sequence_length": arguments.sequence_length}
    peaks = {"baseline": baseline, "above": figures["peak_memory_bytes"] - baseline}
    save("pruning_memory", text | peaks | {name: value for name, value in figures.items() if name != "artifact"})


if __name__ == "__main__":
    main()
