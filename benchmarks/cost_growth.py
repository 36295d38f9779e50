"""How the cost of every method grows: layers, experts and tokens doubled one at a time, and experts four times as many.

python benchmarks/cost_growth.py [--methods frequency,fisher,…] [--repetitions 2]

A method's time covers everything that makes its plan, in one process. It is the best of the repetitions, which go through
the models in turn after one uncounted run on the first model. Experts per token stay constant. NAEE is its greedy search,
DiEP one epoch from α = 0. Measurements are saved, so that methods can be measured a few at a time; table and plot show all
of them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from random_model import shape, write_random_model
from results import RESULTS, markdown, remember, remembered, save, times

from calibrate.collect import collect
from calibrate.statistics import LayerStatistics
from compress.methods.criterion import layer_scores
from compress.methods.diep import search
from compress.methods.gate_fisher import fisher_scores
from compress.methods.gate_taylor import taylor_scores
from compress.methods.groups import Group
from compress.methods.hc_smoe import hc_smoe
from compress.methods.m_smoe import m_smoe
from compress.methods.merging import merge_groups, merging_plan
from compress.methods.naee import SubsetSearch, naee
from compress.methods.random_scores import random_scores
from compress.methods.ream import ream
from compress.methods.relaxations import RELAXATIONS
from compress.methods.s_smoe import s_smoe
from compress.methods.saliency import frequency, mean_output_norm, probability, reap, significance
from compress.options.prune import DiepOptions
from compress.report import canvas, plots
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.model import Decoder

BASE = {"hidden": 512, "layers": 2, "experts": 8, "top_k": 2, "width": 1024}
VOCABULARY = 8000
SEQUENCES, LENGTH = 16, 256
DTYPE = torch.bfloat16
MEMORY = RESULTS / "cost_growth.jsonl"
VARIANTS = ("base", "layers × 2", "tokens × 2", "experts × 2", "experts × 4")


def methods() -> dict[str, Callable[[Checkpoint, torch.Tensor], object]]:
    """Return the functions that make a plan, by method."""

    def decoder(checkpoint: Checkpoint) -> Decoder:
        made = Decoder(checkpoint.config, checkpoint.weights(DTYPE))
        made.checkpoint_activations = True
        return made

    def one_shot(score: Callable[[LayerStatistics], torch.Tensor]) -> Callable[[Checkpoint, torch.Tensor], object]:
        return lambda checkpoint, tokens: layer_scores(score, collect(checkpoint, tokens, dtype=DTYPE))

    def merged(groups: Callable[[LayerStatistics, int], list[Group]]) -> Callable[[Checkpoint, torch.Tensor], object]:
        def run(checkpoint: Checkpoint, tokens: torch.Tensor) -> object:
            statistics = collect(checkpoint, tokens, dtype=DTYPE)
            return merging_plan(merge_groups(groups, statistics, checkpoint.config.experts_per_layer[0] // 2), checkpoint)

        return run

    def searched(relaxation: str) -> Callable[[Checkpoint, torch.Tensor], object]:
        options = DiepOptions(relaxation=relaxation, epochs=1, start="zero")
        return lambda checkpoint, tokens: search(decoder(checkpoint), tokens, options)

    def greedy(checkpoint: Checkpoint, tokens: torch.Tensor) -> object:
        kept = {layer: count // 2 for layer, count in checkpoint.config.experts_by_layer.items()}
        return naee(checkpoint, tokens, kept, dtype=DTYPE, search=SubsetSearch(limit=0))

    return {
        "frequency": one_shot(frequency),
        "probability": one_shot(probability),
        "reap": one_shot(reap),
        "man": one_shot(mean_output_norm),
        "mc-moe": one_shot(significance),
        "random": lambda checkpoint, tokens: random_scores(collect(checkpoint, tokens, dtype=DTYPE)),
        "m-smoe": merged(m_smoe),
        "s-smoe": merged(s_smoe),
        "hc-smoe": merged(hc_smoe),
        "ream": merged(ream),
        "fisher": lambda checkpoint, tokens: fisher_scores(decoder(checkpoint), tokens),
        "taylor": lambda checkpoint, tokens: taylor_scores(decoder(checkpoint), tokens),
        "naee, greedy": greedy,
        **{f"diep, {relaxation}": searched(relaxation) for relaxation in RELAXATIONS},
    }


GRADIENTS = ("diep, gated", "diep, routed", "fisher", "taylor")
"""Methods whose time is that of passes with gradients, over the chosen experts alone."""


def variant_shape(variant: str) -> tuple[dict[str, int], int]:
    """Return (shape of the model, sequences)."""
    changed, _, factor = variant.partition(" × ")
    if changed == "tokens":
        return BASE, SEQUENCES * int(factor)
    return BASE | ({} if variant == "base" else {changed: BASE[changed] * int(factor)}), SEQUENCES


def measure(names: list[str], repetitions: int) -> None:
    """Measure and save the seconds of every repetition by method and variant."""
    with tempfile.TemporaryDirectory() as temporary:
        models = {}
        for variant in VARIANTS:
            own, sequences = variant_shape(variant)
            write_random_model(Path(temporary) / variant, shape(**own) | {"vocab_size": VOCABULARY})
            tokens = torch.randint(VOCABULARY, (sequences, LENGTH), generator=torch.Generator().manual_seed(0))
            models[variant] = Checkpoint(Path(temporary) / variant), tokens
        for name in names:
            run = methods()[name]
            rounds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
            run(*models["base"])
            for _ in range(repetitions):
                for variant, (checkpoint, tokens) in models.items():
                    started = time.perf_counter()
                    run(checkpoint, tokens)
                    rounds[variant].append(time.perf_counter() - started)
            remember(MEMORY, {"method": name, "rounds": rounds})


def table(figures: dict[str, Any]) -> str:
    """Return the seconds of the base and the ratios of the other variants to it."""
    variants = [variant for variant in next(iter(figures["seconds"].values())) if variant != "base"]
    rows = []
    for name, own in figures["seconds"].items():
        rounds = figures["rounds"].get(name, {})
        ratios = (times(own[each] / own["base"], rounds.get(each, ()), rounds.get("base", ())) for each in variants)
        rows.append([name, f"{own['base']:.2f}", *ratios])
    return markdown(["", "seconds", *variants], rows)


def quoted(figures: dict[str, Any]) -> dict[str, str]:
    """Return the ratios that the page quotes."""
    four = {name: own["experts × 4"] / own["base"] for name, own in figures["seconds"].items()}
    of_gradients = [four[name] for name in GRADIENTS]
    fisher = figures["seconds"]["fisher"]
    layers = [own["layers × 2"] / own["base"] for own in figures["seconds"].values()]
    tokens = [figures["seconds"][name]["tokens × 2"] / figures["seconds"][name]["base"] for name in GRADIENTS]
    return {
        "layers": f"{statistics.median(layers):.1f}",
        "tokens_low": f"{min(tokens):.1f}",
        "tokens_high": f"{max(tokens):.1f}",
        "fisher_layers": f"{fisher['layers × 2'] / fisher['base']:.1f}",
        "experts_low": f"{min(of_gradients):.1f}",
        "experts_high": f"{max(of_gradients):.1f}",
        "naee_experts": f"{four['naee, greedy']:.1f}",
    }


TABLES = {"cost_growth": table}
IN_TEXT = {"cost_growth": quoted}


def draw(figures: dict[str, Any]) -> Any:
    """Draw ratios to the base for each method, and seconds by the number of experts for the methods that differ there."""
    seconds, base = figures["seconds"], figures["base"]
    names = list(seconds)
    with canvas.style():
        figure = Figure(figsize=(11.0, 5.4), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.25, 1.0))
        for place, variant in enumerate(("layers × 2", "tokens × 2", "experts × 2")):
            down = [row + 0.26 * (place - 1) for row in range(len(names))]
            ratios = [seconds[name][variant] / seconds[name]["base"] for name in names]
            left.barh(down, ratios, height=0.24, color=canvas.COLOURS[place], label=variant)
        left.axvline(1.0, color=plots.MISSING, linewidth=1, zorder=0)
        left.axvline(2.0, color="black", linewidth=0.8, linestyle=":")
        left.set_yticks(range(len(names)), names)
        left.invert_yaxis()
        left.set_xlabel("time by that of the base (dotted: twice)")
        left.legend(loc="upper center", bbox_to_anchor=(0.5, 1.09), ncols=3, frameon=False)
        counts = [base["experts"] * factor for factor in (1, 2, 4)]
        shown = ("diep, gated", "diep, routed", "diep, paper", "naee, greedy", "fisher", "frequency")
        for place, name in enumerate(shown):
            taken = [seconds[name][variant] for variant in ("base", "experts × 2", "experts × 4")]
            right.plot(counts, taken, marker="o", color=canvas.COLOURS[place], label=name)
        right.set_xscale("log", base=2)
        right.set_yscale("log")
        right.set_xticks(counts, [str(count) for count in counts])
        right.set_yticks((0.5, 1, 2, 5, 10), ("0.5", "1", "2", "5", "10"))
        right.minorticks_off()
        right.set_xlabel(f"experts of a layer ({base['top_k']} of them a token's)")
        right.set_ylabel("seconds")
        right.legend(loc="upper center", bbox_to_anchor=(0.5, 1.14), ncols=3, frameon=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--methods", default=",".join(name.replace(", ", "-") for name in methods()))
    arguments = parser.parse_args()
    measure([name for name in methods() if name.replace(", ", "-") in arguments.methods.split(",")], arguments.repetitions)
    latest = {line["method"]: line["rounds"] for line in remembered(MEMORY) if "rounds" in line}
    rounds = {name: latest[name] for name in methods() if name in latest}
    seconds = {name: {variant: min(found) for variant, found in own.items()} for name, own in rounds.items()}
    figures = {"base": BASE, "sequences": SEQUENCES, "length": LENGTH, "seconds": seconds, "rounds": rounds}
    save("cost_growth", figures)
    if len(seconds) == len(methods()):
        canvas.save(draw(figures), RESULTS / "cost_growth.png")


if __name__ == "__main__":
    main()
