"""Recipes of distillation from a mixture into a dense student: ROUGE-L, perplexity, time split, peak memory; several seeds.

    python benchmarks/distill.py [--recipes sft,kd,…] [--steps 400] [--seeds 3]
    python benchmarks/distill.py --name distill_ka --recipes ka --ka-samples 1,2,4 --ka-probability 0.0,0.05,0.2
    python benchmarks/distill.py --name distill_k --recipes kd --experts-per-token 1,2,4,8
    python benchmarks/distill.py --name distill_sar --search-router-rate 1e-5,3e-5,1e-4,3e-4,1e-3 --seeds 5

The teacher is the demo model. The student has every second layer of the dense model of the teacher's most used experts (1
FFN a layer), distilled from it on text. Both are first fine-tuned on prompts with responses that the script makes from the
standard library: a function's name and the first sentence of its docstring; its signature. Prompts are held out with their
documents: those of the figures are from documents that the demo model never read, those that choose a state are from others
of its training text, and none is asked twice. Then every recipe has the same number of updates of the student. ROUGE-L is
measured on sampled responses to held-out prompts, perplexity on the data's responses. `--experts-per-token` gives the
teacher other numbers of experts (the paper's figure 2). `--search-router-rate` looks for the rate of SAR's router at which
SAR is above ALL: every rate with the first seed, the two best rates and ALL with every seed, ROUGE-L of greedy responses,
differences by seed, and the drift of the routers. Each finished run is a line of results/NAME.jsonl and is not repeated.
On a machine without that file, `--go-on` takes the runs of the stored result for it.
"""

from __future__ import annotations

import argparse
import ast
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from results import BUILD, RESULTS, ROOT, markdown, mean_and_spread, remember, remembered, results, save
from safetensors.torch import load_file, save_file

import cli
from calibrate.text import Split, load_documents

RECIPES = ("sft", "kd", "gkd", "all", "ka", "sar")
LIMITS = ["--max-length", "160", "--max-prompt-length", "96"]
KEPT = ("response_perplexity_before", "response_perplexity_after", "time_share", "peak_memory_bytes", "seconds")
DRIFT = ("router_divergence_per_layer", "router_drift_mean_per_layer", "router_drift_max_per_layer")
FILES: dict[str, Split] = {"test": "held-out", "validation": "validation", "train": "training"}
"""Files of prompts, by the option that takes each, and the split of the documents that they are from."""
STUDENT_RATE = 0.001
"""Learning rate of the student, by default."""
CHOOSING_SEED = 0
"""The seed with which a search runs every rate, and by which it chooses those that run with the others too."""
INSTRUCTION = "Write the signature of this function."


def examples(split: Split) -> Iterator[dict[str, str]]:
    """Yield public functions that have a docstring, from the standard library's documents of a split."""
    for text in load_documents("stdlib", split=split):
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                sentence = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                signature = f"def {node.name}({ast.unparse(node.args)}):"
                if sentence and len(sentence) <= 200 and len(signature) <= 120:
                    yield {"instruction": INSTRUCTION, "input": f"{node.name}: {sentence}", "output": signature}


def examples_by_file() -> dict[str, list[dict[str, str]]]:
    """Return the rows of each of FILES. A prompt that is in documents of several splits is in one file, the first."""
    asked: set[str] = set()
    rows: dict[str, list[dict[str, str]]] = {}
    for name, split in FILES.items():
        own = {row["input"]: row for row in examples(split) if row["input"] not in asked}
        asked |= own.keys()
        rows[name] = list(own.values())
    return rows


def spread(rows: list[dict[str, str]], count: int) -> list[dict[str, str]]:
    """Return so many rows, or all if there are fewer, evenly spread over the documents."""
    return [rows[place * len(rows) // count] for place in range(count)] if count < len(rows) else rows


def every_second_layer(model: Path, made: Path) -> None:
    """Write a dense model with half the layers. Its tensors keep their names except for the layers' numbers."""
    prefix, kept = "model.layers.", {}
    for name, tensor in load_file(model / "model.safetensors").items():
        layer, _, rest = name.removeprefix(prefix).partition(".")
        if not name.startswith(prefix):
            kept[name] = tensor
        elif int(layer) % 2 == 0:
            kept[f"{prefix}{int(layer) // 2}.{rest}"] = tensor
    left = ("*.safetensors", "*.index.json", "compression.json", "*.png", "README.md")
    shutil.copytree(model, made, ignore=shutil.ignore_patterns(*left))
    save_file(kept, made / "model.safetensors", {"format": "pt"})
    config = json.loads((made / "config.json").read_text())
    config["num_hidden_layers"] = (config["num_hidden_layers"] + 1) // 2
    (made / "config.json").write_text(json.dumps(config))


def run(*command: str) -> dict[str, Any]:
    """Run a `compress` command in its own process."""
    done = subprocess.run([sys.executable, "-m", "cli", *command, "--json"], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    values: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return values


def run_here(*command: str) -> dict[str, Any]:
    """Run a `compress` command in this process, which saves its start; times and memory are then not those of one run."""
    done = CliRunner().invoke(cli.main, [*command, "--json"], catch_exceptions=False)
    if done.exit_code:
        raise SystemExit(done.output)
    values: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return values


class Benchmark:
    """One set of options, and the file of finished runs."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.lines = RESULTS / f"{arguments.name}.jsonl"
        self.done = remembered(self.lines)
        if arguments.go_on and not self.done:
            self.done = list(results()[arguments.name]["figures"]["lines"])
        steps = (arguments.text_steps, arguments.teacher_steps, arguments.student_steps)
        self.work = BUILD / "-".join(["distill-by-document", *map(str, steps)])
        self.work.mkdir(parents=True, exist_ok=True)
        most = {"test": arguments.prompts, "validation": arguments.validation_prompts}
        self.files = {name: self.work / f"{name}-{most.get(name, 'all')}.jsonl" for name in FILES}
        if not all(path.exists() for path in self.files.values()):
            for name, rows in examples_by_file().items():
                own = spread(rows, most.get(name, len(rows)))
                self.files[name].write_text("".join(json.dumps(row) + "\n" for row in own))
        self.data = [part for name, path in self.files.items() for part in (f"--{name}", str(path))]
        self.common = [*LIMITS, "--threads", str(arguments.threads)]

    def pair(self) -> tuple[Path, Path]:
        """Return (teacher, student), both fine-tuned on the data."""
        dense, half, of_text = (self.work / name for name in ("dense", "half", "student-of-text"))
        threads, steps = ["--threads", str(self.arguments.threads)], self.arguments.text_steps
        if not dense.exists():
            run("densify", "demo", "--ffns", "1", "--distill-steps", str(steps), *threads, "-o", str(dense))
        if not of_text.exists():
            every_second_layer(dense, half)
            text = ["--data", "stdlib", "--sequence-length", "256", "--learning-rate", "0.004", *threads]
            pair = ["--teacher", "demo", "--student", str(half), "--recipe", "kd", "--steps", str(steps // 2)]
            if steps:
                run("distill", *pair, *text, "-o", str(of_text))
            else:
                half.rename(of_text)
        made = []
        for name, model, steps in (
            ("teacher", "demo", self.arguments.teacher_steps),
            ("student", str(of_text), self.arguments.student_steps),
        ):
            made.append(self.work / name)
            if not made[-1].exists():
                own = ["--learning-rate", "0.002", "--steps", str(steps)]
                sft = ["--student", model, "--recipe", "sft", *own, *self.data, *self.common]
                figures = run("distill", *sft, "-o", str(made[-1]))
                self.figures_of(name).write_text(json.dumps(figures))
        return made[0], made[1]

    def figures_of(self, name: str) -> Path:
        """Return the file with the figures of "teacher" or "student" when it was made."""
        return self.work / f"{name}.json"

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the options that distinguish the rows. Each row is run with every seed."""
        options = self.arguments
        for recipe in options.recipes:
            own = {
                "samples": options.ka_samples if recipe == "ka" else [None],
                "probability": options.ka_probability if recipe == "ka" else [None],
                "experts": options.experts_per_token,
                "router": options.router_learning_rate if recipe == "sar" else [None],
            }
            for values in product(*own.values()):
                yield {"recipe": recipe, **dict(zip(own, values, strict=True))}

    def run(self) -> None:
        """Compute every missing figure."""
        teacher, student = self.pair()
        if not self.arguments.search_router_rate:
            for name, model in (("teacher", teacher), ("student", student)):
                if not self.known({"recipe": name}, 0):
                    self.record({"recipe": name}, 0, model, json.loads(self.figures_of(name).read_text()))
        for seed in range(self.arguments.seeds):
            for row in self.rows():
                if self.known(row, seed) or not self.goes_on(row, seed):
                    continue
                output = self.work / f"result-{self.arguments.name}"
                execute = run_here if self.arguments.search_router_rate else run
                figures = execute("distill", *self.command(row, seed, teacher, student), "-o", str(output), "--overwrite")
                self.record(row, seed, output, figures)
                shutil.rmtree(output)

    def goes_on(self, row: dict[str, Any], seed: int) -> bool:
        """Return whether a row is run with a seed: after the first seed, only the best rates of the search are."""
        searched = [
            line
            for line in self.done
            if line["seed"] == CHOOSING_SEED and line.get("router") in self.arguments.search_router_rate
        ]
        best = sorted(searched, key=lambda line: -line["rouge_l"])[: self.arguments.best]
        return (
            seed == CHOOSING_SEED
            or row["router"] is None
            or not searched
            or row["router"] in [line["router"] for line in best]
        )

    def command(self, row: dict[str, Any], seed: int, teacher: Path, student: Path) -> list[str]:
        """Return the options of `compress distill` for a row and a seed."""
        own = self.arguments
        command = ["--recipe", row["recipe"], "--student", str(student), "--seed", str(seed)]
        if row["recipe"] != "sft":
            command += ["--teacher", str(teacher)]
        if row["experts"] is not None:
            command += ["--teacher-experts", str(row["experts"])]
        if row["recipe"] == "ka":
            command += ["--ka-samples", str(row["samples"]), "--ka-probability", str(row["probability"])]
        if row["router"] is not None:
            command += ["--router-learning-rate", str(row["router"])]
        command += ["--steps", str(own.steps), "--learning-rate", str(own.learning_rate)]
        command += ["--batch-size", str(own.batch_size)]
        command += ["--select-by", "rouge-l", "--validate-every", str(min(100, own.steps))]
        return [*command, *self.data, *self.common]

    def known(self, row: dict[str, Any], seed: int) -> bool:
        """Return whether a run is finished."""
        return any(line["seed"] == seed and all(line.get(name) == own for name, own in row.items()) for line in self.done)

    def record(self, row: dict[str, Any], seed: int, model: Path, figures: dict[str, Any]) -> None:
        """Measure a run's model and append a line to the file."""
        kept = {name: figures.get(name) for name in KEPT}
        if self.arguments.search_router_rate:  # greedy responses of the run itself: no noise of sampling, and no second load
            kept |= {"rouge_l_before": figures["metric_before"], "rouge_l": figures["metric_after"]}
            kept |= {name: figures[name] for name in DRIFT}
        else:
            test = ["--test", str(self.files["test"])]
            rouge = run("evaluate", str(model), "--metric", "rouge-l", *test, *self.common)
            kept |= {"rouge_l": rouge["value"], "rouge_l_values": rouge["values"]}
        line = row | {"seed": seed} | kept
        self.done.append(line)
        remember(self.lines, line)
        print(line, flush=True)


def label(line: dict[str, Any]) -> str:
    """Return the label of a row of the table."""
    parts = [line["recipe"]]
    if line["recipe"] == "ka":
        parts.append(f"M = {line['samples']}, λ = {line['probability']}")
    if line.get("router"):
        parts.append(f"router at {line['router']:g}")
    if line.get("experts"):
        parts.append(f"k = {line['experts']}")
    return ", ".join(parts)


def table(figures: dict[str, Any]) -> str:
    """Return ROUGE-L in percent and perplexity, mean ± standard deviation over seeds, and the split of the time."""
    rows, done = [], figures["lines"]
    for name in dict.fromkeys(map(label, done)):
        own = [line for line in done if label(line) == name]
        after = [line["response_perplexity_after"] for line in own if line["response_perplexity_after"] is not None]
        shares = [line["time_share"] for line in own if line["time_share"]]
        split = (
            ", ".join(f"{part} {statistics.mean(s.get(part, 0.0) for s in shares):.0%}" for part in shares[0])
            if shares
            else "–"
        )
        seconds = [line["seconds"] for line in own if line["seconds"]]
        peak = [line["peak_memory_bytes"] / 1e9 for line in own if line["peak_memory_bytes"]]
        rows.append(
            [
                name,
                mean_and_spread([100 * line["rouge_l"] for line in own]),
                mean_and_spread(after),
                f"{statistics.mean(seconds):.0f}" if seconds else "–",
                split,
                f"{max(peak):.2f}" if peak else "–",
            ]
        )
    header = ["recipe", "ROUGE-L", "perplexity of responses", "seconds", "share of the time", "peak GB"]
    seeds = len({line["seed"] for line in done})
    threads = "one thread" if figures["threads"] == 1 else f"{figures['threads']} threads"
    note = f"Signatures of functions from name and docstring; {figures['steps']} updates of {figures['batch_size']} "
    return f"{note}prompts, {seeds} {'seed' if seeds == 1 else 'seeds'}, {threads}.\n\n{markdown(header, rows)}"


def quoted(figures: dict[str, Any]) -> dict[str, str]:
    """Return ROUGE-L in percent: how far recipes in which the student writes are above `kd`, and two of seed 0."""
    lines = [line for line in figures["lines"] if not line.get("router")]
    by_recipe = {name: [100 * line["rouge_l"] for line in lines if line["recipe"] == name] for name in RECIPES}
    means = {name: statistics.mean(found) for name, found in by_recipe.items() if found}
    above = [means[name] - means["kd"] for name in ("gkd", "all", "ka", "sar") if name in means]
    first = {line["recipe"]: 100 * line["rouge_l"] for line in lines if line["seed"] == 0}
    return {
        "written_low": f"{min(above):.1f}",
        "written_high": f"{max(above):.1f}",
        "ka_seed_0": f"{first['ka']:.1f}",
        "kd_seed_0": f"{first['kd']:.1f}",
    }


def search_table(figures: dict[str, Any]) -> str:
    """Return ROUGE-L in percent beside that of ALL with the same seed, and the drift of the routers in nats."""
    done = figures["lines"]
    every = {line["seed"]: line for line in done if line["recipe"] == "all"}
    before = [100 * line["rouge_l_before"] for line in every.values()]
    rows = [["student before", mean_and_spread(before), "–", "–", "–", "–"]]
    for name in dict.fromkeys(map(label, done)):
        own = [line for line in done if label(line) == name and line["seed"] in every]
        gains = _gains(own, every)
        error = f" ± {statistics.stdev(gains) / len(gains) ** 0.5:.2f}" if len(gains) > 1 else ""
        compared = own[0]["recipe"] != "all"
        drifts = [line["router_drift_mean_per_layer"] for line in own if line["router_drift_mean_per_layer"]]
        rows.append(
            [
                name,
                mean_and_spread([100 * line["rouge_l"] for line in own]),
                f"{statistics.mean(gains):+.2f}{error}" if compared else "–",
                f"{sum(gain > 0 for gain in gains)} of {len(gains)}" if compared else "–",
                *(f"{statistics.mean(drift[place] for drift in drifts):.2g}" if drifts else "–" for place in (0, -1)),
            ]
        )
    header = ["recipe", "ROUGE-L", "above all", "seeds above all", "drift, first layer", "drift, last layer"]
    note = (
        f"Signatures of functions from name and docstring; {figures['steps']} updates of {figures['batch_size']} prompts, "
        f"every rate with the first of {len(every)} seeds, the best ones with all. ROUGE-L of greedy responses to "
        f'{figures["prompts"]} prompts. "Above all" leaves the first seed out where there are others, because it chose the '
        "rates.\n\n"
    )
    return note + markdown(header, rows)


def _gains(own: Sequence[dict[str, Any]], every: Mapping[int, dict[str, Any]]) -> list[float]:
    """Return the points of ROUGE-L above `all` with the same seed; without the first seed, if there are others."""
    judged = [line for line in own if line["seed"] != CHOOSING_SEED] or own
    return [100 * (line["rouge_l"] - every[line["seed"]]["rouge_l"]) for line in judged]


def searched(figures: dict[str, Any]) -> dict[str, str]:
    """Return by how many points `sar` with the router at the student's rate is above `all`, with how many seeds, and how
    many times as far a layer's router then drifts as at the lowest rate, the least and the most over layers of a seed.
    """
    every = {line["seed"]: line for line in figures["lines"] if line["recipe"] == "all"}
    gains = _gains([line for line in figures["lines"] if line["router"] == STUDENT_RATE], every)
    error = statistics.stdev(gains) / len(gains) ** 0.5
    above = sum(gain > 0 for gain in gains)
    drifts = {(line["router"], line["seed"]): line["router_drift_mean_per_layer"] for line in figures["lines"]}
    lowest = min(rate for rate, _ in drifts if rate is not None)
    seeds = [seed for rate, seed in drifts if rate == lowest]
    further = [a / b for seed in seeds for a, b in zip(drifts[STUDENT_RATE, seed], drifts[lowest, seed], strict=True)]
    low, high = (f"{float(f'{found:.2g}'):,.0f}" for found in (min(further), max(further)))
    said = {"gain": f"{statistics.mean(gains):.1f}", "error": f"{error:.1f}", "above": f"{above} of {len(gains)}"}
    return said | {"drift_low": low, "drift_high": high}


TABLES = dict.fromkeys(("distill", "distill_k", "distill_ka"), table) | {"distill_sar": search_table}
IN_TEXT = {"distill": quoted, "distill_sar": searched}


def numbers(kind: type) -> Any:
    """Return a parser of several numbers, separated by commas."""
    return lambda text: [kind(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", type=numbers(str), default=list(RECIPES))
    parser.add_argument("--ka-samples", type=numbers(int), default=[2])
    parser.add_argument("--ka-probability", type=numbers(float), default=[0.05])
    parser.add_argument("--experts-per-token", type=numbers(int), default=[None])
    parser.add_argument("--router-learning-rate", type=numbers(float), default=[None])
    parser.add_argument("--search-router-rate", type=numbers(float), default=[])
    parser.add_argument("--best", type=int, default=2, help="rates of the search that are run with every seed")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--learning-rate", type=float, default=STUDENT_RATE)
    parser.add_argument("--teacher-steps", type=int, default=600)
    parser.add_argument("--student-steps", type=int, default=100)
    parser.add_argument("--text-steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=512, help="held-out prompts of ROUGE-L")
    parser.add_argument("--validation-prompts", type=int, default=256)
    parser.add_argument("--name", default="distill", choices=TABLES)
    parser.add_argument(
        "--go-on", action="store_true", help="keep the runs of the stored result, and run those that it lacks"
    )
    arguments = parser.parse_args()
    if arguments.search_router_rate:
        arguments.recipes, arguments.router_learning_rate = ["all", "sar"], arguments.search_router_rate
    benchmark = Benchmark(arguments)
    benchmark.run()
    settings = {name: getattr(arguments, name) for name in ("steps", "batch_size", "threads")}
    prompts = len(benchmark.files["test"].read_text().splitlines())
    save(arguments.name, settings | {"prompts": prompts, "lines": benchmark.done})


if __name__ == "__main__":
    main()
