"""Perplexity of every pruning criterion, side by side: random, frequency, REAP and DiEP in its relaxations.

python benchmarks/criteria.py [--model demo] [--seeds 3] [--methods random,reap,diep-gated] [--epochs 10] [--jobs 2]

Each (method, seed) runs in a process of its own on one thread, so that its time and peak memory are its alone. The seed
draws the calibration text (and whatever the method draws); the held-out text is the same for all. Pruned models are
evaluated by masking, which a test holds equal to removing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from results import RESULTS, markdown, save

METHODS = ("random", "frequency", "reap", "fisher", "taylor", "diep-paper", "diep-routed", "diep-gated")
CELLS = ((0.25, "layer"), (0.25, "global"), (0.5, "layer"), (0.5, "global"))
DEFAULT = "diep-gated"


def run_one(model: str, method: str, seed: int, epochs: int) -> dict[str, Any]:
    """Score once, then the perplexity of each cell."""
    from calibrate.text import token_batches
    from compress.selection import Budget
    from engine.checkpoint import Checkpoint, load_tokenizer, resolve
    from engine.model import Decoder
    from engine.report import peak_memory_bytes, resident_memory_bytes

    checkpoint = Checkpoint(resolve(model))
    tokenizer = load_tokenizer(checkpoint)
    text = {"sequence_length": 256}
    tokens = token_batches("stdlib", tokenizer, samples=128, seed=seed, **text)
    held_out = token_batches("stdlib", tokenizer, samples=64, seed=0, split="held-out", **text)
    resident, started = resident_memory_bytes(), time.monotonic()
    ranked = score(checkpoint, tokens, method, seed, epochs)
    seconds, peak = time.monotonic() - started, peak_memory_bytes() - resident
    decoder = Decoder(checkpoint.config, checkpoint.source(torch.float32))
    least = checkpoint.config.experts_per_token
    cells = {}
    for sparsity, scope in CELLS:
        kept = Budget(sparsity=sparsity, scope=scope, min_experts=least).select(ranked)
        cells[f"{sparsity} {scope}"] = {"perplexity": masked_perplexity(decoder, held_out, kept), "kept": kept}
    full = masked_perplexity(decoder, held_out, {})
    return {"method": method, "seed": seed, "seconds": seconds, "peak": peak, "cells": cells, "full": full}


def score(checkpoint: Any, tokens: torch.Tensor, method: str, seed: int, epochs: int) -> dict[int, torch.Tensor]:
    """The scores of one method."""
    from calibrate.collect import collect
    from compress.diep import DiepOptions, search
    from compress.prune import GRADIENT_METHODS
    from compress.saliency import scores
    from engine.model import Decoder

    dtype = checkpoint.model_dtype
    if method.startswith("diep-") or method in GRADIENT_METHODS:
        decoder = Decoder(checkpoint.config, checkpoint.source(dtype))
        decoder.checkpoint_activations = True
        if method in GRADIENT_METHODS:
            return GRADIENT_METHODS[method](decoder, tokens, seed)
        return search(decoder, tokens, DiepOptions(method.removeprefix("diep-"), epochs=epochs, seed=seed))
    return scores(method, collect(checkpoint, tokens, dtype=dtype, seed=seed), seed)


@torch.no_grad()
def masked_perplexity(decoder: Any, tokens: torch.Tensor, kept: dict[int, list[int]]) -> float:
    """Perplexity with only the kept experts of each layer; all of them where a layer is not named."""
    from compress.losses import next_token_loss
    from engine.model import own_routing, routed_by
    from engine.routing import Masked

    routings = []
    for layer in decoder.config.moe_layers:
        moe = decoder.config.layers[layer].moe
        mask = torch.zeros(moe.experts, dtype=torch.bool)
        mask[kept.get(layer, list(range(moe.experts)))] = True
        routings.append(Masked(own_routing(moe), mask))
    with routed_by(decoder, routings):
        total = sum(float(next_token_loss(decoder.hidden_states(rows), decoder.head_VD, rows)) for rows in tokens.split(16))
    return float(torch.tensor(total / (tokens.numel() - len(tokens))).exp())


def table(runs: list[dict[str, Any]]) -> str:
    """Mean over seeds, with the spread (standard deviation) after ±."""
    rows = []
    for method in dict.fromkeys(run["method"] for run in runs):
        own = [run for run in runs if run["method"] == method]
        cells = []
        for sparsity, scope in CELLS:
            values = [run["cells"][f"{sparsity} {scope}"]["perplexity"] for run in own]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            cells.append(f"{statistics.mean(values):.2f} ± {spread:.2f}")
        seconds = statistics.median(run["seconds"] for run in own)
        peak = max(run["peak"] for run in own)
        name = f"**{method}** (default)" if method == DEFAULT else method
        rows.append([name, *cells, f"{seconds:.1f}", f"{peak / 1e6:.0f}"])
    header = ["method", *(f"{sparsity:.0%} {scope}" for sparsity, scope in CELLS), "seconds", "peak MB above start"]
    seeds = len({run["seed"] for run in runs})
    note = f"Full model {runs[0]['full']:.2f}. Mean ± standard deviation of {seeds} seeds.\n\n"
    return note + markdown(header, rows)


def plot(runs: list[dict[str, Any]], name: str) -> None:
    """Bars of perplexity, a group for each cell."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    methods = list(dict.fromkeys(run["method"] for run in runs))
    figure, axes = pyplot.subplots(figsize=(10, 4.2), layout="constrained")
    width = 0.8 / len(methods)
    for index, method in enumerate(methods):
        own = [run for run in runs if run["method"] == method]
        means = [statistics.mean(run["cells"][f"{s} {c}"]["perplexity"] for run in own) for s, c in CELLS]
        places = [cell + (index - len(methods) / 2 + 0.5) * width for cell in range(len(CELLS))]
        axes.bar(places, means, width * 0.92, label=method)
    axes.axhline(runs[0]["full"], color="black", linewidth=0.8, linestyle="--")
    axes.text(-0.55, runs[0]["full"], "full model", va="bottom", ha="left", fontsize=8)
    axes.set_xticks(range(len(CELLS)), [f"{sparsity:.0%} removed, {scope}" for sparsity, scope in CELLS])
    axes.set_ylabel("held-out perplexity (lower is better)")
    axes.legend(ncols=4, fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(RESULTS / f"{name}.png", dpi=130)


def in_process(model: str, method: str, seed: int, epochs: int) -> dict[str, Any]:
    """`run_one` in a process with one thread."""
    command = [sys.executable, __file__, "--model", model, "--epochs", str(epochs), "--worker", f"{method}:{seed}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env=environment)
    run: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    cells = {name: round(cell["perplexity"], 2) for name, cell in run["cells"].items()}
    print(f"{method} seed {seed}: {run['seconds']:.1f} s {cells}", file=sys.stderr, flush=True)
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--keep", action="store_true", help="keep the last results of methods that are not named")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--name", default="criteria")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        method, seed = arguments.worker.split(":")
        print(json.dumps(run_one(arguments.model, method, int(seed), arguments.epochs)))
        return
    wanted = [(method, seed) for method in arguments.methods.split(",") for seed in range(arguments.seeds)]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        runs = list(pool.map(lambda pair: in_process(arguments.model, *pair, arguments.epochs), wanted))
    if arguments.keep:
        last = json.loads((RESULTS / f"{arguments.name}.json").read_text())["figures"]
        runs = [run for run in last if run["method"] not in arguments.methods.split(",")] + runs
    save(arguments.name, runs, table(runs))
    plot(runs, arguments.name)


if __name__ == "__main__":
    main()
