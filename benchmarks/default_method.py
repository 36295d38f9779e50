"""The default method against NAEE, REAP and DiEP: chosen on one half of the held-out documents, reported on the other.

    python benchmarks/default_method.py [--models demo,shared-expert] [--seeds 3] [--windows 256] [--jobs 2]

Each (model, method, seed) is pruned at 25 and 50 % with the method's default scope, on 128 × 256 tokens that the seed draws;
results of the default, which removes hidden units, are refitted, as `compress prune` does. The default for whole experts is
compared with the others too.
All are measured on the same windows: 256 of the half that choices are made on ("selection") and 256 of the half for reports,
spread over all documents of each. Models are compared document by document: for each window the losses of both methods are
averaged over the seeds, and documents are drawn with replacement (compress/run/losses.py). Finished runs are saved in
benchmarks/results/default_method.jsonl, so that an interrupted run resumes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from held_out import LENGTH, MODELS, WINDOWS, window_losses, windows_of
from methods import Cell, default_scope, prunings, train_second_model
from results import RESULTS, markdown, remember, remembered, save
from torch import Tensor

from compress.methods import DEFAULT_GRANULARITY, DEFAULT_METHODS
from compress.run.losses import Losses

DEFAULT, OF_EXPERTS = DEFAULT_METHODS[DEFAULT_GRANULARITY], DEFAULT_METHODS["expert"]
METHODS = (DEFAULT, OF_EXPERTS, "diep", "reap", "naee")
FULL = "full model"
SPARSITIES = (0.25, 0.5)
HALVES = ("selection", "report")
DONE = RESULTS / "default_method.jsonl"


def run_one(model: str, method: str, seed: int, count: int) -> dict[str, Any]:
    """Return the losses on every window of both halves, by sparsity; the full model has sparsity 0."""
    from compress.plans.apply import planned_decoder
    from compress.prune import make_plan, refitted
    from engine.checkpoint.checkpoint import Checkpoint
    from engine.checkpoint.model_directory import resolve
    from engine.decoder.model import Decoder

    halves = {half: windows_of(model, half, count) for half in HALVES}
    losses: dict[str, dict[str, list[float]]] = {}
    if method == FULL:
        checkpoint = Checkpoint(resolve(MODELS[model]))
        decoder = Decoder(checkpoint.config, checkpoint.source(torch.float32))
        losses["0"] = {half: window_losses(decoder, own.tokens_SL) for half, own in halves.items()}
    else:
        cells = [Cell(sparsity, default_scope(method)) for sparsity in SPARSITIES]
        for cell, pruning in prunings(model, method, seed, cells):
            plan = make_plan(pruning)
            tensors = refitted(pruning, plan).tensors
            decoder = planned_decoder(plan, pruning.prepared.checkpoint, torch.float32, replaced=tensors)
            losses[f"{cell.sparsity:g}"] = {half: window_losses(decoder, own.tokens_SL) for half, own in halves.items()}
    documents = {half: own.documents_S.tolist() for half, own in halves.items()}
    return {"model": model, "method": method, "seed": seed, "losses": losses, "documents": documents}


def in_process(script: str, done: Path, *job: str | int, options: Sequence[str] = ()) -> dict[str, Any]:
    """Run a job (model, method, seed, …) of a script's `run_one` in a process with one thread, and remember the result.

    done: the file of finished jobs.
    options: further arguments of the script.
    """
    command = [sys.executable, script, "--worker", ":".join(map(str, job)), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    run: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    print(f"{job[0]} {job[1]} seed {job[2]}: done", file=sys.stderr, flush=True)
    remember(done, run)
    return run


# Table


def losses_of(figures: dict[str, Any], model: str, method: str, sparsity: str, half: str) -> Losses:
    """Return the losses on each window, averaged over the seeds."""
    own = [run for run in figures["runs"] if (run["model"], run["method"]) == (model, method)]
    summed = torch.tensor([run["losses"][sparsity][half] for run in own], dtype=torch.float64)
    return Losses(summed.mean(0), figures["length"] - 1)


def documents_of(figures: dict[str, Any], model: str, half: str) -> Tensor:
    """Return the document of each window."""
    return torch.tensor(next(run for run in figures["runs"] if run["model"] == model)["documents"][half])


def perplexities(figures: dict[str, Any], model: str, method: str, sparsity: str) -> dict[str, float]:
    """Return a method's perplexities on both halves, and the standard error of that on the half for reports."""
    chosen, reported = (losses_of(figures, model, method, sparsity, half) for half in HALVES)
    error = reported.standard_error(documents_of(figures, model, "report"))
    return {"selection": chosen.perplexity, "report": reported.perplexity, "stderr": error}


def comparison(figures: dict[str, Any], model: str, ours: str, theirs: str, sparsity: str) -> tuple[str, str]:
    """Return one method's perplexity over another's on the half for reports, and of how many seeds it is below it."""
    own, other = (losses_of(figures, model, name, sparsity, "report") for name in (ours, theirs))
    value, low, high = own.ratio_to(other, documents_of(figures, model, "report"))
    pairs = zip(*(seed_losses(figures, model, name, sparsity) for name in (ours, theirs)), strict=True)
    won = sum(one < another for one, another in pairs)
    return f"{value:.3f} ({low:.3f} to {high:.3f})", f"{won} of {figures['seeds']}"


def seed_losses(figures: dict[str, Any], model: str, method: str, sparsity: str) -> list[float]:
    """Return the loss on the half for reports of each seed."""
    own = [run for run in figures["runs"] if (run["model"], run["method"]) == (model, method)]
    return [sum(run["losses"][sparsity]["report"]) for run in sorted(own, key=lambda run: run["seed"])]


def table(figures: dict[str, Any]) -> str:
    """Return a row for each model, share and method."""
    rows, models = [], list(dict.fromkeys(run["model"] for run in figures["runs"]))
    for model in models:
        whole = losses_of(figures, model, FULL, "0", "report")
        error = whole.standard_error(documents_of(figures, model, "report"))
        chosen = losses_of(figures, model, FULL, "0", "selection").perplexity
        rows.append([f"{model}, {FULL}", f"{chosen:.2f}", f"{whole.perplexity:.2f} ± {error:.2f}", *["–"] * 4])
        for sparsity in figures["sparsities"]:
            for method in figures["methods"]:
                own = perplexities(figures, model, method, sparsity)
                row = [f"{model}, {float(sparsity):.0%}, {_titled(figures, method)}"]
                row += [f"{own['selection']:.2f}", f"{own['report']:.2f} ± {own['stderr']:.2f}"]
                for ours in (figures["default"], figures["of_experts"]):
                    is_beside = ours in figures["methods"] and method not in (ours, figures["default"])
                    row += comparison(figures, model, ours, method, sparsity) if is_beside else ["–", "–"]
                rows.append(row)
    header = ["model, share removed, method", "selection half", "report half ± standard error"]
    for ours in (figures["default"], figures["of_experts"]):
        header += [f"{ours} by this method (95 %)", "seeds won"]
    return markdown(header, rows)


def _titled(figures: dict[str, Any], method: str) -> str:
    if method == figures["default"]:
        return f"**{method}** (default)"
    return f"{method} (default for whole experts)" if method == figures["of_experts"] else method


def in_text(figures: dict[str, Any]) -> dict[str, str]:
    """Return each perplexity, and the ratios of both defaults to the other methods, by model, share and methods."""
    found, both = {}, (figures["default"], figures["of_experts"])
    for model in dict.fromkeys(run["model"] for run in figures["runs"]):
        found[f"{model}_full"] = f"{losses_of(figures, model, FULL, '0', 'report').perplexity:.2f}"
        for sparsity in figures["sparsities"]:
            place = f"{model}_{round(100 * float(sparsity))}"
            for method in figures["methods"]:
                found[f"{place}_{method}"] = f"{perplexities(figures, model, method, sparsity)['report']:.2f}"
                for ours in both[: 1 + (method != both[0])]:
                    if ours != method and ours in figures["methods"]:
                        found[f"{place}_{ours}_by_{method}"] = comparison(figures, model, ours, method, sparsity)[0]
    return {name.replace("-", "_"): text for name, text in found.items()}


TABLES = {"default_method": table}
IN_TEXT = {"default_method": in_text}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--windows", type=int, default=WINDOWS, help="windows of 256 tokens of each half")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        model, method, seed, count = options.worker.split(":")
        torch.set_num_threads(1)
        print(json.dumps(run_one(model, method, int(seed), int(count))))
        return
    models, methods = options.models.split(","), options.methods.split(",")
    if "shared-expert" in models:
        train_second_model()
    asked = [(model, FULL, 0) for model in models]
    asked += [(model, method, seed) for seed in range(options.seeds) for model in models for method in methods]
    known = {(run["model"], run["method"], run["seed"]): run for run in remembered(DONE)}
    with ThreadPoolExecutor(options.jobs) as pool:
        made = list(pool.map(lambda job: known.get(job) or in_process(__file__, DONE, *job, options.windows), asked))
    shares = [f"{sparsity:g}" for sparsity in SPARSITIES]
    about = {
        "default": DEFAULT,
        "of_experts": OF_EXPERTS,
        "methods": methods,
        "seeds": options.seeds,
        "sparsities": shares,
        "length": LENGTH,
    }
    save("default_method", about | {"runs": made})


if __name__ == "__main__":
    main()
