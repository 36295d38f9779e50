"""Every pruning and merging method on two models: perplexity, time and memory, dropped or merged, recovered or not.

    python benchmarks/methods.py [--models demo,shared-expert] [--seeds 3] [--methods diep,reap,…] [--jobs 2]

The demo model is shipped with the package, and the second model, of another family, lies in benchmarks/reference_model: what
is measured on different days is measured on the same weights. Without it, it is trained first (about half an hour). Each
(model, method, seed) runs in a process of its own on one thread, through the code of `compress prune`, without writing
artifacts. Times are processor time of that process. The seed draws the calibration text (and the random choices of the
method). The held-out text is the same for all: 256 windows of those documents on which nothing was chosen, and standard
errors of perplexity are over its documents. Finished processes are saved in benchmarks/results/methods.jsonl, so that an
interrupted run resumes; `--fresh` deletes them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from held_out import MODELS, SECOND_MODEL, measured, windows_of
from results import RESULTS, ROOT, markdown, mean_and_spread, remember, remembered, save

SECOND_TOKENS = 4_500_000
RELAXATIONS = ("diep-paper", "diep-routed")
"""DiEP's other relaxations, without merging and recovery."""
SPARSITIES = (0.5, 0.25)
RECOVERY_STEPS, RECOVERY_BATCH, RECOVERY_RATE = 24, 4, 1e-2
DONE = RESULTS / "methods.jsonl"


class Cell(NamedTuple):
    """One result of a method."""

    sparsity: float
    scope: str
    merge: str = "none"
    is_recovered: bool = False

    @property
    def key(self) -> str:
        """Return the cell's key in the results."""
        return " ".join([f"{self.sparsity:g}", self.scope, self.merge, "recovered" if self.is_recovered else "one-shot"])


def methods() -> list[str]:
    """Return all methods for whole experts; hidden_units.py has those for hidden units."""
    from compress.methods import METHODS, methods_of

    pruning = [name for name in methods_of("prune") if METHODS[name].granularity == "expert"]
    return [*pruning, *RELAXATIONS, *methods_of("merge")]


def default_scope(method: str) -> str:
    """Return the scope in which `compress` ranks experts by default."""
    from compress.methods import METHODS

    return METHODS["diep" if method in RELAXATIONS else method].scopes[0]


def cells(method: str) -> list[Cell]:
    """Return the cells of one method, the costliest first: its time is the method's."""
    from compress.methods import methods_of

    own = default_scope(method)
    found = [Cell(sparsity, own) for sparsity in SPARSITIES]
    if method in RELAXATIONS:
        return found + [Cell(sparsity, "layer") for sparsity in SPARSITIES]
    if own == "global":
        found += [Cell(sparsity, "layer") for sparsity in SPARSITIES]
    merges = ("none",) if method in methods_of("merge") else ("none", "cka")
    found += [Cell(sparsity, own, merge) for merge in merges[1:] for sparsity in SPARSITIES]
    return found + [Cell(sparsity, own, merge, True) for merge in merges for sparsity in SPARSITIES]


# One process


def prunings(model: str, method: str, seed: int, wanted: Sequence[Cell]) -> Iterator[tuple[Cell, Any]]:
    """Yield each cell with its Run, as `compress prune` begins it; what a method computes once is shared by all."""
    every = [options_of(MODELS[model], method, cell, seed, Path("result")) for cell in wanted]
    yield from zip(wanted, begun(every), strict=True)


def begun(every: Sequence[Any]) -> Iterator[Any]:
    """Yield the Run of each of these PruneOptions of one model, method and text; directories are removed at the end."""
    from compress.prune import checked_budget, prepare_pruning
    from compress.run.job import Run
    from compress.run.work_directory import WorkDirectory

    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "result"
        shared = WorkDirectory(output, "shared")
        shared.begin({}, resume=False)
        first = prepare_pruning(replace(every[0], output=output))
        for each in every:
            options = replace(each, output=output)
            work = WorkDirectory(output, shared=shared)
            work.begin({}, resume=False)
            yield Run(options, replace(first, budget=checked_budget(options, first.checkpoint)), work)


def run_one(model: str, method: str, seed: int) -> dict[str, Any]:
    """Return the perplexity of every cell, with processor seconds and peak memory of the plan and of recovery."""
    from compress.plans.apply import planned_decoder
    from compress.prune import make_plan, recovered
    from engine.generation.report import peak_memory_bytes
    from engine.passes.memory_budget import resident_memory_bytes

    run: dict[str, Any] = {"model": model, "method": method, "seed": seed, "cells": {}}
    plans: dict[tuple[Any, ...], Any] = {}
    held_out, resident = windows_of(model, "report"), 0
    for cell, pruning in prunings(model, method, seed, cells(method)):
        checkpoint = pruning.prepared.checkpoint
        if not plans:
            resident = resident_memory_bytes()
        started = time.process_time()
        if (place := (cell.sparsity, cell.scope, cell.merge)) not in plans:
            plans[place] = make_plan(pruning)
        trained = recovered(pruning, plans[place], {})
        figures = {"seconds": time.process_time() - started, "peak": peak_memory_bytes() - resident}
        decoder = planned_decoder(plans[place], checkpoint, torch.float32, replaced=trained)
        experts = {"experts_per_layer": list(decoder.config.experts_per_layer)}
        run["cells"][cell.key] = figures | measured(decoder, held_out) | experts
    return run


def options_of(model: str, method: str, cell: Cell, seed: int, output: Path) -> Any:
    """Return the options that `compress prune` or `compress merge` would be given."""
    from calibrate.options import CalibrationOptions
    from compress.methods import METHODS, methods_of
    from compress.options.prune import DiepOptions, MergeOptions, PruneOptions
    from compress.options.training import RecoverOptions
    from compress.plans.selection import Budget
    from engine.checkpoint.checkpoint import Checkpoint
    from engine.checkpoint.model_directory import resolve

    name = "diep" if method in RELAXATIONS else method
    budget = Budget(sparsity=cell.sparsity, scope=cell.scope, min_experts=0, granularity=METHODS[name].granularity)
    if method in methods_of("merge"):
        counts = Checkpoint(resolve(model)).config.experts_by_layer
        budget = Budget(experts=round((1 - cell.sparsity) * max(counts.values())), scope="layer", min_experts=0)
    relaxation = method.removeprefix("diep-") if method in RELAXATIONS else DiepOptions().relaxation
    kind = MergeOptions if method in methods_of("merge") else PruneOptions
    return kind(
        model=model,
        output=output,
        budget=budget,
        method=name,
        merge=cell.merge,
        diep=DiepOptions(relaxation, seed=seed),
        recover=RecoverOptions(RECOVERY_STEPS if cell.is_recovered else 0, RECOVERY_RATE, RECOVERY_BATCH, seed),
        calibration=CalibrationOptions("stdlib", 128, 256, evaluation_samples=0, seed=seed),
    )


def full_model(model: str) -> dict[str, float]:
    """Return the perplexity of the whole model on the held-out text, with its standard error."""
    from engine.checkpoint.checkpoint import Checkpoint
    from engine.checkpoint.model_directory import resolve
    from engine.decoder.model import Decoder

    checkpoint = Checkpoint(resolve(MODELS[model]))
    decoder = Decoder(checkpoint.config, checkpoint.source(torch.float32))
    return measured(decoder, windows_of(model, "report"))


# All processes


def in_process(model: str, method: str, seed: int) -> dict[str, Any] | None:
    """Run `run_one` in a process with one thread. Returns None, and prints the output, if it failed."""
    command = [sys.executable, __file__, "--worker", f"{model}:{method}:{seed}"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        print(f"{model} {method} seed {seed}: failed\n{done.stderr}", file=sys.stderr, flush=True)
        return None
    run: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    short = {key: round(cell["perplexity"], 2) for key, cell in run["cells"].items()}
    print(f"{model} {method} seed {seed}: {short}", file=sys.stderr, flush=True)
    remember(DONE, run)
    return run


def train_second_model() -> None:
    """Train the second model once, resuming an interrupted training. The model card is written last."""
    if (SECOND_MODEL / "README.md").exists():
        return
    script = ROOT / "examples" / "train_demo_model.py"
    options = ["--model", "shared-expert", "--output", str(SECOND_MODEL), "--work-directory", str(SECOND_MODEL / "work")]
    subprocess.run([sys.executable, str(script), *options, "--tokens", str(SECOND_TOKENS)], check=True, cwd=ROOT)


# Tables and picture


def values(runs: Sequence[dict[str, Any]], key: str, figure: str = "perplexity") -> list[float]:
    """Return one value for each seed that has this cell."""
    return [run["cells"][key][figure] for run in runs if key in run["cells"]]


def figures_of(runs: Sequence[dict[str, Any]], model: str, full: dict[str, float]) -> dict[str, Any]:
    """Return the figures of one model: its runs, with the default method and the default scope of each at this time."""
    from compress.methods import DEFAULT_METHODS

    own = [run for run in runs if run["model"] == model]
    made = {run["method"] for run in own}
    scopes = {method: default_scope(method) for method in methods() if method in made}
    return {"model": model, "full": full, "default": DEFAULT_METHODS["expert"], "scopes": scopes, "runs": own}


COLUMNS = ("25 %", "50 %", "50 %, recovered")
"""Columns of the short table for each model."""


def short_figures(models: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one-shot and recovered perplexities of each method with its default scope, without DiEP's other relaxations."""
    rows: dict[str, dict[str, dict[str, list[float]]]] = {}
    shown = dict.fromkeys(method for method in methods() if method not in RELAXATIONS)
    for figures in models:
        table = by_method(figures)
        for method in (each for each in shown if each in table):
            scope = figures["scopes"][method]
            shown_cells = (Cell(0.25, scope), Cell(0.5, scope), Cell(0.5, scope, "none", True))
            own = {column: values(table[method], cell.key) for column, cell in zip(COLUMNS, shown_cells, strict=True)}
            rows.setdefault(method, {})[figures["model"]] = own
    seeds = len({run["seed"] for figures in models for run in figures["runs"]})
    full = {figures["model"]: figures["full"] for figures in models}
    errors = [error for figures in models for error in errors_of(figures)]
    return {"full": full, "default": models[0]["default"], "seeds": seeds, "rows": rows, "errors": errors}


def errors_of(figures: dict[str, Any]) -> tuple[float, float]:
    """Return the lowest and the highest standard error over documents of one model's results."""
    found = [cell["perplexity_stderr"] for run in figures["runs"] for cell in run["cells"].values()]
    return min(found), max(found)


def by_method(figures: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the runs of each method of one model, in the methods' order."""
    return {method: [run for run in figures["runs"] if run["method"] == method] for method in figures["scopes"]}


def name_of(method: str, default: str) -> str:
    """Return a method's name in tables."""
    return f"**{method}** (default for whole experts)" if method == default else method


def cost(own: Sequence[dict[str, Any]], key: str) -> list[str]:
    """Return processor seconds (median) and peak megabytes above the start (largest)."""
    seconds, peak = values(own, key, "seconds"), values(own, key, "peak")
    return [f"{statistics.median(seconds):.0f}", f"{max(peak) / 1e6:.0f}"] if seconds else ["–", "–"]


def short_table(figures: dict[str, Any]) -> str:
    """Return one-shot and recovered results of each method with its default scope."""
    header = ["method"]
    for model in figures["full"]:
        header += [f"{model}: {COLUMNS[0]}", *COLUMNS[1:]]
    rows = []
    for method, by_model in figures["rows"].items():
        found = (by_model.get(model, {}).get(column, []) for model in figures["full"] for column in COLUMNS)
        rows.append([name_of(method, figures["default"]), *map(mean_and_spread, found)])
    return preface(figures["seeds"], figures["full"], figures["errors"]) + markdown(header, rows)


def preface(seeds: int, full: dict[str, dict[str, float]], errors: Sequence[float]) -> str:
    """Return the explanation of the numbers."""
    whole = ", ".join(f"{model} {own['perplexity']:.2f} ± {own['perplexity_stderr']:.2f}" for model, own in full.items())
    text = f"Full models, with their standard error over documents: {whole}. Results: mean ± standard deviation of {seeds} "
    return text + f"seeds; their standard errors over documents are {min(errors):.2f} to {max(errors):.2f}.\n\n"


def long_table(figures: dict[str, Any]) -> str:
    """Return the table of every cell of one model."""
    header = ["method"]
    header += [f"{sparsity} {scope}" for sparsity in ("25 %", "50 %") for scope in ("layer", "global")]
    header += [
        f"{sparsity} {what}" for what in ("merged", "recovered", "merged, recovered") for sparsity in ("25 %", "50 %")
    ]
    header += ["seconds", "peak MB", "recovery seconds"]
    rows = []
    for method, own in by_method(figures).items():
        scope = figures["scopes"][method]
        keys = [Cell(sparsity, where).key for sparsity in (0.25, 0.5) for where in ("layer", "global")]
        for merge, is_recovered in (("cka", False), ("none", True), ("cka", True)):
            keys += [Cell(sparsity, scope, merge, is_recovered).key for sparsity in (0.25, 0.5)]
        row = [name_of(method, figures["default"]), *(mean_and_spread(values(own, key)) for key in keys)]
        rows.append([*row, *cost(own, Cell(0.5, scope).key), cost(own, Cell(0.5, scope, "none", True).key)[0]])
    seeds = len({run["seed"] for run in figures["runs"]})
    return preface(seeds, {figures["model"]: figures["full"]}, errors_of(figures)) + markdown(header, rows)


TABLES = {"methods": short_table, **{f"methods_{model}": long_table for model in MODELS}}


def quoted(figures: dict[str, Any]) -> dict[str, str]:
    """Return mean perplexities at 50 % by scope, what merging by CKA costs, and ratios of the default to the full model."""
    runs = by_method(figures)

    def mean(method: str, sparsity: float, *cell: Any) -> float:
        return statistics.mean(values(runs[method], Cell(sparsity, *cell).key))

    scopes = ("layer", "global")
    shown = {f"{name}_{scope}": f"{mean(name, 0.5, scope):.2f}" for name in ("fisher", "diep", "reap") for scope in scopes}
    costs = [mean(name, s, "global", "cka") - mean(name, s, "global") for name in ("fisher", "diep") for s in SPARSITIES]
    scope = figures["scopes"][figures["default"]]
    half = {
        "one_shot": mean(figures["default"], 0.5, scope),
        "recovered": mean(figures["default"], 0.5, scope, "none", True),
    }
    ratios = {name: f"{value / figures['full']['perplexity']:.2f}" for name, value in half.items()}
    return shown | {"merging_low": f"{min(costs):.1f}", "merging_high": f"{max(costs):.1f}"} | ratios


IN_TEXT = {f"methods_{model}": quoted for model in MODELS}


def plot(models: Sequence[dict[str, Any]]) -> None:
    """Draw a panel for each model: perplexity of each method at both sparsities, one-shot, recovered, merged."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(models), figsize=(5.6 * len(models), 5.2), layout="constrained", squeeze=False)
    series = {
        "one-shot": ("none", False, {"marker": "o"}),
        "then recovered": ("none", True, {"marker": "o", "markerfacecolor": "white"}),
        "merged into those that stay (CKA)": ("cka", False, {"marker": "s", "markersize": 4.5}),
    }
    colours = {0.25: "#0072b2", 0.5: "#d55e00"}
    for axes, own in zip(panels[0], models, strict=True):
        table, scopes = by_method(own), own["scopes"]
        order = sorted(table, key=lambda method: -statistics.mean(values(table[method], Cell(0.5, scopes[method]).key)))
        for label, (merge, is_recovered, look) in series.items():
            for sparsity, colour in colours.items():
                found = {
                    place: got
                    for place, method in enumerate(order)
                    if (got := values(table[method], Cell(sparsity, scopes[method], merge, is_recovered).key))
                }
                shift = {"none": 0.0, "cka": -0.22}[merge] + (0.22 if is_recovered else 0.0)
                axes.errorbar(
                    [statistics.mean(got) for got in found.values()],
                    [place + shift for place in found],
                    xerr=[statistics.stdev(got) if len(got) > 1 else 0.0 for got in found.values()],
                    linestyle="none",
                    color=colour,
                    label=f"{label}, {sparsity:.0%}",
                    **({"markersize": 5.5} | look),
                )
        axes.axvline(own["full"]["perplexity"], color="black", linewidth=0.8, linestyle="--")
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(8))
        axes.xaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
        axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        axes.set_yticks(range(len(order)), order)
        axes.grid(axis="y", color="#eeeeee")
        axes.set_axisbelow(True)
        axes.set_title(f"{own['model']} (dashed: full model)", fontsize=10)
        axes.set_xlabel("held-out perplexity (lower is better)")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.savefig(RESULTS / "methods.png", dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--methods", help="default: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--fresh", action="store_true", help="forget what an earlier run has finished")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        model, method, seed = arguments.worker.split(":")
        torch.set_num_threads(1)
        print(json.dumps(run_one(model, method, int(seed))))
        return
    if arguments.fresh:
        DONE.unlink(missing_ok=True)
    models = arguments.models.split(",")
    if "shared-expert" in models:
        train_second_model()
    wanted = arguments.methods.split(",") if arguments.methods else methods()
    runs = remembered(DONE)
    known = {(run["model"], run["method"], run["seed"]) for run in runs}
    jobs = [(model, method, seed) for model in models for seed in range(arguments.seeds) for method in wanted]
    jobs.sort(key=lambda job: (models.index(job[0]), job[1] in RELAXATIONS))  # the costliest and least interesting ones last
    with ThreadPoolExecutor(arguments.jobs) as pool:
        made = list(pool.map(lambda job: in_process(*job), [job for job in jobs if job not in known]))
    runs += [run for run in made if run is not None]
    by_model = [figures_of(runs, model, full_model(model)) for model in models]
    for figures in by_model:
        save(f"methods_{figures['model']}", figures)
    save("methods", short_figures(by_model))
    plot(by_model)
    if None in made:
        sys.exit("some runs failed; the tables are without them. The same command tries those again.")


if __name__ == "__main__":
    main()
