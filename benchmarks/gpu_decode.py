"""Decoding and prefill on an NVIDIA GPU: transformers, and ours through torch and through the Triton kernels.

python benchmarks/gpu_decode.py [--directory DIR] [--rounds 5] [--shapes few,many] [--layers N]

All contenders stay loaded and are timed in turn. Figures are medians, and ratios are of medians. The GPU's memory bandwidth
is measured in each round too, by copying 1 GB. Decoding's fraction of it is bytes of weights per token times tokens per
second. transformers also decodes one sequence with a static cache and a compiled step, which it records as a CUDA graph.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from engine_speed import transformers_version, write_skip_tables
from random_model import shape, write_random_weights, write_tokenizer
from results import NOT_POSSIBLE_HERE, markdown, save, times

from engine.bench.backends import BenchSpec
from engine.generation.generate import Engine
from engine.generation.worker import Worker
from engine.kernels.kernel_choice import KERNELS

SEQUENCES = 8
DECODED = 64
PREFILL, DECODE, TOGETHER = "pp 512 0", f"tg {DECODED} 0", f"{SEQUENCES} sequences"
PEER, STATIC, OURS = "transformers", "transformers, compiled, static cache", "ours"
WORKERS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    PEER: ("torch", {"backend": "transformers"}, (1, SEQUENCES)),
    "ours, torch": ("torch", {}, (1,)),
    OURS: ("compiled", {}, (1, SEQUENCES)),
    "ours, skipping at 1": ("compiled", {"skip_threshold": 1.0}, (1,)),
}
"""Value of the KERNELS variable, options of the worker, and sizes of batches, for each contender beside STATIC."""


@dataclass(frozen=True)
class Shape:
    """A random model, and those that decode it."""

    title: str
    sizes: dict[str, Any]
    """Arguments of `random_model.shape`."""
    contenders: tuple[str, ...]


SHAPES = {
    "few": Shape("8 experts of which 2 are chosen, hidden size 1024", {"layers": 16}, (*WORKERS, STATIC)),
    "many": Shape(
        "128 experts of which 8 are chosen, hidden size 2048",
        {"hidden": 2048, "experts": 128, "top_k": 8, "width": 768, "layers": 6},
        (PEER, OURS),
    ),
}


def memory_speed(size: int = 1 << 29) -> float:
    """Return the bytes per second that the GPU reads and writes in a copy, the best of ten."""
    source, target = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    best = float("inf")
    for _ in range(10):
        torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 2 * size / best


def check_kernels(model: Path) -> None:
    """Exit if the kernels do not run the model here. The engine then reports the reason."""
    os.environ[KERNELS] = "compiled"
    engine = Engine.open(model, device="cuda")
    if engine.decoder.gpu_step is None or any(block.on_gpu is None for block in engine.decoder.moe_blocks):
        sys.exit("the Triton kernels do not run this model here, so there is nothing to compare")
    del engine
    torch.cuda.empty_cache()


class StaticPeer:
    """transformers' own `generate` with a static cache, whose step it compiles."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to("cuda").eval()
        self._model.set_experts_implementation("grouped_mm")
        self._model.generation_config.eos_token_id, self._model.generation_config.pad_token_id = None, 0
        self._tokens_1L = torch.randint(self._model.config.vocab_size, (1, 16), device="cuda")

    def decode(self) -> float:
        """Return the seconds of DECODED steps."""
        return self._generate(1 + DECODED) - self._generate(1)

    def _generate(self, tokens: int) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        limits = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        made = self._model.generate(self._tokens_1L, **limits, do_sample=False, cache_implementation="static")
        torch.cuda.synchronize()
        assert made.shape[1] == 16 + tokens
        return time.perf_counter() - started


def measure(model: Path, contenders: Sequence[str], rounds: int) -> tuple[dict[str, dict[str, Any]], list[float]]:
    """Return the rates of each contender by test, with its bytes per token, and memory bandwidth in each round."""
    said: dict[str, dict[str, Any]] = {title: {} for title in contenders}
    speeds, runs = [], list[tuple[str, str, int, Callable[[str], float]]]()
    with ExitStack() as stack:
        for title in filter(WORKERS.get, contenders):
            kernels, options, batches = WORKERS[title]
            os.environ[KERNELS] = kernels  # the worker inherits it
            for batch in batches:
                spec = BenchSpec(str(model), device="cuda", batch=batch, **options)
                ask = partial(_asked, stack.enter_context(Worker(spec, "engine.bench.backends")), said[title])
                if batch == 1:
                    runs.append((title, PREFILL, 512, partial(ask, PREFILL)))
                runs.append((title, DECODE if batch == 1 else TOGETHER, batch * DECODED, partial(ask, DECODE)))
        if STATIC in contenders:
            peer = StaticPeer(model)
            runs.append((STATIC, DECODE, DECODED, lambda verb: peer.decode()))
        for number in range(rounds + 1):
            for title, test, tokens, timed in runs:
                seconds = timed("run" if number else "warm")
                if number:
                    said[title].setdefault(test, []).append(tokens / seconds)
            speeds.append(memory_speed())
    return said, speeds


def _asked(worker: Worker, own: dict[str, Any], test: str, verb: str) -> float:
    """Return the seconds of a worker's test; note the bytes that a contender reads, and the experts that it skips."""
    answer = worker.ask(f"{verb} {test}")
    if verb == "warm" and test == DECODE:
        own.setdefault("bytes_per_token", answer["weights_read_bytes_per_token"])
        own.setdefault("skipped", answer["experts_skipped_share"])
    return float(answer["seconds"])


def table(figures: dict[str, Any]) -> str:
    """Return tokens per second of each contender, with the ratio to transformers."""
    tests = {PREFILL: "prefill 512 t/s", DECODE: "decode t/s", TOGETHER: f"decode t/s, {SEQUENCES} sequences"}
    header = [figures["card"], *(title for test in tests.values() for title in (test, "by transformers"))]
    made = []
    for own_figures in figures["shapes"]:
        said, speed = own_figures["contenders"], statistics.median(own_figures["memory_bytes_per_second"])
        made.append([f"**{own_figures['title']}, {own_figures['layers']} layers**", *[""] * 7])
        for title, own in said.items():
            cells = [title + (f" ({own['skipped']:.0%} skipped)" if own.get("skipped") else "")]
            for test in tests:
                cells += _cells(own.get(test), None if title == PEER else said[PEER][test])
            read = own.get("bytes_per_token") or said[OURS]["bytes_per_token"]
            made.append([*cells, f"{read * statistics.median(own[DECODE]) / speed:.0%}"])
    return markdown([*header, "share of memory bandwidth, one sequence"], made)


def _cells(rates: list[float] | None, peer: list[float] | None) -> list[str]:
    """Return the tokens per second, and their ratio to the peer's."""
    if rates is None:
        return ["", ""]
    ratio = "" if peer is None else times(statistics.median(rates) / statistics.median(peer), rates, peer)
    return [f"{statistics.median(rates):,.0f}", ratio]


TABLES = {"gpu_decode": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, help="where the models are made, and found again")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="names of SHAPES")
    parser.add_argument("--layers", type=int, help="of each shape, in place of its own number")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch finds no GPU here; benchmarks/decode.py measures the processor", file=sys.stderr)
        sys.exit(NOT_POSSIBLE_HERE)
    figures: dict[str, Any] = {"card": torch.cuda.get_device_name(), "shapes": []}
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.directory or Path(temporary)
        for name in arguments.shapes.split(","):
            own, model = SHAPES[name], directory / name
            config = shape(**own.sizes | ({"layers": arguments.layers} if arguments.layers else {}))
            if not model.is_dir():
                write_random_weights(model, config, alike=True)
                write_tokenizer(model, config["vocab_size"])
                if any("skip_threshold" in WORKERS[title][1] for title in filter(WORKERS.get, own.contenders)):
                    write_skip_tables(model)
            check_kernels(model)
            said, speeds = measure(model, own.contenders, arguments.rounds)
            found = {"title": own.title, "layers": config["num_hidden_layers"], "contenders": said}
            figures["shapes"].append(found | {"memory_bytes_per_second": speeds})
            save("gpu_decode", figures, transformers_version())  # after each shape, in case the next one is cut off


if __name__ == "__main__":
    main()
