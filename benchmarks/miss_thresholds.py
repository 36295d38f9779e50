"""Doing without experts that are not in memory: reads that it saves, and perplexity that it costs, on trained models.

python benchmarks/miss_thresholds.py [--models demo,shared-expert] [--windows 256] [--mixture DIRECTORY --report TEXT]

Text is read layer by layer, with a simulated cache that has room for a share of a layer's experts. It is the half of the
held-out documents that nothing was chosen on; for a model of `--mixture`, it is the text of `--report`. Rows of models that
were measured before are kept.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import torch
from held_out import windows_of
from matplotlib.figure import Figure
from methods import MODELS, train_second_model
from results import RESULTS, markdown, save, went_on

from calibrate.windows import Windows
from compress.cost.misses import MEMORY_SHARES, measured_losses
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_directory import resolve

THRESHOLDS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3)
LENGTH = 256
MIXTURE = "a real mixture"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=lambda text: [each for each in text.split(",") if each], default=["demo"])
    parser.add_argument("--windows", type=int, default=256)
    parser.add_argument("--thresholds", type=_numbers, default=THRESHOLDS)
    parser.add_argument("--shares", type=_numbers, default=MEMORY_SHARES)
    parser.add_argument("--mixture", help="directory of another model")
    parser.add_argument("--report", help="text for it")
    options = parser.parse_args()
    if "shared-expert" in options.models:
        train_second_model()
    places = {name: (MODELS[name], "stdlib", "report") for name in options.models}
    if options.mixture is not None:
        places[MIXTURE] = (options.mixture, options.report, "all")
    store = RESULTS / "miss_thresholds.json"
    stored = json.loads(store.read_text()) if store.exists() else {"figures": {"rows": [], "windows": {}}}
    known = stored["figures"]
    rows = [row for row in known["rows"] if row["model"] not in places]
    if rows:
        went_on(stored)
    counts = dict(known["windows"]) | dict.fromkeys(places, options.windows)
    for name, (model, data, split) in places.items():
        windows = windows_of(model, split, options.windows, data)
        rows += [{"model": name} | row for row in measured(model, windows, options.shares, options.thresholds)]
        print(name, flush=True)
    save("miss_thresholds", {"rows": rows, "windows": counts, "length": LENGTH})
    plot(rows)


def _numbers(text: str) -> list[float]:
    return [float(each) for each in text.split(",")]


def measured(model: str, windows: Windows, shares: Sequence[float], thresholds: Sequence[float]) -> list[dict[str, Any]]:
    """Return reads and perplexity of each share of memory and threshold."""
    checkpoint = Checkpoint(resolve(model))
    costs, (exact, *others) = measured_losses(
        checkpoint, windows.tokens_SL, dtype=torch.float32, shares=shares, thresholds=thresholds
    )
    rows = []
    for cost, losses in zip(costs, others, strict=True):
        ratio = losses.ratio_to(exact, windows.documents_S)
        rows.append(
            {
                "share": cost.memory_share,
                "threshold": cost.threshold,
                "reads_per_token": cost.experts_read_per_token,
                "reads_saved": cost.reads_saved,
                "perplexity": cost.perplexity,
                "ratio": ratio.value,
                "low": ratio.low,
                "high": ratio.high,
            }
        )
    return rows


def curves(rows: list[dict[str, Any]]) -> dict[tuple[str, float], list[dict[str, Any]]]:
    """Return the rows of each model and share of memory."""
    found: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["model"], row["share"]), []).append(row)
    return found


def saved_at(rows: list[dict[str, Any]], cost: float) -> float:
    """Return the share of reads that is saved for so much more perplexity, on straight lines between the thresholds."""
    before = {"ratio": 1.0, "reads_saved": 0.0}
    for row in rows:
        if row["ratio"] > 1 + cost:
            part = (1 + cost - before["ratio"]) / (row["ratio"] - before["ratio"])
            return float(before["reads_saved"] + max(0.0, part) * (row["reads_saved"] - before["reads_saved"]))
        before = row
    return float(before["reads_saved"])


def table(figures: dict[str, Any]) -> str:
    """Return a row for each model and share of memory: what one percent of perplexity buys, and all thresholds."""
    header = ["model, experts in memory", "saved for 1 %", "τ: reads saved for perplexity, in percent (95 %)"]
    lines = []
    for (model, share), rows in curves(figures["rows"]).items():
        cells = [f"{row['threshold']:g}: {row['reads_saved']:.0%} for {_percent(row)}" for row in rows]
        lines.append([f"{model}, {share:.0%}", f"{saved_at(rows, 0.01):.0%}", "; ".join(cells)])
    return markdown(header, lines)


def _percent(row: dict[str, Any]) -> str:
    """Return by how many percent perplexity is higher, with the interval where there is one."""
    value, *ends = (None if row[name] is None else 100 * (row[name] - 1) for name in ("ratio", "low", "high"))
    return f"{value:+.2f}" + ("" if None in ends else " ({:.2f} to {:.2f})".format(*ends))


TABLES = {"miss_thresholds": table}


def in_text(figures: dict[str, Any]) -> dict[str, str]:
    """Return the reads that one percent of perplexity saves, by model and share."""
    found = curves(figures["rows"]).items()
    return {
        f"{model}_{share:.0%}".replace(" ", "_").replace("-", "_").replace("%", ""): f"{saved_at(rows, 0.01):.0%}"
        for (model, share), rows in found
    }


IN_TEXT = {"miss_thresholds": in_text}


def plot(rows: list[dict[str, Any]]) -> None:
    """Draw the reads that are saved over the perplexity that they cost, a curve for each model and share."""
    found = curves(rows)
    models = list(dict.fromkeys(model for model, _ in found))
    figure = Figure(figsize=(4 * len(models), 3.6), layout="constrained")
    for place, model in enumerate(models):
        axes = figure.add_subplot(1, len(models), place + 1)
        for (own, share), points in found.items():
            if own == model:
                cost = [0.0] + [100 * (row["ratio"] - 1) for row in points]
                saved = [0.0] + [100 * row["reads_saved"] for row in points]
                axes.plot(cost, saved, marker="o", label=f"room for {share:.0%}")
        axes.axvline(1, linestyle=":", color="gray")
        axes.set(xlabel="perplexity, % more", ylabel="reads saved, %", title=model)
        axes.legend()
    figure.savefig(RESULTS / "miss_thresholds.png", dpi=110)


if __name__ == "__main__":
    main()
