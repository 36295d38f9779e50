"""Speed and memory of the engine on models of over 1 B random parameters: against transformers, pruned, and skipping.

python benchmarks/engine_speed.py [--directory DIR] [--repetitions 5]

All rows of a table come from one run of interleaved rounds. Ratios are of medians. Random experts are as similar as experts
can be and their router is undecided, so quality has no meaning here, but speed and memory have.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from random_model import shape, write_random_model
from results import markdown, save

from calibrate.collect import collect
from calibrate.skipping import skip_tables
from compress.plans.apply import apply
from compress.plans.plan import pruning_plan
from engine.bench.backends import BenchSpec
from engine.bench.side_by_side import bench, cases_for
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.skip_table_file import FILE_NAME

MODELS: dict[str, dict[str, Any]] = {
    "8 experts top-2": shape(),
    "16 experts top-4": shape(experts=16, top_k=4, width=1792),
}


def prepare(directory: Path) -> None:
    """Make each model, half of it, and the skip tables of both, if they do not exist yet."""
    for name, config in MODELS.items():
        full, half = directory / name, directory / f"{name} pruned"
        if not full.is_dir():
            write_random_model(full, config)
            write_skip_tables(full)
        if not half.is_dir():
            checkpoint = Checkpoint(full)
            kept = {layer: range(config["num_local_experts"] // 2) for layer in checkpoint.config.moe_layers}
            half.mkdir()
            apply(pruning_plan(kept), checkpoint, half)
            write_skip_tables(half)


def write_skip_tables(directory: Path) -> None:
    """Write γ tables from 1,024 random tokens."""
    checkpoint = Checkpoint(directory)
    tokens = torch.randint(checkpoint.config.vocabulary_size, (4, 256), generator=torch.Generator().manual_seed(0))
    statistics = collect(checkpoint, tokens, dtype=checkpoint.model_dtype)
    skip_tables(statistics).save(directory / FILE_NAME)


def specs(directory: Path) -> list[tuple[str, BenchSpec]]:
    """Return row titles and their specs. The first spec of each model is the reference of the others."""
    rows = []
    for name in MODELS:
        full, half = str(directory / name), str(directory / f"{name} pruned")
        rows += [
            (f"{name}, transformers", BenchSpec(full, "transformers")),
            (f"{name}, ours", BenchSpec(full)),
            (f"{name}, ours, skipping", BenchSpec(full, skip_threshold=1.0)),
            (f"{name}, half the experts, ours", BenchSpec(half)),
            (f"{name}, half the experts, ours, skipping", BenchSpec(half, skip_threshold=1.0)),
        ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, help="where the models are made, and found again")
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.directory or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        prepare(directory)
        titled = specs(directory)
        rows: list[dict[str, Any]] = []
        for name in MODELS:  # one model at a time, because the workers of one run are all in memory
            chosen = [(title, spec) for title, spec in titled if title.startswith(name)]
            measured = bench([spec for _, spec in chosen], cases_for(512, 64), arguments.repetitions)
            pairs = zip(chosen, measured[::2], measured[1::2], strict=True)
            rows += [one_row(title, prefill, decode) for (title, _), prefill, decode in pairs]
    save("engine_speed", rows, table(rows))


def one_row(title: str, prefill: dict[str, Any], decode: dict[str, Any]) -> dict[str, Any]:
    """Return a row with both tests of one spec."""
    return {
        "title": title,
        "prefill": prefill["tokens_per_second_median"],
        "decode": decode["tokens_per_second_median"],
        "weights_bytes": decode["weights_bytes"],
        "peak_memory_bytes": decode["peak_memory_bytes"],
        "experts_skipped_share": decode["experts_skipped_share"],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return tokens per second, with the ratio to the first row of the same model."""
    lines = []
    for row in rows:
        first = next(other for other in rows if other["title"].split(",")[0] == row["title"].split(",")[0])
        lines.append(
            [
                row["title"],
                f"{row['prefill']:.1f} ({row['prefill'] / first['prefill']:.2f}×)",
                f"{row['decode']:.1f} ({row['decode'] / first['decode']:.2f}×)",
                f"{row['weights_bytes'] / 1e9:.2f}",
                f"{row['peak_memory_bytes'] / 1e9:.2f}",
                f"{row['experts_skipped_share']:.0%}",
            ]
        )
    header = ["1.5 B parameters, bf16, batch 1", "prefill 512 t/s", "decode 64 t/s", "weights GB", "peak GB", "skipped"]
    return markdown(header, lines)


if __name__ == "__main__":
    main()
