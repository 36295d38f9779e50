"""Reading prompts of 512, 4,096 and 16,384 tokens: this engine, the same with torch's attention, and transformers.

    python benchmarks/prompt_lengths.py [--layers 4] [--rounds 3] [--lengths 512,4096,16384]

The models are those of long_context.py: random mixtures of grouped queries and of latent vectors, in bfloat16. All ways stay
loaded and take turns in each round. transformers computes attention by its own choice, torch's
`scaled_dot_product_attention`, and experts by `grouped_mm`, its fastest implementation for prompts (benchmarks/decode.py).
It reads a prompt in one pass, which took more than 21 GB at 16,384 tokens, so it does not read that one. Where torch attends
for this engine, everything else stays as it is.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from engine_speed import transformers_version
from long_context import configs
from random_model import write_random_model
from results import markdown, save, times

from engine.bench.backends import BenchCase, BenchSpec, TorchBackend, TransformersBackend, run_case
from engine.kernels.kernel_choice import KernelChoice

LENGTHS = (512, 4096, 16384)
MOST_OF_TRANSFORMERS = 4096
WAYS = OURS, TORCH, TRANSFORMERS = "ours", "ours, torch's attention", "transformers"


@contextmanager
def torch_attention() -> Iterator[None]:
    """Let torch attend for prompts."""
    with patch.object(KernelChoice, "for_attention", lambda *_: None):
        yield


def rate(backend: Any, length: int) -> float:
    """Return tokens per second of a prompt."""
    tokens_1L = torch.randint(32000, (1, length), generator=torch.Generator().manual_seed(0))
    return length / run_case(backend, BenchCase("pp", length), tokens_1L)


def measured(model: Path, options: argparse.Namespace) -> dict[int, dict[str, list[float]]]:
    """Return tokens per second of each way in each round, by the prompt's length."""
    ours = TorchBackend(BenchSpec(str(model)))
    peer = TransformersBackend(BenchSpec(str(model), "transformers", experts_implementation="grouped_mm"))
    found: dict[int, dict[str, list[float]]] = {n: {name: [] for name in WAYS} for n in options.lengths}
    for backend in (ours, peer):
        rate(backend, options.lengths[0])
    for number in range(options.rounds):
        for length, rates in found.items():
            for name in WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]:
                if name != TRANSFORMERS or length <= MOST_OF_TRANSFORMERS:
                    with torch_attention() if name == TORCH else nullcontext():
                        rates[name].append(rate(peer if name == TRANSFORMERS else ours, length))
    return found


def table(figures: dict[str, Any]) -> str:
    """Return tokens per second of ours at each length, and the ratios to the other ways."""
    rows = []
    for kind, lengths in figures["kinds"].items():
        for length, rates in lengths.items():
            ours, cells = rates[OURS], [kind, f"{int(length):,}", f"{statistics.median(rates[OURS]):,.0f}"]
            for name in (TORCH, TRANSFORMERS):
                if other := rates[name]:
                    ratio = statistics.median(a / b for a, b in zip(ours, other, strict=True))
                    cells += [f"{statistics.median(other):,.0f}", times(ratio, ours, other)]
                else:
                    cells += ["–", "–"]
            rows.append(cells)
    header = ["attention to", "tokens of the prompt", "ours: tokens/s"]
    for name in ("with torch's attention", TRANSFORMERS):
        header += [f"{name}: tokens/s", "speed-up of ours (range)"]
    return markdown(header, rows)


TABLES = {"prompt_lengths": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lengths", type=lambda text: [int(part) for part in text.split(",")], default=LENGTHS)
    options = parser.parse_args()
    kinds = {}
    with tempfile.TemporaryDirectory() as scratch:
        for kind, config in configs(options.layers).items():
            model = Path(scratch) / kind
            write_random_model(model, config)
            kinds[kind] = measured(model, options)
    save("prompt_lengths", {"layers": options.layers, "kinds": kinds}, transformers_version())


if __name__ == "__main__":
    main()
