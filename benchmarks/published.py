"""The whole protocol on one checkpoint: what each method costs in quality, and what the results gain in size and speed.

    python benchmarks/published.py MODEL --data TEXT --tasks hellaswag,arc_easy,winogrande
    python benchmarks/published.py Qwen/Qwen3-30B-A3B --data TEXT --plan

MODEL is a directory or the id of a checkpoint on the hub. Each method prunes it at each sparsity. The whole
model and every result are measured in turn: perplexity on the half of the held-out text that nothing was chosen on, tasks of
lm-evaluation-harness, tokens/s and memory. A result is removed once it is measured (`--keep` keeps it), so that the disk
holds one beside the model. The page starts with what `compress plan-run` says: hours and memory. `--plan` stops there.

OUTPUT/README.md is the page. It is written anew after every step, and OUTPUT/steps.jsonl holds the JSON of each step that
has ended. A run that was interrupted goes on with the first step that has not.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from results import BUILD, ROOT, markdown, record, remember, remembered

from compress.methods import METHODS
from engine.files.gguf_file import is_gguf

WHOLE = "whole model"
METHODS_TRIED = ("frequency", "reap", "naee", "fisher", "unit-magnitude", "unit-obs", "unit-fisher")
"""Methods by default; DiEP's search needs about ten times the time of all of them, and is run when it is named."""
PLAN, CALIBRATE, PRUNE, PERPLEXITY, TASKS, SPEED = "plan", "calibrate", "prune", "perplexity", "tasks", "speed"


class Result(NamedTuple):
    """One pruned model: its method and sparsity. Every expert keeps the same width if units leave, a plain checkpoint."""

    method: str
    sparsity: float
    is_uniform: bool

    @property
    def title(self) -> str:
        """Return the name of its row, and of its directory."""
        return f"{self.method}{'-uniform' if self.is_uniform else ''}-{self.sparsity:g}"


class Protocol:
    """The steps of one run, and what those that have ended said."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.model = absolute(arguments.model)
        self.output: Path = (arguments.output or BUILD / "published" / Path(arguments.model).name).resolve()
        self.tasks = None if arguments.tasks is None else ",".join(map(absolute, arguments.tasks.split(",")))
        self.keep: bool = arguments.keep
        self.speed = ["-p", str(arguments.prompt_tokens), "-n", str(arguments.generated_tokens)]
        self.speed += ["-r", str(arguments.repetitions)]
        self.limit = [] if arguments.limit is None else ["--limit", str(arguments.limit)]
        self.machine = [] if arguments.memory_limit is None else ["--memory-limit", arguments.memory_limit]
        self.sizes = ["--samples", str(arguments.samples)]
        if arguments.sequence_length is not None:
            self.sizes += ["--sequence-length", str(arguments.sequence_length)]
        self.text = ["--data", absolute(arguments.data), *self.sizes]
        self.results = list(results_of(arguments.methods, arguments.sparsity))
        self.file = self.output / "steps.jsonl"
        self.said: dict[tuple[str, str], dict[str, Any]] = {}
        self._begin(vars(arguments))

    def _begin(self, asked: dict[str, Any]) -> None:
        """Read the steps that an interrupted run has finished. Ends the script if that run was asked for something else."""
        asked = {key: str(value) for key, value in asked.items() if key not in ("output", "keep", "plan")}
        self.first: dict[str, Any] = {"asked": asked, "record": record()}
        lines = remembered(self.file)
        if lines and lines[0]["asked"] != asked:
            sys.exit(f"{self.file}: belongs to a run with other arguments; give another --output")
        self.said = {(line["row"], line["step"]): line["figures"] for line in lines[1:]}

    def step(self, row: str, step: str, command: Sequence[str]) -> dict[str, Any]:
        """Return the JSON of a command, which is run unless an earlier run has finished it. Ends the script if it fails."""
        if (row, step) not in self.said:
            print(f"{row}: {step}", file=sys.stderr, flush=True)
            done = subprocess.run([sys.executable, "-m", "cli", *command, "--json"], cwd=ROOT, stdout=subprocess.PIPE)
            if done.returncode:
                sys.exit(f"{row}: {step} failed; the command was: compress {' '.join(command)}")
            self.said[row, step] = json.loads(done.stdout.splitlines()[-1])
            if not self.file.exists():
                remember(self.file, self.first)
            commit = self.first["record"]["commit"]
            remember(self.file, {"row": row, "step": step, "commit": commit, "figures": self.said[row, step]})
            (self.output / "README.md").write_text(self.page())
        return self.said[row, step]

    def run(self, only_plan: bool) -> None:
        """Run every step that has not ended."""
        for result in self.results:
            sizes = [self.model, "--method", result.method, "--sparsity", f"{result.sparsity:g}", *self.sizes]
            self.step(result.title, PLAN, ["plan-run", *sizes])
        if only_plan:
            return
        self.measure(WHOLE, self.model)
        statistics = self.output / "statistics.safetensors"
        asked = [self.model, "-o", str(statistics), *self.text, *self.machine]
        self.step(WHOLE, CALIBRATE, ["calibrate", *asked, "--overwrite" if statistics.exists() else "--resume"])
        for result in self.results:
            directory = self.output / result.title
            if (result.title, SPEED) not in self.said:
                self.step(result.title, PRUNE, ["prune", *self.prune_options(result, directory, statistics)])
                self.measure(result.title, str(directory))
            if not self.keep:
                shutil.rmtree(directory, ignore_errors=True)

    def prune_options(self, result: Result, directory: Path, statistics: Path) -> list[str]:
        """Return the options of `compress prune` for one result. Statistics of experts are shared by all methods."""
        options = [self.model, "-o", str(directory), "--method", result.method, "--sparsity", f"{result.sparsity:g}"]
        options += [*self.text, *self.machine, "--evaluation-samples", "0"]
        options += ["--uniform"] if result.is_uniform else []
        if METHODS[result.method].granularity == "expert":
            options += ["--statistics", str(statistics)]
        return [*options, "--overwrite" if directory.exists() else "--resume"]

    def measure(self, row: str, model: str) -> None:
        """Measure one model: perplexity, tasks if any were named, tokens/s and memory."""
        self.step(row, PERPLEXITY, ["evaluate", model, *self.text, "--split", "report", *self.machine])
        if self.tasks is not None:
            self.step(row, TASKS, ["evaluate", model, "--tasks", self.tasks, *self.limit])
        self.step(row, SPEED, ["bench", model, *self.speed])

    def page(self) -> str:
        """Return the page of the steps that have ended."""
        first, *steps = remembered(self.file) or [self.first]
        machine, name = first["record"]["machine"], self.model.removeprefix(str(ROOT) + "/")
        commits = ", ".join(dict.fromkeys(step["commit"] for step in steps))
        where = f"{machine['processor']}, {machine['cores']} cores, begun on {first['record']['date']}, at {commits}"
        return f"# {name}, pruned\n\n{where}.\n\n## The run\n\n{self.plan_table()}\n## Results\n\n{self.results_table()}"

    def plan_table(self) -> str:
        """Return what each result's pruning was expected to need, and what it took."""
        rows = []
        for result in self.results:
            plan, took = (self.said.get((result.title, step)) for step in (PLAN, PRUNE))
            if plan is not None:
                cells = [f"{each['seconds'] / 3600:.2f}" if each else "–" for each in (plan, took)]
                cells += [f"{each['peak_memory_bytes'] / 1e9:.1f}" if each else "–" for each in (plan, took)]
                rows.append([result.title, *cells])
        return markdown(["prune", "planned hours", "hours", "planned peak, GB", "peak, GB"], rows)

    def results_table(self) -> str:
        """Return a row for each model that was measured."""
        names = sorted({task for (_, step), said in self.said.items() if step == TASKS for task in said["value"]})
        rows = []
        for row in (WHOLE, *(result.title for result in self.results)):
            text, tasks, speed = (self.said.get((row, step)) for step in (PERPLEXITY, TASKS, SPEED))
            if text is None:
                continue
            cells = [f"{text['value']:.2f} ± {text['value_stderr']:.2f}"]
            cells += [accuracy(tasks["value"].get(name)) if tasks else "–" for name in names]
            rates = {each["test"]: each for each in speed["rows"]} if speed else {}
            cells += [f"{each['tokens_per_second_mean']:.1f}" for each in rates.values()] or ["–", "–"]
            last = next(reversed(rates.values()), None)
            cells += [f"{last[key] / 1e9:.2f}" if last else "–" for key in ("weights_bytes", "peak_memory_bytes")]
            rows.append([row, *cells])
        header = ["model", "perplexity", *names, "prompt t/s", "decode t/s", "weights, GB", "peak, GB"]
        return markdown(header, rows)


def results_of(methods: Sequence[str], sparsities: Sequence[float]) -> Iterator[Result]:
    """Yield each result: units of other widths by expert, and of one width, by each method of hidden units."""
    for method in methods:
        for sparsity in sparsities:
            yield Result(method, sparsity, is_uniform=False)
            if METHODS[method].granularity == "unit":
                yield Result(method, sparsity, is_uniform=True)


def absolute(name: str) -> str:
    """Return the absolute path of a file or directory that exists, and any other name as it is: commands run elsewhere."""
    return str(Path(name).resolve()) if Path(name).exists() else name


def accuracy(scores: dict[str, float] | None) -> str:
    """Return a task's first figure with its standard error: of accuracies in percent, the normalized one if there is one."""
    if not scores:
        return "–"
    metric = next((key for key in ("acc_norm,none", "acc,none") if key in scores), next(iter(scores)))
    error = scores.get(metric.replace(",", "_stderr,"))
    scale = 100 if metric.startswith("acc") else 1
    return f"{scale * scores[metric]:.1f}" + (f" ± {scale * error:.1f}" if isinstance(error, float) else "")


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the arguments. Ends the script for those that cannot be met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a directory or the id of a checkpoint on the hub")
    parser.add_argument("--data", required=True, help="text of calibration and perplexity, as for compress prune")
    parser.add_argument("--tasks", help="of lm-evaluation-harness: names or YAML files, separated by commas")
    parser.add_argument("--limit", type=int, help="examples of each task; by default all")
    parser.add_argument("--methods", type=lambda text: text.split(","), default=list(METHODS_TRIED))
    parser.add_argument("--sparsity", type=lambda text: [float(each) for each in text.split(",")], default=[0.25, 0.5])
    parser.add_argument("--samples", type=int, default=128, help="sequences of the text")
    parser.add_argument("--sequence-length", type=int, help="tokens of each; by default that of compress prune")
    parser.add_argument("--memory-limit", help="of calibration, pruning and perplexity, such as 64GB")
    parser.add_argument("-p", "--prompt-tokens", type=int, default=512)
    parser.add_argument("-n", "--generated-tokens", type=int, default=128)
    parser.add_argument("-r", "--repetitions", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path, help="by default build/published/NAME")
    parser.add_argument("--keep", action="store_true", help="keep every result")
    parser.add_argument("--plan", action="store_true", help="only say the hours and the memory that the run needs")
    arguments = parser.parse_args(words)
    if is_gguf(Path(arguments.model)):
        parser.error("the results of a GGUF file would have other types than its own; give a directory or an id on the hub")
    if unknown := set(arguments.methods) - METHODS.keys():
        parser.error(f"no method is named {', '.join(sorted(unknown))}; methods are {', '.join(METHODS)}")
    return arguments


def main() -> None:
    arguments = parsed()
    protocol = Protocol(arguments)
    protocol.run(arguments.plan)
    print(protocol.page())


if __name__ == "__main__":
    main()
