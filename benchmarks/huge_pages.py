"""Decoding with weights in mapped files, and in huge pages of memory, in turns.

python benchmarks/huge_pages.py [--directory DIR] [--rounds 15]

The models are the random mixture of 1.5 B parameters of decode.py in 16, 8 and 4 bits. Both engines have the same files
open. The time before the first token is measured in a process of its own for each: opening the model, reading the weights
and a prompt of one token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from decode import OURS, prepare
from results import markdown, save, times

from engine import Engine
from engine.generation.options import MAPPED, MEMORY

KINDS = (MAPPED, MEMORY)
TOKENS, STARTS = 16, 3
START = """
import json, sys, time
from engine import Engine
started = time.perf_counter()
engine = Engine.open(sys.argv[1], load_mode=sys.argv[2])
engine.generate(["a"], max_new_tokens=1)
print(json.dumps(time.perf_counter() - started))
"""


def decoding(model: Path, load_mode: str) -> Callable[[], float]:
    """Return a function that decodes and returns tokens per second."""
    engine = Engine.open(model, load_mode=load_mode)
    engine.prepare()
    if engine.load_mode != load_mode:
        raise SystemExit(f"{model}: too little memory is free, or the weights are too few, to read them into huge pages")
    tokens = torch.randint(engine.checkpoint.config.vocabulary_size, (TOKENS + 1, 1, 1))

    def rate() -> float:
        cache = engine.new_cache(1, TOKENS + 1)
        with torch.inference_mode():
            engine.step(tokens[0][0], None, cache)
            started = time.perf_counter()
            for token in tokens[1:]:
                engine.step(token[0], None, cache)
        return TOKENS / (time.perf_counter() - started)

    return rate


def seconds_to_first(model: Path, kind: str) -> float:
    """Return the seconds from opening a model to its first token, in a new process."""
    done = subprocess.run([sys.executable, "-c", START, str(model), kind], capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def measure(model: Path, rounds: int) -> dict[str, Any]:
    """Return tokens per second of each kind by round, and the seconds to the first token."""
    first = {kind: [seconds_to_first(model, kind) for _ in range(STARTS)] for kind in KINDS}
    rates = {kind: decoding(model, kind) for kind in KINDS}
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(rounds + 1):
        for kind in KINDS[:: 1 if number % 2 else -1]:
            rate = rates[kind]()
            if number:  # the first round reads what is mapped
                found[kind].append(rate)
    return {"rates": found, "seconds_to_first": first}


def table(figures: dict[str, Any]) -> str:
    """Return speeds and times by model."""
    rows = []
    for name, made in figures["models"].items():
        mapped, huge = (made["rates"][kind] for kind in KINDS)
        ratio = statistics.median(b / a for a, b in zip(mapped, huge, strict=True))
        first = [f"{statistics.median(made['seconds_to_first'][kind]):.2f}" for kind in KINDS]
        speeds = [f"{statistics.median(own):.1f}" for own in (mapped, huge)]
        rows.append([name.removeprefix("ours, "), *speeds, times(ratio, huge, mapped), *first])
    header = [
        "weights",
        "tokens/s, mapped",
        "in huge pages",
        "ratio (range)",
        "s to the first token, mapped",
        "in huge pages",
    ]
    return markdown(header, rows)


TABLES = {"huge_pages": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = options.directory or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        prepare(directory, options.layers, for_peers=False)
        models = {name: measure(directory / place, options.rounds) for name, place in OURS.items()}
    save("huge_pages", {"layers": options.layers, "models": models})


if __name__ == "__main__":
    main()
