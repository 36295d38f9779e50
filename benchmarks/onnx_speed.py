"""Decode and prefill of a random mixture of 1.5 B parameters in onnxruntime, against our engine and the plain form.

python benchmarks/onnx_speed.py [--directory DIR] [--repetitions 5] [--layers 16] [--width 3584]

All rows come from one run of interleaved rounds; ratios are of medians, to our engine in bf16. The plain form is what
`torch.onnx.export` makes of transformers' batched experts: for every token the weights of its experts are gathered, that is
copied, and multiplied. No parity is checked here: that is `compress export`'s work and the tests'.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from random_model import shape, write_random_model
from results import markdown, save

from compress.export import PRECISIONS
from engine import onnx_experts
from engine.architectures import MoeConfig
from engine.bench import BenchSpec, bench, cases_for
from engine.checkpoint import Checkpoint
from engine.json_file import write_json
from engine.model import own_routing
from engine.onnx_decoder import write_decoder
from engine.onnx_layers import Parts
from engine.onnx_routing import select
from engine.routing import Routing

PROMPT, NEW = 256, 32
"""Tokens read at once, by all forms but the plain one, which would gather tens of GB for them; tokens generated."""
FORMS = {
    "onnx float32, plain": ("float32", "plain"),
    "onnx float32": ("float32", "moe"),
    "onnx float32, standard operators": ("float32", "portable"),
    "onnx int8": ("int8", "moe"),
    "onnx int4": ("int4", "moe"),
}


def plain(parts: Parts, layer: int, moe: MoeConfig, x_TD: str, logits_TN: str, routing: Routing) -> str:
    """[T, D] with the weights of each token's experts gathered: [T, K, 2F, D] and [T, K, D, F]."""
    graph = parts.graph
    experts_TK, weights_TK = select(graph, routing, logits_TN, moe.experts)
    gate_up = graph.node("Gather", onnx_experts._stacked(parts, layer, moe, "gate_up"), experts_TK, axis=0)
    x_T1D1 = graph.node("Unsqueeze", x_TD, graph.integers(1, 3))
    pairs = graph.node("Reshape", graph.node("MatMul", gate_up, x_T1D1), graph.integers(0, 0, -1, 2))
    gate, up = graph.nodes("Split", pairs, outputs=["", ""], axis=3)
    inner = graph.node("Mul", graph.node("Mul", gate, graph.node("Sigmoid", gate)), up)
    down = graph.node("Gather", onnx_experts._stacked(parts, layer, moe, "down"), experts_TK, axis=0)
    y_TKD1 = graph.node("MatMul", down, inner)
    weights_TK11 = graph.node("Unsqueeze", weights_TK, graph.integers(2, 3))
    y_TD1 = graph.node("ReduceSum", graph.node("Mul", y_TKD1, weights_TK11), graph.integers(1), keepdims=0)
    return graph.node("Squeeze", y_TD1, graph.integers(2))


@contextmanager
def experts_as(form: str) -> Iterator[None]:
    """Inside, mixtures are written in the plain form where `form` says so."""
    own = onnx_experts._mixture
    onnx_experts._mixture = plain if form == "plain" else own
    try:
        yield
    finally:
        onnx_experts._mixture = own


def prepare(directory: Path, layers: int, width: int) -> None:
    """Make the mixture and its exports, where they are not there yet."""
    if not (directory / "model").is_dir():
        write_random_model(directory / "model", shape(layers=layers, width=width))
    checkpoint = Checkpoint(directory / "model")
    routings = [own_routing(layer.moe) for layer in checkpoint.config.layers if layer.moe is not None]
    for name, (precision, form) in FORMS.items():
        made = directory / name
        if made.is_dir():
            continue
        made.mkdir()
        stored = PRECISIONS[precision]
        with experts_as(form):
            write_decoder(checkpoint, made, routings, dtype=stored.dtype, bits=stored.bits, portable=form == "portable")
        write_json(made / "config.json", checkpoint.raw_config)
        gc.collect()


def specs(directory: Path, threads: int | None) -> dict[str, BenchSpec]:
    """Row titles and what they measure; the first is what the others are compared with."""
    model = str(directory / "model")
    ours = {
        "ours, bf16": BenchSpec(model, threads=threads),
        "ours, float32": BenchSpec(model, dtype="float32", threads=threads),
    }
    return ours | {name: BenchSpec(str(directory / name), "onnx", threads=threads) for name in FORMS}


def table(rows: list[dict[str, Any]]) -> str:
    """Tokens per second, with the ratio to the first row."""
    header = ["batch 1", f"prefill {PROMPT} t/s", f"decode {NEW} t/s", "weights GB", "peak GB"]

    def rate(row: dict[str, Any], test: str) -> str:
        return f"{row[test]:.1f} ({row[test] / rows[0][test]:.2f}×)" if row[test] else "–"

    lines = [
        [
            row["title"],
            rate(row, "prefill"),
            rate(row, "decode"),
            f"{row['weights_bytes'] / 1e9:.2f}",
            f"{row['peak_memory_bytes'] / 1e9:.2f}",
        ]
        for row in rows
    ]
    return markdown(header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, help="where the models are made, and found again")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=3584)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--trial", action="store_true", help="show the table and save nothing")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.directory or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        prepare(directory, arguments.layers, arguments.width)
        titled = specs(directory, arguments.threads)
        decode = bench(list(titled.values()), cases_for(0, NEW), arguments.repetitions)
        readers = {title: spec for title, spec in titled.items() if "plain" not in title}
        prefill = bench(list(readers.values()), cases_for(PROMPT, 0), arguments.repetitions)
    read = {title: row["tokens_per_second_median"] for title, row in zip(readers, prefill, strict=True)}
    rows = [
        {
            "title": title,
            "prefill": read.get(title),
            "decode": row["tokens_per_second_median"],
            "weights_bytes": row["weights_bytes"],
            "peak_memory_bytes": row["peak_memory_bytes"],
        }
        for title, row in zip(titled, decode, strict=True)
    ]
    if arguments.trial:
        print(table(rows))
    else:
        save("onnx_speed", rows, table(rows))


if __name__ == "__main__":
    main()
