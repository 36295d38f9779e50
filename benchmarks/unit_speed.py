"""Decoding of a mixture of random weights, whole and pruned: half of the experts, or half of the hidden units.

python benchmarks/unit_speed.py [--directory DIR] [--repetitions 5] [--layers 16]

The model has 16 experts, of which a token uses 4. Pruned models lack half of the experts, half of the units of every expert,
or half of all units with other widths for every expert, as a ranking over all layers gives them. All rows come from one run
of interleaved rounds; ratios are of medians. Which experts and units stay is drawn at random, because it does not change the
time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from engine_speed import asked, one_row
from random_model import shape, write_random_model
from results import markdown, save, times

from compress.plans.apply import apply
from compress.plans.plan import Plan, pruning_plan
from compress.plans.selection import LARGEST_MULTIPLE
from compress.plans.unit_selection import select_units, units_plan
from engine.bench.backends import BenchSpec
from engine.bench.side_by_side import bench, cases_for
from engine.checkpoint.checkpoint import Checkpoint

PROMPT, NEW = 512, 64
CHANGES = {"experts": 16, "top_k": 4, "width": 2688}
FULL, EXPERTS, UNIFORM, GLOBAL = "full", "half of the experts", "half of each expert's units", "half of all units"


def plans(checkpoint: Checkpoint) -> dict[str, Plan]:
    """Return the plan of each pruned model."""
    config, generator = checkpoint.config, torch.Generator().manual_seed(0)
    widths = config.ffn_widths()
    scores = {
        layer: [torch.rand(width, generator=generator) + torch.rand((), generator=generator) for width in own]
        for layer, own in widths.items()
    }
    found = {EXPERTS: pruning_plan({layer: range(len(own) // 2) for layer, own in widths.items()})}
    for title, scope in ((UNIFORM, "uniform"), (GLOBAL, "global")):
        found[title] = units_plan(select_units(scores, 0.5, scope, LARGEST_MULTIPLE), widths)
    return found


def prepare(directory: Path, layers: int) -> None:
    """Make the model and the pruned ones, if they do not exist yet."""
    if not (directory / FULL).is_dir():
        write_random_model(directory / FULL, shape(layers=layers, **CHANGES))
    checkpoint = Checkpoint(directory / FULL)
    for title, plan in plans(checkpoint).items():
        if not (directory / title).is_dir():
            (directory / title).mkdir()
            apply(plan, checkpoint, directory / title)
            for file in (directory / FULL).glob("tokenizer*"):
                (directory / title / file.name).write_bytes(file.read_bytes())


def table(figures: dict[str, Any]) -> str:
    """Return tokens per second with their ratio to the full model, and bytes."""
    rows = figures["rows"]
    first, lines = rows[0], []
    for row in rows:
        cells = [f"{row[test]:.1f}" for test in ("prefill", "decode")]
        if row is not first:
            for place, test in enumerate(("prefill", "decode")):
                ratio = times(row[test] / first[test], row[f"{test}_rounds"], first[f"{test}_rounds"])
                cells[place] += f", {ratio}"
        lines.append([row["title"], *cells, f"{row['bytes_per_token'] / 1e6:.0f}", f"{row['weights_bytes'] / 1e9:.2f}"])
    header = [f"{rows[0]['parameters'] / 1e9:.1f} B parameters, 4 of 16 experts, bf16, batch 1"]
    header += [f"prefill {figures['prompt']} t/s", f"decode {figures['new']} t/s", "MB a token", "weights GB"]
    return markdown(header, lines)


TABLES = {"unit_speed": table}


def main() -> None:
    with asked(__doc__) as (directory, arguments):
        prepare(directory, arguments.layers)
        titles = (FULL, EXPERTS, UNIFORM, GLOBAL)
        specs = [BenchSpec(str(directory / title)) for title in titles]
        measured = bench(specs, cases_for(PROMPT, NEW), arguments.repetitions)
        rows = [
            one_row(title, prefill, decode) | {"bytes_per_token": decode["weights_read_bytes_per_token"]}
            for title, prefill, decode in zip(titles, measured[::2], measured[1::2], strict=True)
        ]
    save("unit_speed", {"prompt": PROMPT, "new": NEW, "rows": rows})


if __name__ == "__main__":
    main()
