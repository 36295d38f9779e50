"""Decoding of a mixture of random weights stored in 16, 8, 4, 3 and 2 bits, and in several widths at once.

python benchmarks/low_bits.py [--directory DIR] [--repetitions 40] [--layers 4] \
    [--peer-python PYTHON --llama-quantize PROGRAM]

The model has 64 experts of 1,536 hidden units, of which a token uses 6. Attention has as many bits as the experts, and the
output head 8. In the last row the projections of each expert have 2, 3 and 4 bits in a fixed rotation, and attention has 3.
The integers are drawn at random, because they do not change the time. A time is the processor time of one thread for a
token, the median of turns in which every model decodes the same token. It leaves out the time in which other programs on the
machine run, but not the memory bandwidth that they take.

With --peer-python (a Python that has llama-cpp-python) and --llama-quantize (this program of llama.cpp), the models in 3 and
2 bits also decode in turns with llama.cpp's Q3_K_M and Q2_K, on all cores: tokens per second of whole texts, and ratios.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from engine_speed import asked
from llama_cpp_peer import NAME
from packed_floats import beside_text, rates_in_turns
from random_model import shape, write_random_model
from results import markdown, save

from compress.export.gguf import export_gguf
from compress.options.export import GgufExportOptions
from compress.options.quantize import HEAD, HEAD_BITS, QuantiserOptions
from compress.plans.apply import apply
from compress.plans.plan import same_plan
from compress.rounding.mixed_widths import mixed_widths
from compress.rounding.quantizer import Quantiser
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.kv_cache import KeyValueCache
from engine.decoder.model import Decoder
from engine.kernels.kernel_choice import DECODING, prepare_decoding
from engine.kernels.stored.quantized_weight import QuantizedWeight
from engine.kernels.stored.scheme import BITS

GROUP, VOCABULARY, WARM_UP = 32, 4096, 2
CHANGES = {"hidden": 2048, "experts": 64, "top_k": 6, "width": 1536}
PLAIN, MIXED = "bf16", "2, 3 and 4 bits"
TITLES = {bits: f"{bits} bits" for bits in BITS}
PEERS = {TITLES[3]: "Q3_K_M", TITLES[2]: "Q2_K"}
"""Types of llama.cpp that are nearest in size."""
PEER_TOKENS = 40


def random_weights(checkpoint: Checkpoint, options: QuantiserOptions) -> Callable[[str], QuantizedWeight]:
    """Return a function that makes a matrix of random integers by its name."""

    def made(name: str) -> QuantizedWeight:
        (outputs, inputs), bits = checkpoint.shapes[name], options.scheme_of(name).bits
        packed = torch.randint(256, (outputs, inputs * bits // 8), dtype=torch.uint8)
        scales = torch.full((outputs, inputs // GROUP), inputs**-0.5 / 2 ** (bits - 2), dtype=torch.bfloat16)
        return QuantizedWeight(packed, scales, bits, inputs)

    return made


def prepare(directory: Path, layers: int) -> None:
    """Make the model and the low-bit ones, if they do not exist yet."""
    if not (directory / PLAIN).is_dir():
        write_random_model(directory / PLAIN, shape(layers=layers, **CHANGES) | {"vocab_size": VOCABULARY})
    checkpoint = Checkpoint(directory / PLAIN)
    turns = {
        (layer, expert, projection): (2, 3, 4)[(expert + projection) % 3]
        for layer, experts in checkpoint.config.experts_by_layer.items()
        for expert in range(experts)
        for projection in range(3)
    }
    every = {TITLES[bits]: QuantiserOptions(bits, GROUP, quantize_head=True) for bits in BITS}
    mixed = mixed_widths(checkpoint.config, turns, group_size=GROUP, others=3)
    mixed = replace(mixed, quantize_head=True, by_name={**mixed.by_name, HEAD: HEAD_BITS})
    for title, options in (every | {MIXED: mixed}).items():
        if not (directory / title).is_dir():
            (directory / title).mkdir()
            quantiser = Quantiser(options, made=random_weights(checkpoint, options))
            apply(same_plan(checkpoint.config.experts_by_layer), checkpoint, directory / title, quantiser=quantiser)
            for file in (directory / PLAIN).glob("tokenizer*"):
                (directory / title / file.name).write_bytes(file.read_bytes())


def rounds(decoders: dict[str, Decoder], turns: int) -> dict[str, list[float]]:
    """Return for each model the processor time of each token, in seconds."""
    caches = {title: KeyValueCache(own.config, 1, turns + WARM_UP, own.dtype) for title, own in decoders.items()}
    generator, found = torch.Generator().manual_seed(0), {title: list[float]() for title in decoders}
    for turn in range(turns + WARM_UP):
        token = torch.randint(VOCABULARY, (1, 1), generator=generator)
        for title, decoder in decoders.items():
            started = time.thread_time()
            decoder.last_logits(token, None, caches[title], DECODING)
            if turn >= WARM_UP:
                found[title].append(time.thread_time() - started)
    return found


def table(figures: dict[str, Any]) -> str:
    """Return milliseconds per token with the speed compared with 4 bits, and bytes."""
    rows, lines = figures["rows"], []
    four = next(row for row in rows if row["title"] == TITLES[4])
    for row in rows:
        ratio = "" if row is four else f"{four['seconds'] / row['seconds']:.2f}×"
        read, whole = f"{row['bytes_per_token'] / 1e6:.0f}", f"{row['weights_bytes'] / 1e9:.2f}"
        lines.append([row["title"], f"{1e3 * row['seconds']:.1f}", f"{1e3 * row['least_seconds']:.1f}", ratio, read, whole])
    header = [f"{rows[0]['parameters'] / 1e9:.1f} B parameters, 6 of 64 experts, groups of {GROUP}"]
    header += ["ms a token", "fastest", "speed against 4 bits", "MB a token", "weights GB"]
    text = markdown(header, lines)
    for title, row in figures.get("peers", {}).items():
        ratio = beside_text(row["own_rates"], row["peer_rates"])
        own, peer = (statistics.median(row[key]) for key in ("own_rates", "peer_rates"))
        text += (
            f"\n{title} beside {NAME}'s {PEERS[title]} on {row['threads']} threads: {ratio} of its speed, {own:.1f} "
            f"and {peer:.1f} tokens/s; weights of {row['own_bytes'] / 1e9:.2f} and {row['peer_bytes'] / 1e9:.2f} GB.\n"
        )
    return text


TABLES = {"low_bits": table}


def peers(directory: Path, python: str | None, program: str | None) -> dict[str, dict[str, Any]]:
    """Return what decoding in turns with llama.cpp gave, by title; empty without it."""
    found, whole = dict[str, dict[str, Any]](), directory / "whole.gguf"
    for title, kind in PEERS.items() if python and program else ():
        if not whole.is_file():
            export_gguf(GgufExportOptions(model=str(directory / PLAIN), output=whole, format="gguf", type="bf16"))
        gguf = directory / f"{kind}.gguf"
        if not gguf.is_file():
            subprocess.run([str(program), str(whole), str(gguf), kind], check=True, capture_output=True)
        sizes = {"own_bytes": Checkpoint(directory / title).bytes, "peer_bytes": Checkpoint(gguf).bytes}
        found[title] = rates_in_turns(directory / title, gguf, PEER_TOKENS, str(python)) | sizes
        found[title]["threads"] = torch.get_num_threads()
    return found


def asked_for_peers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peer-python", help="Python that has llama-cpp-python; without it, llama.cpp is left out")
    parser.add_argument("--llama-quantize", default=shutil.which("llama-quantize"), help="this program of llama.cpp")


@torch.inference_mode()
def main() -> None:
    threads = torch.get_num_threads()
    with asked(__doc__, asked_for_peers) as (directory, arguments):
        torch.set_num_threads(1)
        prepare(directory, arguments.layers)
        decoders, parameters = dict[str, Decoder](), 0
        for title in (PLAIN, *(TITLES[bits] for bits in sorted(BITS, reverse=True)), MIXED):
            checkpoint = Checkpoint(directory / title)
            decoders[title] = Decoder(checkpoint.config, checkpoint.weights(torch.bfloat16)).eval()
            prepare_decoding(torch.bfloat16, torch.device("cpu"), decoders[title].kernels_needed)
            parameters = checkpoint.parameters
        rows = [
            {
                "title": title,
                "parameters": parameters,
                "seconds": statistics.median(own),
                "least_seconds": min(own),
                "weights_bytes": decoders[title].weights_bytes,
                "bytes_per_token": decoders[title].bytes_read_per_token([0.0] * len(decoders[title].moe_blocks)),
                "rounds": own,
            }
            for title, own in rounds(decoders, arguments.repetitions).items()
        ]
        del decoders
        torch.set_num_threads(threads)
        beside = peers(directory, arguments.peer_python, arguments.llama_quantize)
    figures = {"turns": arguments.repetitions, "rows": rows, "peers": beside}
    save("low_bits", figures, {NAME: next(iter(beside.values()))["peer"]} if beside else None)


if __name__ == "__main__":
    main()
