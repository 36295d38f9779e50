"""Peak memory of pruning a quantized GGUF file that is far larger than `--memory-limit`, to a GGUF file.

python benchmarks/gguf_pruning.py [DIRECTORY] [--memory-limit 2GB] [--layers 54] [--samples 8]

DIRECTORY (by default a temporary one) gets a random mixture of 10 GB in one file, unless it is there, and one result at a
time beside it. Each command runs in a process of its own, whose peak is reported by the system (VmHWM). Figures of finished
commands are kept in DIRECTORY and not measured again.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from memory_limit_prune import measured
from random_model import shape, write_tokenizer
from results import markdown, remember, remembered, save

from engine.families.gguf.description import described
from engine.families.gguf.mixes import WRITTEN_TYPES, tensor_types
from engine.families.resolve import decoder_config
from engine.files.gguf_file_writer import GgufFileWriter, metadata_entry
from engine.files.gguf_types import BlockType

TYPE = "q8_0"
AT_ONCE = 1 << 18
"""Blocks that are made at a time."""


def write_random_gguf(path: Path, config: dict[str, Any]) -> None:
    """Write a file of random blocks, and the demo model's tokenizer beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    description = described(decoder_config(config))
    types, random = tensor_types(description, WRITTEN_TYPES[TYPE]), np.random.default_rng(0)
    entries = (metadata_entry(*each) for each in description.metadata.items())
    partial = path.with_name(f"{path.name}.partial")
    layout = {tensor.name: (types[tensor.name], tensor.shape) for tensor in description.tensors}
    with GgufFileWriter(partial, entries, layout) as file:
        for name, (kind, size) in layout.items():
            file.write(name, random_numbers(kind, size, random))
    partial.rename(path)
    write_tokenizer(path.parent, config["vocab_size"])


def random_numbers(kind: BlockType, size: tuple[int, ...], random: np.random.Generator) -> Iterator[Any]:
    """Yield ones for norms, otherwise numbers with a variance of about 1/fan-in: blocks of random bytes with one scale."""
    if len(size) == 1:
        yield np.ones(size, dtype=np.float32)
    elif kind.element is not None:
        yield (random.standard_normal(size) * size[-1] ** -0.5).astype(np.float32)
    else:
        scale = np.array([size[-1] ** -0.5 * 12**0.5 / 256], dtype=np.float16).view(np.uint8)
        left = int(np.prod(size)) // kind.numbers
        while left:
            blocks = random.integers(0, 256, (min(left, AT_ONCE), kind.bytes), dtype=np.uint8)
            blocks[:, :2] = scale
            left -= len(blocks)
            yield blocks


def table(figures: dict[str, Any]) -> str:
    """Return the peak of each command's resident memory, and its time."""
    rows = [
        [f"file, {figures['type'].upper()}", f"{figures['file_bytes'] / 1e9:.2f} GB", ""],
        ["limit", figures["limit"].replace("GB", " GB"), ""],
        *(
            [
                f"{name}: {one['bytes_after'] / 1e9:.2f} GB stay",
                f"{one['resident_peak_bytes'] / 1e9:.2f} GB",
                f"{one['seconds']:.0f}",
            ]
            for name, one in figures["runs"].items()
        ),
    ]
    return markdown(["", "size, or peak of resident memory", "seconds"], rows)


TABLES = {"gguf_pruning": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, nargs="?")
    parser.add_argument("--memory-limit", default="2GB")
    parser.add_argument("--layers", type=int, default=54)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=128)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        run(arguments.directory or Path(temporary), arguments)


def run(directory: Path, arguments: argparse.Namespace) -> None:
    """Run every command that has not run yet, and save the figures."""
    model, result, path = directory / "model.gguf", directory / "pruned.gguf", directory / "figures.jsonl"
    if not model.is_file():
        write_random_gguf(model, shape(hidden=2048, layers=arguments.layers, experts=8, width=3584))
    text = ["--data", "stdlib", "--samples", str(arguments.samples), "--sequence-length", str(arguments.sequence_length)]
    common = ["--sparsity", "0.5", "--uniform", "--evaluation-samples", "2", *text, "--memory-limit", arguments.memory_limit]
    commands = {
        "half of the experts": ["--method", "frequency"],
        "half of the hidden units": ["--method", "unit-magnitude", "--no-refit"],
    }
    for name, own in commands.items():
        if name not in {line["name"] for line in remembered(path)}:
            remember(path, {"name": name} | measured(["prune", str(model), *own, *common, "-o", str(result), "--overwrite"]))
            result.unlink()
    runs = {line["name"]: line for line in remembered(path)}
    limits = {"type": TYPE, "limit": arguments.memory_limit, "file_bytes": model.stat().st_size}
    save("gguf_pruning", limits | {"runs": runs})


if __name__ == "__main__":
    main()
