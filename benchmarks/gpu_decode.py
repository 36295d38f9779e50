"""Decoding and prefill on an NVIDIA GPU: transformers, and ours through torch and through Triton's kernels.

python benchmarks/gpu_decode.py [--directory DIR] [--rounds 5] [--layers 16]

All contenders stay loaded and are timed in turn. Figures are medians, and ratios are of medians. The GPU's memory bandwidth
is measured in each round too, by copying 1 GB. Decoding's fraction of it is bytes of weights per token times tokens per
second.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from engine_speed import transformers_version, write_skip_tables
from random_model import shape, write_random_model
from results import NOT_POSSIBLE_HERE, markdown, save, times

from engine.bench.backends import BenchSpec
from engine.generation.generate import Engine
from engine.generation.worker import Worker
from engine.kernels.kernel_choice import KERNELS

PREFILL, DECODE = "pp 512 0", "tg 128 0"
CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "transformers": ("torch", {"backend": "transformers"}),
    "ours, torch": ("torch", {}),
    "ours, Triton": ("compiled", {}),
    "ours, Triton, skipping at 1": ("compiled", {"skip_threshold": 1.0}),
}
"""Value of the KERNELS variable, and options of the worker, for each contender."""


def memory_speed(size: int = 1 << 29) -> float:
    """Return the bytes per second that the GPU reads and writes in a copy, the best of ten."""
    source, target = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    best = float("inf")
    for _ in range(10):
        torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 2 * size / best


def kernels_serve(model: Path) -> bool:
    """Return whether Triton's kernels run the model's experts here. If not, the engine reports the reason."""
    os.environ[KERNELS] = "compiled"
    engine = Engine.open(model, device="cuda")
    served = all(block.on_gpu is not None for block in engine.decoder.moe_blocks)
    del engine
    torch.cuda.empty_cache()
    return served


def measure(model: Path, rounds: int) -> tuple[dict[str, dict[str, Any]], list[float]]:
    """Return the rates of each contender by test, with its bytes per token, and memory bandwidth in each round."""
    said: dict[str, dict[str, Any]] = {title: {PREFILL: [], DECODE: []} for title in CONTENDERS}
    speeds = []
    with ExitStack() as stack:
        workers = {}
        for title, (kernels, options) in CONTENDERS.items():
            os.environ[KERNELS] = kernels  # the worker inherits it
            workers[title] = stack.enter_context(
                Worker(BenchSpec(str(model), device="cuda", **options), "engine.bench.backends")
            )
        for number in range(rounds + 1):
            for test in (PREFILL, DECODE):
                for title, worker in workers.items():
                    answer = worker.ask(f"{'run' if number else 'warm'} {test}")
                    if number:
                        said[title][test].append(int(test.split()[1]) / answer["seconds"])
                    else:
                        said[title]["bytes_per_token"] = answer["weights_read_bytes_per_token"]
                        said[title]["skipped"] = answer["experts_skipped_share"]
            speeds.append(memory_speed())
    said["transformers"]["bytes_per_token"] = said["ours, torch"]["bytes_per_token"]
    return said, speeds


def table(figures: dict[str, Any]) -> str:
    """Return tokens per second of each contender, with the ratio to transformers."""
    said, speed = figures["contenders"], statistics.median(figures["memory_bytes_per_second"])
    medians = {title: {test: statistics.median(own[test]) for test in (PREFILL, DECODE)} for title, own in said.items()}
    peer, made = said["transformers"], []
    for title, own in said.items():
        cells = [title + (f" ({own['skipped']:.0%} skipped)" if own["skipped"] else "")]
        for test in (PREFILL, DECODE):
            ratio = medians[title][test] / medians["transformers"][test]
            cells += [f"{medians[title][test]:.0f}", "" if own is peer else times(ratio, own[test], peer[test])]
        made.append([*cells, f"{own['bytes_per_token'] * medians[title][DECODE] / speed:.0%}"])
    header = [figures["card"], "prefill 512 t/s", "by transformers", "decode 128 t/s", "by transformers"]
    return markdown([*header, "share of memory bandwidth"], made)


TABLES = {"gpu_decode": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, help="where the model is made, and found again")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=16)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch finds no GPU here; benchmarks/decode.py measures the processor", file=sys.stderr)
        sys.exit(NOT_POSSIBLE_HERE)
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.directory or Path(temporary)
        model = directory / "bf16"
        if not model.is_dir():
            directory.mkdir(parents=True, exist_ok=True)
            write_random_model(model, shape(layers=arguments.layers))
            write_skip_tables(model)
        if not kernels_serve(model):
            sys.exit("Triton's kernels do not run this model's experts here, so there is nothing to compare")
        said, speeds = measure(model, arguments.rounds)
    figures = {"card": torch.cuda.get_device_name(), "memory_bytes_per_second": speeds, "contenders": said}
    save("gpu_decode", figures, transformers_version())


if __name__ == "__main__":
    main()
