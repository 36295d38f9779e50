"""Decoding of a mixture of random weights stored in 16, 8, 4, 3 and 2 bits, and in several widths at once.

python benchmarks/low_bits.py [--directory DIR] [--repetitions 5] [--layers 4]

The model has 64 experts of 1,408 hidden units, of which a token uses 6. Attention has as many bits as the experts. In the
last row each expert and projection has 2, 3 or 4 bits by a fixed turn, so that all are in one expert. The integers are drawn
at random, because they do not change the time. All rows come from one run of interleaved rounds; ratios are of medians.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from engine_speed import asked, one_row
from random_model import shape, write_random_model
from results import markdown, save, times

from compress.options.quantize import QuantiserOptions
from compress.plans.apply import apply
from compress.plans.plan import same_plan
from compress.rounding.mixed_widths import mixed_widths
from compress.rounding.quantizer import Quantiser
from engine.bench.backends import BenchSpec
from engine.bench.side_by_side import bench, cases_for
from engine.checkpoint.checkpoint import Checkpoint
from engine.kernels.quantized_weight import QuantizedWeight
from engine.kernels.scheme import BITS

PROMPT, NEW, GROUP = 128, 64, 32
CHANGES = {"hidden": 2048, "experts": 64, "top_k": 6, "width": 1408}
PLAIN, MIXED = "bf16", "2, 3 and 4 bits"
TITLES = {bits: f"{bits} bits" for bits in BITS}


def random_weights(checkpoint: Checkpoint, options: QuantiserOptions) -> Callable[[str], QuantizedWeight]:
    """Return a function that makes a matrix of random integers by its name."""

    def made(name: str) -> QuantizedWeight:
        (outputs, inputs), bits = checkpoint.shapes[name], options.scheme_of(name).bits
        packed = torch.randint(256, (outputs, inputs * bits // 8), dtype=torch.uint8)
        scales = torch.full((outputs, inputs // GROUP), inputs**-0.5 / 2 ** (bits - 2), dtype=torch.bfloat16)
        return QuantizedWeight(packed, scales, bits, inputs)

    return made


def prepare(directory: Path, layers: int) -> None:
    """Make the model and those of few bits, if they do not exist yet."""
    if not (directory / PLAIN).is_dir():
        write_random_model(directory / PLAIN, shape(layers=layers, **CHANGES) | {"vocab_size": 1024})
    checkpoint = Checkpoint(directory / PLAIN)
    turns = {
        (layer, expert, projection): (2, 3, 4)[(expert + projection) % 3]
        for layer, experts in checkpoint.config.experts_by_layer.items()
        for expert in range(experts)
        for projection in range(3)
    }
    every = {TITLES[bits]: QuantiserOptions(bits, GROUP) for bits in BITS}
    for title, options in (every | {MIXED: mixed_widths(checkpoint.config, turns, group_size=GROUP, others=3)}).items():
        if not (directory / title).is_dir():
            (directory / title).mkdir()
            quantiser = Quantiser(options, made=random_weights(checkpoint, options))
            apply(same_plan(checkpoint.config.experts_by_layer), checkpoint, directory / title, quantiser=quantiser)
            for file in (directory / PLAIN).glob("tokenizer*"):
                (directory / title / file.name).write_bytes(file.read_bytes())


def table(figures: dict[str, Any]) -> str:
    """Return tokens per second with their ratio to 4 bits, and bytes."""
    rows, lines = figures["rows"], []
    four = next(row for row in rows if row["title"] == TITLES[4])
    for row in rows:
        decode, ratio = (
            f"{row['decode']:.1f}",
            times(row["decode"] / four["decode"], row["decode_rounds"], four["decode_rounds"]),
        )
        cells = [f"{row['prefill']:.1f}", decode if row is four else f"{decode}, {ratio}"]
        lines.append([row["title"], *cells, f"{row['bytes_per_token'] / 1e6:.0f}", f"{row['weights_bytes'] / 1e9:.2f}"])
    header = [f"{rows[0]['parameters'] / 1e9:.1f} B parameters, 6 of 64 experts, groups of {GROUP}"]
    header += [f"prefill {figures['prompt']} t/s", f"decode {figures['new']} t/s", "MB a token", "weights GB"]
    return markdown(header, lines)


TABLES = {"low_bits": table}


def main() -> None:
    with asked(__doc__) as (directory, arguments):
        prepare(directory, arguments.layers)
        titles = (PLAIN, *(TITLES[bits] for bits in sorted(BITS, reverse=True)), MIXED)
        measured = bench(
            [BenchSpec(str(directory / title)) for title in titles], cases_for(PROMPT, NEW), arguments.repetitions
        )
        rows = [
            one_row(title, prefill, decode) | {"bytes_per_token": decode["weights_read_bytes_per_token"]}
            for title, prefill, decode in zip(titles, measured[::2], measured[1::2], strict=True)
        ]
    save("low_bits", {"prompt": PROMPT, "new": NEW, "rows": rows})


if __name__ == "__main__":
    main()
