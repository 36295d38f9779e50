"""Every method on a mixture made of a real dense model (examples/real_mixture.py): perplexity over that of the mixture.

    python benchmarks/pretrained_mixture.py MIXTURE --way split --dense MODEL --data TEXT --report TEXT [--made DIRECTORY]

MIXTURE is the trained mixture, MODEL the dense model that it was made of, and DIRECTORY the mixture before its training.
`--way` is the way in which it was made: mixtures of both ways have a table each. Everything is calibrated on `--data`, the
text of the mixture's training, and judged on windows of another text, `--report`; losses are paired by its documents.
Results are made by the commands of this package, in a process of their own on one thread, and removed once they are
measured. `--tasks` also runs a task of lm-evaluation-harness on the whole models and on some results that lost half of
their experts' parameters. Finished rows are kept in benchmarks/results/pretrained_mixture_WAY.jsonl, and a run that was
interrupted goes on with the first that is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from held_out import LENGTH, window_losses, windows_of
from results import BUILD, NOT_POSSIBLE_HERE, RESULTS, ROOT, markdown, remember, remembered, save
from skipping import calibrated

from compress.run.losses import Losses

DENSE, MADE, FULL = "the dense model", "the mixture before training", "the mixture"
WHOLE_SHARES, UNIT_SHARES = (0.25, 0.5), (0.25, 0.5, 0.75)
THRESHOLDS = (0.5, 1.0, 1.5)
EXPERT_METHODS = ("fisher", "taylor", "diep", "naee", "reap", "man", "mc-moe", "frequency", "probability", "random")
UNIT_METHODS = ("unit-obs", "unit-fisher", "unit-magnitude")
MERGING = ("ream", "hc-smoe", "m-smoe", "s-smoe")
SAMPLES = 128
TASK = "task, "
"""Beginning of the titles of rows that hold a task's accuracy."""
ON_TASK = ("reap, whole experts", "unit-fisher, units, global, refit", "unit-fisher, units, one width, refit", "4 bits")
"""Rows whose results are also measured on a task, with half of the parameters removed."""
WAYS = ("split", "copies")


class Row(NamedTuple):
    """One row of the table."""

    title: str
    command: tuple[str, ...]
    """Words of the command that makes the results; none for a model that is there."""
    shares: tuple[float, ...] = ()
    """Shares of the experts' parameters that are removed, one result for each."""
    reads_text: bool = True
    thresholds: tuple[float, ...] = ()
    """Thresholds of adaptive skipping that the model itself is measured with."""

    def runs(self, experts: int) -> Iterator[tuple[tuple[str, ...], dict[float, str]]]:
        """Yield each command that makes results, and the place of each share's result within the output.

        experts: the number of the mixture's experts in each layer.
        """
        if self.command[0] == "merge":
            for share in self.shares:
                yield (*self.command, "--experts", str(experts - round(experts * share))), {share: ""}
        elif self.command[0] == "prune":
            method = self.command[self.command.index("--method") + 1]
            shares = ",".join(f"{share:g}" for share in self.shares)
            yield (*self.command, "--sparsity", shares), {share: f"{method}-{share:g}" for share in self.shares}
        else:
            yield self.command, {0.0: ""}


def rows(experts: int) -> Iterator[Row]:
    """Yield the rows that are made of a mixture with so many experts."""
    for method in EXPERT_METHODS:
        yield Row(f"{method}, whole experts", ("prune", "--method", method, "--granularity", "expert"), WHOLE_SHARES)
    yield Row("fisher, merged by CKA", ("prune", "--method", "fisher", "--merge", "cka"), WHOLE_SHARES)
    yield Row("fisher, corrected", ("prune", "--method", "fisher", "--granularity", "expert", "--correct"), WHOLE_SHARES)
    for method in UNIT_METHODS:
        yield Row(f"{method}, units, global, refit", ("prune", "--method", method), UNIT_SHARES)
        yield Row(f"{method}, units, one width, refit", ("prune", "--method", method, "--uniform"), UNIT_SHARES)
    yield Row("unit-obs, units, global", ("prune", "--method", "unit-obs", "--no-refit"), UNIT_SHARES)
    both = ("prune", "--method", "unit-obs", "--granularity", "both")
    yield Row("unit-obs, units and experts, refit", both, UNIT_SHARES)
    for method in MERGING:
        yield Row(f"{method}, merged", ("merge", "--method", method), WHOLE_SHARES)
    for bits in ("8", "4"):
        yield Row(f"{bits} bits", ("quantize", "--bits", bits), reads_text=False)
    for ffns in (experts, experts // 2):
        yield Row(f"dense, of {ffns} experts", ("densify", "--ffns", str(ffns)))
    yield Row("skipping", (), thresholds=THRESHOLDS)


def losses_on(directory: str, report: str, count: int, threshold: float = 0.0) -> list[float]:
    """Return the loss of a model on each window of the report's text, computed in bfloat16."""
    from engine.generation.generate import Engine

    decoder: Any = Engine.open(directory, dtype="bfloat16", threads=1, skip_threshold=threshold).decoder
    with torch.inference_mode():
        return window_losses(decoder, windows_of(directory, "all", count, report).tokens_SL)


def accuracy(directory: str, options: argparse.Namespace) -> dict[str, float]:
    """Return the figures of a model on the task, computed in bfloat16."""
    command = [sys.executable, "-m", "cli", "evaluate", directory, "--tasks", options.tasks, "--limit", str(options.limit)]
    words = [*command, "--threads", "1", "--dtype", "bfloat16", "--json"]
    ended = subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    (figures,) = json.loads(ended.stdout.splitlines()[-1])["value"].values()
    return {name: value for name, value in figures.items() if isinstance(value, float)}


def on_task(title: str, options: argparse.Namespace) -> dict[str, float]:
    """Return the accuracy of a whole model, or of the result of a row that lost half of its parameters if it lost any."""
    wholes = {DENSE: options.dense, MADE: options.made, FULL: options.mixture}
    if title in wholes:
        return accuracy(wholes[title], options)
    row = next(each for each in rows(experts_of(options.mixture)) if each.title == title)
    row = row._replace(shares=tuple(share for share in row.shares if share == 0.5))
    (found,) = (accuracy(place, options) for _, place in results_of(row, options.mixture, options))
    return found


def results_of(row: Row, mixture: str, options: argparse.Namespace) -> Iterator[tuple[float, str]]:
    """Make a row's results; yield the share and the directory of each, which is removed afterwards."""
    output = BUILD / "pretrained-mixture" / options.way / row.title.replace(", ", "-").replace(" ", "-")
    output.parent.mkdir(parents=True, exist_ok=True)
    common = ["--threads", "1", "--evaluation-samples", "0"]
    if row.reads_text:
        common += ["--data", options.data, "--samples", str(options.samples), "--sequence-length", str(LENGTH)]
    for (name, *words), places in row.runs(experts_of(mixture)):
        shutil.rmtree(output, ignore_errors=True)
        command = [sys.executable, "-m", "cli", name, mixture, *words, "-o", str(output), *common]
        subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
        for share, place in places.items():
            yield share, str(output / place if len(places) > 1 or row.command[0] != "prune" else output)
    shutil.rmtree(output)


def measured(row: Row, mixture: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the losses of a row's results by share or threshold; the results are made in a directory and removed."""
    if row.thresholds:
        calibrated(mixture, options.data)
        return {f"{each:g}": losses_on(mixture, options.report, options.windows, each) for each in row.thresholds}
    made = results_of(row, mixture, options)
    return {f"{share:g}": losses_on(place, options.report, options.windows) for share, place in made}


def run_one(title: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the losses of one row."""
    wholes = {DENSE: options.dense, MADE: options.made, FULL: options.mixture}
    if title.startswith(TASK):
        return {"title": title, "task": on_task(title.removeprefix(TASK), options)}
    if title in wholes:
        windows = windows_of(options.mixture, "all", options.windows, options.report)
        losses = losses_on(wholes[title], options.report, options.windows)
        return {"title": title, "losses": {"0": losses}, "documents": windows.documents_S.tolist()}
    row = next(each for each in rows(experts_of(options.mixture)) if each.title == title)
    return {"title": title, "losses": measured(row, options.mixture, options)}


def experts_of(mixture: str) -> int:
    """Return the number of experts of each layer of a mixture."""
    from engine.checkpoint.checkpoint import Checkpoint
    from engine.checkpoint.model_directory import resolve

    return max(Checkpoint(resolve(mixture)).config.experts_by_layer.values())


# Table


def ratio(figures: dict[str, Any], title: str, share: str) -> Any:
    """Return a result's perplexity over that of the mixture, with its interval, paired by document."""
    by_title = {run["title"]: run for run in figures["runs"]}
    own, whole = (by_title[name]["losses"][key] for name, key in ((title, share), (FULL, "0")))
    own, whole = (Losses(torch.tensor(each, dtype=torch.float64), LENGTH - 1) for each in (own, whole))
    return own.ratio_to(whole, torch.tensor(by_title[FULL]["documents"]))


def perplexity(figures: dict[str, Any], title: str) -> str:
    """Return the perplexity of a whole model, with its standard error over documents."""
    by_title = {run["title"]: run for run in figures["runs"]}
    own = Losses(torch.tensor(by_title[title]["losses"]["0"], dtype=torch.float64), LENGTH - 1)
    return f"{own.perplexity:.2f} ± {own.standard_error(torch.tensor(by_title[FULL]['documents'])):.2f}"


def cell(figures: dict[str, Any], title: str, share: str) -> str:
    """Return a ratio with its interval."""
    own = ratio(figures, title, share)
    return f"{own.value:.3f}" if own.low is None else f"{own.value:.3f} ({own.low:.3f} to {own.high:.3f})"


def table(figures: dict[str, Any]) -> str:
    """Return a row for each method with a column for each share, and below it the results that have no share."""
    wholes = [run["title"] for run in figures["runs"] if run["title"] in (DENSE, MADE, FULL)]
    shares = [f"{share:g}" for share in UNIT_SHARES]
    removed: dict[str, dict[str, str]] = {}
    others = []
    for run in figures["runs"]:
        title = run["title"]
        if title in wholes or "task" in run:
            continue
        for key in run["losses"]:
            if key == "0" or title == "skipping":
                others.append([title if key == "0" else f"skipping at threshold {key}", cell(figures, title, key)])
            else:
                removed.setdefault(title, {})[key] = cell(figures, title, key)
    header = ["method"] + [f"{share:.0%} removed" for share in UNIT_SHARES]
    lines = [[title, *(cells.get(share, "–") for share in shares)] for title, cells in removed.items()]
    named = "; ".join(f"{title} {perplexity(figures, title)}" for title in wholes)
    about = f"Perplexity over that of the mixture, with intervals of 95 % over documents. Perplexities: {named}."
    tables = [markdown(header, lines), markdown(["other results", "perplexity ratio"], others)]
    tasks = [[run["title"].removeprefix(TASK), *accuracies(run["task"])] for run in figures["runs"] if "task" in run]
    tables += [markdown(["model", "accuracy on ARC-Easy", "accuracy, normalized by length"], tasks)] if tasks else []
    return "\n".join([f"{about}\n", *tables])


def accuracies(task: dict[str, float]) -> list[str]:
    """Return the accuracies of a task in percent with their standard errors, plain and normalized by length."""
    return [f"{task[f'{name},none']:.1%} ± {task[f'{name}_stderr,none']:.1%}" for name in ("acc", "acc_norm")]


def in_text(figures: dict[str, Any]) -> dict[str, str]:
    """Return the perplexities of the whole models, and the ratio of each result by its row and share."""
    found = {}
    for run in figures["runs"]:
        title = run["title"]
        name = title.replace(",", "").replace(" ", "_").replace("-", "_")
        if title in (DENSE, MADE, FULL):
            found[name] = perplexity(figures, title)
            continue
        if "task" in run:
            found[name] = f"{run['task']['acc,none']:.1%}"
            continue
        for key in run["losses"]:
            found[f"{name}_{key}".replace(".", "_")] = f"{ratio(figures, title, key).value:.3f}"
    return found


TABLES = {f"pretrained_mixture_{way}": table for way in WAYS}
IN_TEXT = {f"pretrained_mixture_{way}": in_text for way in WAYS}


def arguments_of(options: argparse.Namespace) -> Sequence[str]:
    """Return the arguments that a worker needs."""
    named = [(f"--{name}", getattr(options, name)) for name in ("dense", "made", "data", "report", "tasks")]
    sizes = [(f"--{name}", str(getattr(options, name))) for name in ("way", "limit", "windows", "samples")]
    return [options.mixture, *(word for flag, value in (*named, *sizes) if value is not None for word in (flag, value))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mixture", nargs="?", help="directory of the trained mixture")
    parser.add_argument("--way", choices=WAYS, default=WAYS[0], help="the way in which it was made")
    parser.add_argument("--dense", help="the dense model that it was made of")
    parser.add_argument("--made", help="directory of the mixture before its training")
    parser.add_argument("--data", help="text for calibration")
    parser.add_argument("--report", help="text that is measured on")
    parser.add_argument("--tasks", help="a YAML file of a multiple-choice task, as lm-evaluation-harness reads it")
    parser.add_argument("--limit", type=int, default=500, help="examples of the task")
    parser.add_argument("--windows", type=int, default=256, help="windows of 256 tokens")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="sequences of the calibration text")
    parser.add_argument("--rows", help="titles of rows, separated by semicolons; all by default")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if None in (options.mixture, options.dense, options.data, options.report):
        print("give the mixture, --dense, --data and --report", file=sys.stderr)
        sys.exit(NOT_POSSIBLE_HERE)
    for name in ("mixture", "dense", "made", "data", "report", "tasks"):
        given = getattr(options, name)
        if given is not None and Path(given).exists():
            setattr(options, name, str(Path(given).resolve()))
    if options.worker:
        print(json.dumps(run_one(options.worker, options)))
        return
    wholes = [FULL, DENSE] + ([MADE] if options.made else [])
    titles = wholes + [row.title for row in rows(experts_of(options.mixture))]
    titles += [f"{TASK}{title}" for title in (*wholes, *ON_TASK)] if options.tasks else []
    wanted = titles if options.rows is None else [*wholes, *options.rows.split(";")]
    store = RESULTS / f"pretrained_mixture_{options.way}.jsonl"
    missing = [title for title in wanted if title not in {run["title"] for run in remembered(store)}]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda title: in_own_process(title, options, store), missing))
    found = {run["title"]: run for run in remembered(store)}
    save(store.stem, {"runs": [found[title] for title in titles if title in found]})


def in_own_process(title: str, options: argparse.Namespace, store: Path) -> None:
    """Run one row in a process with one thread, and remember it."""
    command = [sys.executable, __file__, *arguments_of(options), "--worker", title]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    remember(store, json.loads(ended.stdout.splitlines()[-1]))
    print(f"{title}: done", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
