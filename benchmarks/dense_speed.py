"""Speed and memory of a mixture of 1.5 B random parameters and of dense models made from it, in this engine and
transformers.

python benchmarks/dense_speed.py [--directory DIR] [--repetitions 5] [--layers 16]

All rows come from one run of interleaved rounds. Ratios are of medians, relative to the mixture in our engine.
"""

from __future__ import annotations

from pathlib import Path

from engine_speed import NEW, PROMPT, asked, figures_of, one_row, table, transformers_version
from random_model import shape, write_random_model
from results import save

from compress.plans.apply import apply
from compress.plans.plan import concatenation_plan
from engine.bench.backends import BenchSpec
from engine.bench.side_by_side import bench, cases_for
from engine.checkpoint.checkpoint import Checkpoint

FFNS = (2, 1)
TABLES = {"dense_speed": table}


def prepare(directory: Path, layers: int) -> None:
    """Make the mixture and its dense models, if they do not exist yet."""
    if not (directory / "mixture").is_dir():
        write_random_model(directory / "mixture", shape(layers=layers))
    for ffns in FFNS:
        made = directory / f"dense {ffns}"
        if not made.is_dir():
            checkpoint = Checkpoint(directory / "mixture")
            made.mkdir()
            parts = [(expert, 1.0 / ffns) for expert in range(ffns)]
            apply(concatenation_plan(dict.fromkeys(checkpoint.config.moe_layers, parts)), checkpoint, made)


def main() -> None:
    with asked(__doc__) as (directory, arguments):
        prepare(directory, arguments.layers)
        titled = {"8 experts top-2, ours": BenchSpec(str(directory / "mixture"))}
        titled["8 experts top-2, transformers"] = BenchSpec(str(directory / "mixture"), "transformers")
        for ffns in FFNS:
            name = f"8 experts top-2, dense with {ffns} {'FFN' if ffns == 1 else 'FFNs'}"
            titled[f"{name}, ours"] = BenchSpec(str(directory / f"dense {ffns}"))
            titled[f"{name}, transformers"] = BenchSpec(str(directory / f"dense {ffns}"), "transformers")
        measured = bench(list(titled.values()), cases_for(PROMPT, NEW), arguments.repetitions)
        pairs = zip(titled, measured[::2], measured[1::2], strict=True)
        rows = [one_row(title, prefill, decode) for title, prefill, decode in pairs]
    save("dense_speed", figures_of(rows), transformers_version())


if __name__ == "__main__":
    main()
