"""Decode, prefill and load speed of two versions of this project, measured in turn.

    python benchmarks/two_trees.py [OLD] [--pairs 60] [--threads 1]

OLD is a commit or a directory with another checkout; by default the commit of the stored result.

One process of either version keeps a model open, and both compute in turn, about a second each: the demo model, and a random
mixture of 0.37 B parameters in bfloat16 and in 8 and 4 bits. Each pair gives one ratio, new to old, in alternating order. A
row shows the median ratio, its 95 % interval (bootstrap over pairs), and the ratio of the best times. Machines in the cloud
vary by a tenth within seconds, so a difference of 2 % shows only in many pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from random_model import shape, write_random_model
from results import ROOT, STORE, markdown, save

PROMPT, GENERATED = 256, 64
TESTS = ("prefill", "decode")
BITS = (8, 4)
LOADS = 3
RESAMPLES = 2000

WORKER = f"""
import sys, time
started = time.perf_counter()
import torch
from engine import Engine
imported = time.perf_counter()
engine = Engine.open(sys.argv[1], threads=int(sys.argv[2]))
print(time.perf_counter() - imported, flush=True)
torch.manual_seed(0)
tokens = torch.randint(3, engine.checkpoint.config.vocabulary_size, (1, {PROMPT}))
cache = engine.new_cache(1, {PROMPT + GENERATED})
getattr(engine, "prepare", lambda: None)()
for line in sys.stdin:
    test, count = line.split()
    started = time.perf_counter()
    for _ in range(int(count)):
        if test == "prefill":
            cache.length = 0
            engine.prefill(tokens, None, cache)
        else:
            cache.length = {PROMPT}
            for step in range({GENERATED}):
                engine.step(tokens[:, step], None, cache)
    print((time.perf_counter() - started) / int(count), flush=True)
"""


class Version:
    """A process of one version of this project, which runs a script that answers lines."""

    def __init__(self, tree: Path, script: str, *arguments: str, work: Path, **environment: str) -> None:
        """work: the directory that it runs in. environment: further variables."""
        variables = os.environ | {"PYTHONPATH": str(tree)} | environment
        command = [sys.executable, "-c", script, *arguments]
        self._process: Any = subprocess.Popen(
            command, cwd=work, env=variables, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def ask(self, line: str) -> str:
        """Return the answer to a line."""
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> str:
        """Return the next line that it prints. Raises SystemExit if it has ended."""
        line: str = self._process.stdout.readline()
        if not line:
            raise SystemExit("a worker ended; its error is above")
        return line

    def stop(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait()


class Worker(Version):
    """A process of one version that keeps a model open and computes when it is asked to."""

    def __init__(self, tree: Path, model: str, threads: int, work: Path) -> None:
        super().__init__(tree, WORKER, model, str(threads), work=work, COMPRESS_KERNELS="compiled")
        self.load_seconds = float(self.answer())

    def seconds(self, test: str, count: int) -> float:
        """Return the mean duration of so many runs of a test."""
        return float(self.ask(f"{test} {count}"))


def paired(trees: dict[str, Path], model: str, pairs: int, threads: int, work: Path) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each test, by tree, in the order of pairs."""
    workers = {name: Worker(tree, model, threads, work) for name, tree in trees.items()}
    found: dict[str, dict[str, list[float]]] = {}
    for test in TESTS:
        once = max(worker.seconds(test, 1) for worker in workers.values())  # the second time is warm
        once = max(worker.seconds(test, 1) for worker in workers.values())
        count = max(1, round(1.0 / once))
        found[test] = {name: [] for name in workers}
        for number in range(pairs):
            for name in sorted(workers, reverse=number % 2 == 1):
                found[test][name].append(workers[name].seconds(test, count))
    for worker in workers.values():
        worker.stop()
    return found


def loads(trees: dict[str, Path], model: str, threads: int, work: Path) -> dict[str, list[float]]:
    """Return the seconds of opening the model in fresh processes, in turn."""
    found: dict[str, list[float]] = {name: [] for name in trees}
    for _ in range(LOADS):
        for name, tree in trees.items():
            worker = Worker(tree, model, threads, work)
            found[name].append(worker.load_seconds)
            worker.stop()
    return found


def row_of(figures: dict[str, Any], row: dict[str, Any]) -> list[str]:
    """Return the cells of one test."""
    old, new, test = np.array(row["old_seconds"]), np.array(row["new_seconds"]), row["test"]
    ratios = old / new
    drawn = np.random.default_rng(0).integers(len(ratios), size=(RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(ratios[drawn], axis=1), (0.025, 0.975))
    tokens = figures["tokens"].get(test)
    shown = [f"{np.median(each):.3f} s" if tokens is None else f"{tokens / np.median(each):,.0f}" for each in (old, new)]
    best = old.min() / new.min()
    columns = [f"{np.median(ratios):.3f}", f"{low:.3f} to {high:.3f}", f"{best:.3f}"]
    unit = "load" if tokens is None else f"{test}, tokens/s"
    return [f"{row['model']}: {unit}", *shown, *columns]


def table(figures: dict[str, Any]) -> str:
    """Return a row for each model and test."""
    header = ["model and test", "old", "new", "speed of new to old", "95 % interval", "best to best"]
    return markdown(header, [row_of(figures, row) for row in figures["rows"]])


TABLES = {"two_trees": table}
IN_TEXT = {"two_trees": lambda figures: {"old_commit": figures["old_commit"][:7]}}


@contextmanager
def checkout(old: str | None) -> Iterator[tuple[Path, str]]:
    """Yield the directory of the other version and its commit: OLD if it is a directory, otherwise a worktree of it."""
    if old is not None and Path(old).is_dir():
        yield Path(old).resolve(), git("rev-parse", "--short=10", "HEAD", place=Path(old))
        return
    commit = old or json.loads((STORE / "two_trees.json").read_text())["figures"]["old_commit"]
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch) / "old"
        git("worktree", "add", "--detach", str(place), commit)
        try:
            yield place, git("rev-parse", "--short=10", "HEAD", place=place)
        finally:
            git("worktree", "remove", "--force", str(place))


def git(*words: str, place: Path = ROOT) -> str:
    """Return the output of git in a directory. Raises CalledProcessError if it fails."""
    return subprocess.run(["git", *words], cwd=place, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", nargs="?", help="a commit or a directory; by default the commit of the stored result")
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args()
    figures: dict[str, Any] = {"threads": options.threads, "pairs": options.pairs, "rows": []}
    figures["tokens"] = {"prefill": PROMPT, "decode": GENERATED}
    with tempfile.TemporaryDirectory() as directory, checkout(options.old) as (old, figures["old_commit"]):
        trees = {"old": old, "new": ROOT}
        work = Path(directory)
        models = {"demo": "demo", "random mixture": str(work / "mixture")}
        write_random_model(work / "mixture", shape(hidden=1024, layers=options.layers, experts=8, width=1408))
        for bits in BITS:
            target = work / f"mixture-{bits}"
            command = ["quantize", models["random mixture"], "--bits", str(bits), "--evaluation-samples", "0", "-o", target]
            subprocess.run([sys.executable, "-m", "cli", *map(str, command)], cwd=ROOT, check=True, capture_output=True)
            models[f"random mixture, {bits} bits"] = str(target)
        for name, model in models.items():
            found = paired(trees, model, options.pairs, options.threads, work)
            found["load"] = loads(trees, model, options.threads, work)
            for test, seconds in found.items():
                row = {"model": name, "test": test, "old_seconds": seconds["old"], "new_seconds": seconds["new"]}
                figures["rows"].append(row)
                print(" | ".join(row_of(figures, row)), file=sys.stderr)
    save("two_trees", figures)


if __name__ == "__main__":
    main()
