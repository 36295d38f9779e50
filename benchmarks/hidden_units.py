"""Hidden units pruned and refitted, beside whole experts: perplexity of two models by score, scope and share removed.

    python benchmarks/hidden_units.py [--models demo,shared-expert] [--seeds 3] [--methods unit-fisher,…] [--jobs 2]
    python benchmarks/hidden_units.py --other-text TEXT [--tokens 2500000] [--methods unit-fisher,fisher,reap]

The models are those of benchmarks/methods.py. Every result is made by the code of `compress prune` and judged on 256 windows
of the half of the held-out documents that nothing was chosen on; losses are paired by document. The seed draws the
calibration text, 512 × 256 tokens for every method. Each (model, method, seed) runs in a process of its own on one thread.
Finished processes are saved in benchmarks/results/hidden_units.jsonl. An interrupted run resumes, and only cells that are
missing there are measured; the table has all of them.

With `--other-text`, the model is a third one: a mixture of the demo model's shape with a tokenizer of its own, both trained
on that text (any that `compress calibrate --data` takes) by the scripts of examples/, and judged on held-out documents of
the same text. Its results are in hidden_units_other.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from default_method import in_process
from held_out import MODELS, window_losses, windows_of
from methods import RECOVERY_BATCH, RECOVERY_RATE, RECOVERY_STEPS, begun, train_second_model
from results import BUILD, NOT_POSSIBLE_HERE, RESULTS, ROOT, markdown, remembered, save

from compress.run.losses import Losses

FULL, LENGTH, SAMPLES = "full model", 256, 512
EXPERTS = ("fisher", "reap")
"""Methods for whole experts, for comparison."""
EXTENDED = ("unit-fisher", "unit-obs")
"""Methods that also have rows with whole experts among the units, and with recovery."""
SPARSITIES = (0.25, 0.5, 0.75)
SCOPES = ("global", "layer", "uniform")
DONE = RESULTS / "hidden_units.jsonl"


class Subject(NamedTuple):
    """A model, with the text that it is calibrated and judged on."""

    name: str
    directory: str
    source: str = "stdlib"


def subject_of(name: str, other_text: str | None) -> Subject:
    """Return a model of the benchmarks by its name or, with other text, the model of that text."""
    if other_text is None:
        return Subject(name, MODELS[name])
    path = Path(other_text)
    text = path.read_bytes() if path.is_file() else other_text.encode()
    return Subject(name, str(BUILD / "other-text" / f"{name}-{hashlib.sha256(text).hexdigest()[:16]}" / "model"), other_text)


def train_on(subject: Subject, tokens: int, threads: int) -> None:
    """Train a tokenizer and a model of other text once, resuming an interrupted training. The card is written last."""
    directory = Path(subject.directory)
    if (directory / "README.md").exists():
        return
    scripts, data = ROOT / "examples", ["--data", subject.source]
    if not (directory / "tokenizer.json").exists():
        subprocess.run([sys.executable, str(scripts / "train_tokenizer.py"), str(directory), *data], check=True, cwd=ROOT)
    places = ["--output", str(directory), "--work-directory", str(directory.parent / "work"), "--tokens", str(tokens)]
    places += ["--threads", str(threads)]
    subprocess.run([sys.executable, str(scripts / "train_demo_model.py"), *data, *places], check=True, cwd=ROOT)


class Cell(NamedTuple):
    """One result of a method."""

    sparsity: float
    scope: str
    granularity: str
    is_refitted: bool = False
    is_recovered: bool = False

    @property
    def key(self) -> str:
        """Return the cell's key in the results."""
        return f"{self.sparsity:g} {self.row}"

    @property
    def row(self) -> str:
        """Return the key of the cell's row in the table, which has a column for each share."""
        ends = ["refit"] * self.is_refitted + ["recovered"] * self.is_recovered
        return " ".join([self.granularity, self.scope, *ends])


def cells(method: str) -> Iterator[Cell]:
    """Yield the cells of one method, those of a row together."""
    if method in EXPERTS:
        rows = [("global", "expert", False, False), ("global", "expert", False, True)]
    else:
        rows = [(scope, "unit", is_refitted, False) for scope in SCOPES for is_refitted in (False, True)]
        if method in EXTENDED:
            rows += [("global", "both", True, False), ("global", "unit", True, True), ("uniform", "unit", True, True)]
    yield from (Cell(sparsity, *row) for row in rows for sparsity in SPARSITIES)


def cell_keys(method: str) -> set[str]:
    """Return the keys of a method's cells, or that of the full model."""
    return {FULL} if method == FULL else {cell.key for cell in cells(method)}


def done_of(subject: Subject, other_text: str | None) -> Path:
    """Return the file with the finished processes of a model."""
    return DONE if other_text is None else Path(subject.directory).parent / "runs.jsonl"


def options_of(subject: Subject, method: str, cell: Cell, seed: int, samples: int = SAMPLES) -> Any:
    """Return the options that `compress prune` would be given."""
    from calibrate.options import CalibrationOptions
    from compress.options.prune import DiepOptions, PruneOptions
    from compress.options.refit import RefitOptions
    from compress.options.training import RecoverOptions
    from compress.plans.selection import Budget

    return PruneOptions(
        model=subject.directory,
        output=Path("result"),
        budget=Budget(sparsity=cell.sparsity, scope=cell.scope, min_experts=0, granularity=cell.granularity),
        method=method,
        diep=DiepOptions(seed=seed),
        refit=RefitOptions(refit=cell.is_refitted),
        recover=RecoverOptions(RECOVERY_STEPS if cell.is_recovered else 0, RECOVERY_RATE, RECOVERY_BATCH, seed),
        calibration=CalibrationOptions(subject.source, samples, LENGTH, evaluation_samples=0, seed=seed),
    )


def run_one(
    subject: Subject, method: str, seed: int, count: int, samples: int, known: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Return the losses on every window, by cell, with processor seconds; cells that are known are left out."""
    from compress.plans.apply import planned_decoder
    from compress.prune import make_plan, recovered, refitted
    from engine.checkpoint.checkpoint import Checkpoint
    from engine.checkpoint.model_directory import resolve
    from engine.decoder.model import Decoder

    windows = windows_of(subject.directory, "report", count, subject.source)
    documents = windows.documents_S.tolist()
    run: dict[str, Any] = {"model": subject.name, "method": method, "seed": seed, "documents": documents}
    if method == FULL:
        checkpoint = Checkpoint(resolve(subject.directory))
        decoder = Decoder(checkpoint.config, checkpoint.source(torch.float32))
        return run | {"cells": {FULL: {"losses": window_losses(decoder, windows.tokens_SL)}}}
    wanted, found, made = [cell for cell in cells(method) if cell.key not in known], {}, {}
    for cell, pruning in zip(
        wanted, begun([options_of(subject, method, cell, seed, samples) for cell in wanted]), strict=True
    ):
        started = time.process_time()
        start = cell._replace(is_recovered=False)
        if start not in made:
            plan = make_plan(pruning)
            made[start] = plan, {name: own.clone() for name, own in refitted(pruning, plan).tensors.items()}
        plan, tensors = made[start]
        tensors = tensors | recovered(pruning, plan, tensors)
        seconds = time.process_time() - started
        decoder = planned_decoder(plan, pruning.prepared.checkpoint, torch.float32, replaced=tensors)
        units = sum(sum(layer.moe.widths) for layer in decoder.config.layers if layer.moe is not None)
        found[cell.key] = {"losses": window_losses(decoder, windows.tokens_SL), "seconds": seconds, "units": units}
    return run | {"cells": found}


# Table


def losses_of(figures: dict[str, Any], model: str, method: str, key: str) -> Losses | None:
    """Return the losses of a cell on each window, averaged over its seeds; None where no run has the cell."""
    own = [run["cells"] for run in figures["runs"] if (run["model"], run["method"]) == (model, method)]
    summed = torch.tensor([cells[key]["losses"] for cells in own if key in cells], dtype=torch.float64)
    return Losses(summed.mean(0), LENGTH - 1) if len(summed) else None


def ratio(figures: dict[str, Any], model: str, method: str, key: str) -> Any:
    """Return a cell's perplexity over that of the full model, with its interval, paired by document."""
    own, whole = losses_of(figures, model, method, key), losses_of(figures, model, FULL, FULL)
    documents = next(run for run in figures["runs"] if run["model"] == model)["documents"]
    return None if own is None or whole is None else own.ratio_to(whole, torch.tensor(documents))


def rows_of(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the (method, row) pairs of the table, in order."""
    return [(method, row) for method in figures["methods"] for row in dict.fromkeys(cell.row for cell in cells(method))]


def table(figures: dict[str, Any]) -> str:
    """Return a row for each method, scope and treatment, and a column for each model and share."""
    models = list(dict.fromkeys(run["model"] for run in figures["runs"]))
    header = ["method, scope"] + [f"{model}, {sparsity:.0%} removed" for model in models for sparsity in SPARSITIES]
    rows = []
    for method, row in rows_of(figures):
        own = [ratio(figures, model, method, f"{sparsity:g} {row}") for model in models for sparsity in SPARSITIES]
        shown = ["–" if each is None else f"{each.value:.3f} ({each.low:.3f} to {each.high:.3f})" for each in own]
        granularity, *rest = row.split()
        name = {"expert": "whole experts", "unit": "units", "both": "units and experts"}[granularity]
        rows.append([f"{method}, {name}, {', '.join(rest)}", *shown])
    whole = ((model, losses_of(figures, model, FULL, FULL)) for model in models)
    full = ", ".join(f"{model} {own.perplexity:.2f}" for model, own in whole if own is not None)
    seeds = "; ".join(
        f"{model}: {', '.join(f'{method} {seeds_of(figures, model, method)}' for method in figures['methods'])}"
        for model in models
    )
    about = f"Perplexity over that of the full model ({full}), with intervals of 95 % over documents. Seeds of {seeds}."
    return f"{about}\n\n{markdown(header, rows)}"


def seeds_of(figures: dict[str, Any], model: str, method: str) -> str:
    """Return the number of seeds of a method's cells on a model, or its range where cells differ."""
    own = [run["cells"] for run in figures["runs"] if (run["model"], run["method"]) == (model, method)]
    counts = {sum(key in cells for cells in own) for key in {key for cells in own for key in cells}}
    return "–".join(str(count) for count in sorted({min(counts, default=0), max(counts, default=0)}))


def joined(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one run for each model, method and seed, with the cells of all lines that have them."""
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    for run in runs:
        own = found.setdefault((run["model"], run["method"], run["seed"]), run | {"cells": {}})
        own["cells"] |= run["cells"]
    return list(found.values())


def in_text(figures: dict[str, Any]) -> dict[str, str]:
    """Return the perplexity of each model, and the ratio of each cell by model, method, row and share."""
    found = {}
    for model in dict.fromkeys(run["model"] for run in figures["runs"]):
        if (whole := losses_of(figures, model, FULL, FULL)) is not None:
            found[f"{model}_full".replace("-", "_")] = f"{whole.perplexity:.2f}"
        for method, row in rows_of(figures):
            for sparsity in SPARSITIES:
                key = f"{model}_{method}_{row}_{100 * sparsity:.0f}".replace("-", "_").replace(" ", "_")
                if (own := ratio(figures, model, method, f"{sparsity:g} {row}")) is not None:
                    found[key] = f"{own.value:.3f}"
    return found


TABLES = {"hidden_units": table, "hidden_units_other": table}
IN_TEXT = {"hidden_units": in_text, "hidden_units_other": in_text}


def main() -> None:
    from compress.methods import METHODS

    methods = (*EXPERTS, *(name for name, method in METHODS.items() if method.granularity == "unit"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--methods", default=",".join(methods))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--windows", type=int, default=256, help="windows of 256 tokens")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="sequences of the calibration text")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument(
        "--other-text",
        metavar="TEXT",
        nargs="?",
        const=os.environ.get("BENCHMARK_TEXT", ""),
        help="train a third model on this text (by default the one that BENCHMARK_TEXT names), and measure that one",
    )
    parser.add_argument("--tokens", type=int, default=2_500_000, help="tokens that the third model is trained on")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        model, method, *numbers = options.worker.split(":")
        torch.set_num_threads(1)
        subject = subject_of(model, options.other_text)
        seed, windows, samples = map(int, numbers)
        same = [run for run in remembered(done_of(subject, options.other_text)) if run["model"] == model]
        known = {key for run in same if (run["method"], run["seed"]) == (method, seed) for key in run["cells"]}
        print(json.dumps(run_one(subject, method, seed, windows, samples, frozenset(known))))
        return
    name, done, models = "hidden_units", DONE, options.models.split(",")
    arguments = ["--other-text", options.other_text] if options.other_text else []
    if options.other_text == "":
        print("BENCHMARK_TEXT names no text", file=sys.stderr)
        sys.exit(NOT_POSSIBLE_HERE)
    if options.other_text:
        subject = subject_of(Path(options.other_text).stem, options.other_text)
        train_on(subject, options.tokens, options.jobs)
        name, done, models = "hidden_units_other", done_of(subject, options.other_text), [subject.name]
    elif "shared-expert" in models:
        train_second_model()
    asked = [(model, FULL, 0) for model in models]
    asked += [
        (model, method, seed) for seed in range(options.seeds) for model in models for method in options.methods.split(",")
    ]
    known = {(run["model"], run["method"], run["seed"]): run["cells"].keys() for run in joined(remembered(done))}
    with ThreadPoolExecutor(options.jobs) as pool:
        missing = [job for job in asked if cell_keys(job[1]) - known.get(job, set())]
        sizes = (options.windows, options.samples)
        list(pool.map(lambda job: in_process(__file__, done, *job, *sizes, options=arguments), missing))
    runs = joined(remembered(done))
    ran = {run["method"] for run in runs}
    save(name, {"methods": [method for method in methods if method in ran], "runs": runs})


if __name__ == "__main__":
    main()
