"""Speed and memory of the engine on models of over 1 B random parameters: against transformers, pruned, and skipping.

python benchmarks/engine_speed.py [--directory DIR] [--repetitions 5] [--layers 16]

All rows of a table come from one run of interleaved rounds. Ratios are of medians. Random experts are as similar as experts
can be and their router is undecided, so quality has no meaning here, but speed and memory have.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from random_model import shape, write_random_model
from results import markdown, save, times

from calibrate.collect import collect
from calibrate.skipping import skip_tables
from compress.plans.apply import apply
from compress.plans.plan import pruning_plan
from engine.bench.backends import BenchSpec
from engine.bench.side_by_side import bench, cases_for
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.skip_table_file import FILE_NAME

MODELS: dict[str, dict[str, int]] = {"8 experts top-2": {}, "16 experts top-4": {"experts": 16, "top_k": 4, "width": 1792}}
"""The changes of `shape` by model."""
PROMPT, NEW = 512, 64


def prepare(directory: Path, layers: int) -> None:
    """Make each model, half of it, and the skip tables of both, if they do not exist yet."""
    for name, changes in MODELS.items():
        config = shape(layers=layers, **changes)
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


@contextmanager
def asked(
    description: str | None, more: Callable[[argparse.ArgumentParser], None] = lambda parser: None
) -> Iterator[tuple[Path, argparse.Namespace]]:
    """Yield the directory of the models, a temporary one by default, and the other arguments of the command line.

    more: declares arguments of one benchmark.
    """
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--directory", type=Path, help="where the models are made, and found again")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--layers", type=int, default=16)
    more(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.directory or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        yield directory, arguments


def main() -> None:
    with asked(__doc__) as (directory, arguments):
        prepare(directory, arguments.layers)
        titled = specs(directory)
        rows: list[dict[str, Any]] = []
        for name in MODELS:  # one model at a time, because the workers of one run are all in memory
            chosen = [(title, spec) for title, spec in titled if title.startswith(name)]
            measured = bench([spec for _, spec in chosen], cases_for(PROMPT, NEW), arguments.repetitions)
            pairs = zip(chosen, measured[::2], measured[1::2], strict=True)
            rows += [one_row(title, prefill, decode) for (title, _), prefill, decode in pairs]
    save("engine_speed", figures_of(rows), transformers_version())


def figures_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of a table: the sizes of its tests and its rows."""
    return {"prompt": PROMPT, "new": NEW, "rows": rows}


def transformers_version() -> dict[str, dict[str, str]]:
    """Return the version of the peer, and its settings."""
    import transformers

    return {"transformers": {"version": transformers.__version__, "settings": "defaults"}}


def one_row(title: str, prefill: dict[str, Any], decode: dict[str, Any]) -> dict[str, Any]:
    """Return a row with both tests of one spec."""
    return {
        "title": title,
        "parameters": decode["parameters"],
        "prefill": prefill["tokens_per_second_median"],
        "decode": decode["tokens_per_second_median"],
        "prefill_rounds": prefill["tokens_per_second_rounds"],
        "decode_rounds": decode["tokens_per_second_rounds"],
        "weights_bytes": decode["weights_bytes"],
        "peak_memory_bytes": decode["peak_memory_bytes"],
        "experts_skipped_share": decode["experts_skipped_share"],
    }


def first_of(rows: Sequence[dict[str, Any]], row: dict[str, Any]) -> dict[str, Any]:
    """Return the first row of the same model, to which its ratios are."""
    return next(other for other in rows if other["title"].split(",")[0] == row["title"].split(",")[0])


def rate(rows: Sequence[dict[str, Any]], row: dict[str, Any], test: str) -> str:
    """Return the tokens per second of a test and their ratio to the first row of the same model."""
    first, rounds = first_of(rows, row), f"{test}_rounds"
    if row is first:
        return f"{row[test]:.1f}"
    return f"{row[test]:.1f}, {times(row[test] / first[test], row.get(rounds, ()), first.get(rounds, ()))}"


def table(figures: dict[str, Any]) -> str:
    """Return tokens per second, with the ratio to the first row of the same model."""
    lines, rows = [], figures["rows"]
    for row in rows:
        lines.append(
            [
                row["title"],
                rate(rows, row, "prefill"),
                rate(rows, row, "decode"),
                f"{row['weights_bytes'] / 1e9:.2f}",
                f"{row['peak_memory_bytes'] / 1e9:.2f}",
                f"{row['experts_skipped_share']:.0%}",
            ]
        )
    header = [f"{rows[0]['parameters'] / 1e9:.1f} B parameters, bf16, batch 1"]
    header += [f"prefill {figures['prompt']} t/s", f"decode {figures['new']} t/s", "weights GB", "peak GB", "skipped"]
    return markdown(header, lines)


TABLES = {"engine_speed": table}


if __name__ == "__main__":
    main()
