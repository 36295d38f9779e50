"""Decode and prefill of a random mixture of 1.2 B parameters in onnxruntime, against our engine and the plain export.

python benchmarks/onnx_speed.py [--directory DIR] [--repetitions 5] [--layers 12] [--width 3584]

Rows come in groups of interleaved rounds, because together the models do not fit into 24 GB. Our engine in bf16 is in each
group, and ratios are of medians, relative to our engine in that group. The plain export is the output of `torch.onnx.export`
for transformers' batched experts, the only form that it can export: the weights of each token's experts are gathered, that
is copied, and multiplied. Its 4-bit form is made by onnxruntime's quantizer, which leaves gathered weights unchanged. No
parity is checked here, because `compress export` and the tests do that.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from random_model import shape, write_random_model
from results import markdown, save, times
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache

from compress.export.formats import PRECISIONS
from engine.bench.backends import BenchSpec
from engine.bench.side_by_side import bench, cases_for
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.kinds import ONNX_NAME
from engine.decoder.model import own_routing
from engine.files.json_file import write_json
from engine.onnx.decoder import write_decoder

MEDIAN, ROUNDS = "tokens_per_second_median", "tokens_per_second_rounds"
PROMPT, NEW = 256, 32
"""Number of prompt tokens, for all but the plain exports, which would gather tens of GB, and of generated tokens."""
FORMS = {
    "onnx float32": ("float32", "moe"),
    "onnx float32, standard operators": ("float32", "portable"),
    "onnx int8": ("int8", "moe"),
    "onnx int4": ("int4", "moe"),
}
OURS, PLAIN, PLAIN_INT4 = "ours, bf16", "torch.onnx.export", "torch.onnx.export, quantized to int4"


class Step(nn.Module):
    """One decoded token, with the cache as plain tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, keys: list[Tensor], values: list[Tensor]
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        cache = DynamicCache(list(zip(keys, values, strict=True)))
        logits = self.model(input_ids, attention_mask=attention_mask, past_key_values=cache).logits
        return logits, [layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]


def export_plainly(model: Path, made: Path) -> None:
    """Export transformers' model with `torch.onnx.export`, with our names of inputs and outputs."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, experts_implementation="batched_mm").eval()
    layers, past = range(loaded.config.num_hidden_layers), 5
    heads, size = loaded.config.num_key_value_heads, loaded.config.hidden_size // loaded.config.num_attention_heads
    keys, values = ([torch.zeros(1, heads, past, size) for _ in layers] for _ in range(2))
    names = [[f"{{}}.{layer}.{part}" for layer in layers] for part in ("key", "value")]
    varies = torch.export.Dim.DYNAMIC
    program = torch.onnx.export(
        Step(loaded).eval(),
        (torch.zeros(1, 1, dtype=torch.long), torch.ones(1, past + 1, dtype=torch.long), keys, values),
        input_names=["input_ids", "attention_mask", *(name.format("past_key_values") for part in names for name in part)],
        output_names=["logits", *(name.format("present") for part in names for name in part)],
        dynamic_shapes=({}, {1: varies}, [{2: varies} for _ in layers], [{2: varies} for _ in layers]),
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    program.save(made / ONNX_NAME, external_data=True)
    take_last_positions(made / ONNX_NAME)


def take_last_positions(path: Path) -> None:
    """Add our input `logits_to_keep` to a graph: the number of last positions whose logits are returned."""
    model = onnx.load(path, load_external_data=False)
    last = next(node for node in model.graph.node if "logits" in node.output)
    last.output[list(last.output).index("logits")] = "every_logits"
    for name, value in (("logits_to_keep", 1), ("every_position", 2**31 - 1), ("positions_axis", 1)):
        model.graph.initializer.append(numpy_helper.from_array(np.array([value], dtype=np.int64), name))
    model.graph.input.append(helper.make_tensor_value_info("logits_to_keep", onnx.TensorProto.INT64, [1]))
    model.graph.node.append(helper.make_node("Neg", ["logits_to_keep"], ["first_kept"]))
    model.graph.node.append(
        helper.make_node("Slice", ["every_logits", "first_kept", "every_position", "positions_axis"], ["logits"])
    )
    onnx.save(model, path)


def quantise_plainly(plain: Path, made: Path) -> None:
    """Quantize the plain export with onnxruntime: blocks of 32 in 4 bits, activations in 8."""
    quantiser = MatMulNBitsQuantizer(onnx.load(plain / ONNX_NAME), block_size=32, is_symmetric=True, accuracy_level=4)
    quantiser.process()
    quantiser.model.save_model_to_file(str(made / ONNX_NAME), use_external_data_format=True)


def prepare(directory: Path, layers: int, width: int) -> None:
    """Make the mixture and its exports, if they do not exist yet."""
    model = directory / "model"
    if not model.is_dir():
        write_random_model(model, shape(layers=layers, width=width))
    checkpoint = Checkpoint(model)
    routings = [own_routing(layer.moe) for layer in checkpoint.config.layers if layer.moe is not None]

    def write(form: str, made: Path) -> None:
        precision, experts = FORMS[form]
        stored = PRECISIONS[precision]
        write_decoder(checkpoint, made, routings, dtype=stored.dtype, bits=stored.bits, portable=experts == "portable")

    writers = {form: partial(write, form) for form in FORMS}
    writers |= {PLAIN: partial(export_plainly, model), PLAIN_INT4: partial(quantise_plainly, directory / PLAIN)}
    for name, write_form in writers.items():
        made = directory / name
        if not (made / "config.json").exists():
            shutil.rmtree(made, ignore_errors=True)
            made.mkdir()
            write_form(made)
            write_json(made / "config.json", checkpoint.raw_config)
            gc.collect()


def groups(directory: Path, threads: int | None) -> list[dict[str, BenchSpec]]:
    """Return row titles and their specs, by group. The first spec of each group is the reference of the others."""
    ours = BenchSpec(str(directory / "model"), threads=threads)
    exports = {name: BenchSpec(str(directory / name), "onnx", threads=threads) for name in (*FORMS, PLAIN, PLAIN_INT4)}
    wide = {name: spec for name, spec in exports.items() if "int" not in name}
    low = {name: spec for name, spec in exports.items() if "int" in name}
    return [{OURS: ours, "ours, float32": replace(ours, dtype="float32")}, {OURS: ours} | wide, {OURS: ours} | low]


def measure(specs: dict[str, BenchSpec], repetitions: int) -> list[dict[str, Any]]:
    """Return the rows of one group."""
    decode = bench(list(specs.values()), cases_for(0, NEW), repetitions)
    readers = {title: spec for title, spec in specs.items() if PLAIN not in title}
    prefill = bench(list(readers.values()), cases_for(PROMPT, 0), repetitions)
    read = dict(zip(readers, prefill, strict=True))
    rows = []
    for title, row in zip(specs, decode, strict=True):
        found = {"prefill": read.get(title), "decode": row}
        first = {"prefill": read[OURS], "decode": decode[0]}
        own: dict[str, Any] = {"title": title}
        for test, each in found.items():
            own[test] = each and each[MEDIAN]
            own[f"{test}_ratio"] = each and each[MEDIAN] / first[test][MEDIAN]
            own[f"{test}_rounds"] = each and each[ROUNDS]
            own[f"{test}_reference_rounds"] = first[test][ROUNDS]
        rows.append(own | {name: row[name] for name in ("parameters", "weights_bytes", "peak_memory_bytes")})
    return rows


def table(figures: dict[str, Any]) -> str:
    """Return tokens per second, with the ratio to the first row's in the same group."""
    rows = figures["rows"]
    header = ["batch 1", f"prefill {figures['prompt']} t/s", f"decode {figures['new']} t/s", "weights GB", "peak GB"]

    def rate(row: dict[str, Any], test: str) -> str:
        if row[test] is None:
            return "–"
        if row is rows[0]:
            return f"{row[test]:.1f}"
        rounds = row.get(f"{test}_rounds", ()), row.get(f"{test}_reference_rounds", ())
        return f"{row[test]:.1f}, {times(row[f'{test}_ratio'], *rounds)}"

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


def quoted(figures: dict[str, Any]) -> dict[str, str]:
    """Return how many times as fast as the plain exports ours decode."""
    decode = {row["title"]: row["decode_ratio"] for row in figures["rows"]}  # to the same engine, which is in each group
    return {
        "int4": f"{decode['onnx int4'] / decode[PLAIN_INT4]:.1f}",
        "portable": f"{decode['onnx float32, standard operators'] / decode[PLAIN]:.1f}",
        "moe": f"{decode['onnx float32'] / decode[PLAIN]:.1f}",
    }


TABLES = {"onnx_speed": table}
IN_TEXT = {"onnx_speed": quoted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, help="where the models are made, and found again")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=3584)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.directory or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        prepare(directory, arguments.layers, arguments.width)
        measured = [measure(group, arguments.repetitions) for group in groups(directory, arguments.threads)]
    rows = measured[0] + [row for group in measured[1:] for row in group[1:]]
    save("onnx_speed", {"prompt": PROMPT, "new": NEW, "rows": rows})


if __name__ == "__main__":
    main()
