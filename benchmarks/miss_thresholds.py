"""Leaving out light experts that are not in memory: reads that it saves, and perplexity that it costs, on trained models.

python benchmarks/miss_thresholds.py [--models demo,shared-expert] [--windows 32] [--shares 0.25,0.5,0.75]

Text is decoded token by token through the expert cache, with room for a share of the experts. It is the half of the held-out
documents that nothing was chosen on. A threshold is the share of a token's weights below which an expert that is not in
memory is left out.
"""

from __future__ import annotations

import argparse
import math
from itertools import pairwise
from typing import Any

import torch
from matplotlib.figure import Figure
from methods import MODELS, train_second_model
from results import RESULTS, markdown, save

from calibrate.text import token_batches
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_directory import resolve
from engine.checkpoint.tokenizer import load_tokenizer
from engine.expert_cache.attach import open_limited
from engine.expert_cache.figures import totals
from engine.generation.generate import Engine

THRESHOLDS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
LENGTH = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=lambda text: text.split(","), default=["demo"])
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--shares", type=lambda text: [float(each) for each in text.split(",")], default=[0.25, 0.5, 0.75])
    options = parser.parse_args()
    if "shared-expert" in options.models:
        train_second_model()
    rows = []
    for name in options.models:
        checkpoint = Checkpoint(resolve(MODELS[name]))
        text = {"samples": options.windows, "sequence_length": LENGTH, "seed": 0}
        tokens_SL = token_batches("stdlib", load_tokenizer(checkpoint), **text, split="report")
        for share in options.shares:
            for threshold in THRESHOLDS:
                rows.append({"model": name, "share": share} | measured(MODELS[name], tokens_SL, share, threshold))
                print(rows[-1], flush=True)
    save("miss_thresholds", {"rows": rows, "windows": options.windows, "length": LENGTH})
    plot(rows)


def measured(model: str, tokens_SL: torch.Tensor, share: float, threshold: float) -> dict[str, Any]:
    """Return perplexity and reads of one threshold, with room for a share of the experts."""
    checkpoint = Checkpoint(resolve(model))
    dtype = checkpoint.model_dtype
    decoder, cache = open_limited(
        checkpoint,
        checkpoint.weights(dtype),
        1 << 40,
        dtype=dtype,
        miss_threshold=threshold,
        reads_ahead=False,
        resident=lambda: 0,
    )
    cache.limit -= cache.capacity - int(share * cache.expert_bytes)
    engine = Engine(checkpoint, decoder)
    total, count = 0.0, 0
    for row_L in tokens_SL:
        kept = engine.new_cache(1, LENGTH)
        for token, following in pairwise(row_L):
            logits_V = engine.step(token[None], None, kept)[0].float()
            total, count = total + float(logits_V.logsumexp(-1) - logits_V[following]), count + 1
    found = totals(cache.figures.values())
    cache.close()
    return {
        "threshold": threshold,
        "perplexity": math.exp(total / count),
        "reads_per_token": (found.read + found.late) / count,
        "uses_per_token": found.uses / count,
        "left_out_per_token": found.left_out / count,
    }


def table(figures: dict[str, Any]) -> str:
    """Return a row for each model, share and threshold."""
    lines, rows = [], figures["rows"]
    for place, row in enumerate(rows):
        exact = rows[place - place % len(THRESHOLDS)]  # the first threshold leaves nothing out
        lines.append(
            [
                f"{row['model']}, {row['share']:.0%}",
                f"{row['threshold']:g}",
                f"{row['reads_per_token']:.2f}",
                "" if row is exact else f"{1 - row['reads_per_token'] / exact['reads_per_token']:.0%}",
                f"{row['perplexity']:.3f}",
                "" if row is exact else f"{row['perplexity'] / exact['perplexity'] - 1:+.2%}",
            ]
        )
    header = ["model, experts in memory", "threshold", "experts read per token", "reads saved", "perplexity", "change"]
    return markdown(header, lines)


TABLES = {"miss_thresholds": table}


def plot(rows: list[dict[str, Any]]) -> None:
    """Draw the reads that are saved over the perplexity that they cost, a curve for each model and share."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for model, share in dict.fromkeys((row["model"], row["share"]) for row in rows):
        own = [row for row in rows if (row["model"], row["share"]) == (model, share)]
        cost = [100 * (row["perplexity"] / own[0]["perplexity"] - 1) for row in own]
        saved = [100 * (1 - row["reads_per_token"] / own[0]["reads_per_token"]) for row in own]
        axes.plot(cost, saved, marker="o", label=f"{model}, {share:.0%} of the experts in memory")
    axes.axvline(1, linestyle=":", color="gray")
    axes.set(xlabel="perplexity, % more", ylabel="reads saved, %")
    axes.legend()
    figure.savefig(RESULTS / "miss_thresholds.png", dpi=110)


if __name__ == "__main__":
    main()
