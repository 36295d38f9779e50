"""The number of sequences up to which the compiled kernels decode faster than torch, which groups tokens by expert.

python benchmarks/decode_batches.py [--directory DIR] [--rounds 7]

The benchmark measures one step of a random mixture (8 experts, 2 chosen, hidden 1024, width 3584, 4 layers: more than caches
hold) in bfloat16. Both ways run in turn in one process, and figures are medians. The engine uses the kernels up to
`COMPILED_MAX_ROWS` sequences (`engine/kernels/kernel_choice.py`).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from random_model import shape, write_random_model
from results import markdown, save, times

from engine.decoder.model import Decoder
from engine.generation.generate import Engine
from engine.kernels.kernel_choice import COMPILED_MAX_ROWS, DECODING, TORCH, KernelChoice, prepare_decoding

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
STEPS = 4


def step_seconds(model: Engine, batch: int, choice: KernelChoice) -> float:
    """Return the seconds of a step that decodes one more token of each sequence."""
    tokens = torch.randint(model.checkpoint.config.vocabulary_size, (batch, STEPS + 1))
    cache, decoder = model.new_cache(batch, STEPS + 1), model.decoder
    assert isinstance(decoder, Decoder)
    with torch.inference_mode():
        decoder.last_logits(tokens[:, :1], None, cache, choice)
        started = time.perf_counter()
        for step in range(1, STEPS + 1):
            decoder.last_logits(tokens[:, step : step + 1], None, cache, choice)
    return (time.perf_counter() - started) / STEPS


def measure(directory: Path, rounds: int, batches: Sequence[int], layers: int) -> list[dict[str, Any]]:
    """Return the seconds of a step in both ways, for each number of sequences."""
    if not (directory / "model").is_dir():
        write_random_model(directory / "model", shape(layers=layers))
    model = Engine.open(directory / "model")
    prepare_decoding(torch.bfloat16, torch.device("cpu"))
    compiled_only = replace(DECODING, max_few_rows=max(batches))
    rows = []
    for batch in batches:
        torch.manual_seed(batch)
        pairs = [(step_seconds(model, batch, compiled_only), step_seconds(model, batch, TORCH)) for _ in range(rounds + 1)]
        compiled, torchs = (list(seconds) for seconds in zip(*pairs[1:], strict=True))
        row = {"compiled_seconds": statistics.median(compiled), "torch_seconds": statistics.median(torchs)}
        rows.append({"sequences": batch} | row | {"compiled_rounds": compiled, "torch_rounds": torchs})
    return rows


def table(figures: dict[str, Any]) -> str:
    """Return milliseconds of a step in both ways, and the ratio."""
    rows = []
    for row in figures["rows"]:
        compiled, torchs = row["compiled_seconds"], row["torch_seconds"]
        faster = times(torchs / compiled, row.get("torch_rounds", ()), row.get("compiled_rounds", ()))
        rows.append([f"{row['sequences']}", f"{compiled * 1e3:.1f}", f"{torchs * 1e3:.1f}", faster])
    return markdown(["sequences", "compiled, ms", "torch, ms", "speed-up"], rows)


TABLES = {"decode_batches": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, help="where the model is made, and found again")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=BATCHES)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rows = measure(options.directory or Path(scratch), options.rounds, options.batches, options.layers)
    save("decode_batches", {"rounds": options.rounds, "compiled_max_rows": COMPILED_MAX_ROWS, "rows": rows})


if __name__ == "__main__":
    main()
