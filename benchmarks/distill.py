"""Recipes of distillation from a mixture into a dense student: ROUGE-L, perplexity, time split, peak memory; several seeds.

    python benchmarks/distill.py [--recipes sft,kd,…] [--steps 400] [--seeds 3]
    python benchmarks/distill.py --name distill_ka --recipes ka --ka-samples 1,2,4 --ka-probability 0.0,0.05,0.2
    python benchmarks/distill.py --name distill_k --recipes kd --experts-per-token 1,2,4,8
    python benchmarks/distill.py --name distill_sar --recipes sar --router-learning-rate 1e-5,1e-4,1e-3

The teacher is the demo model. The student has every second layer of the dense model of the teacher's most used experts (1
FFN a layer), distilled from it on text. Both are first fine-tuned on prompts with responses that the script makes from the
standard library: a function's name and the first sentence of its docstring; its signature. Then every recipe has the same
number of updates of the student. ROUGE-L is measured on sampled responses to held-out prompts, perplexity on the data's
responses. `--experts-per-token` gives the teacher other numbers of experts (the paper's figure 2). Each finished run is a
line of results/NAME.jsonl and is not repeated.
"""

from __future__ import annotations

import argparse
import ast
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from results import BUILD, RESULTS, ROOT, markdown, mean_and_spread, remember, remembered, save
from safetensors.torch import load_file, save_file

from calibrate.text import load_documents

RECIPES = ("sft", "kd", "gkd", "all", "ka", "sar")
BATCH_SIZE = 16
LIMITS = ["--max-length", "160", "--max-prompt-length", "96"]
KEPT = ("response_perplexity_before", "response_perplexity_after", "time_share", "peak_memory_bytes", "seconds")
SELECT = ["--select-by", "rouge-l", "--validate-every", "100", "--batch-size", str(BATCH_SIZE)]
INSTRUCTION = "Write the signature of this function."


def examples() -> Iterator[dict[str, str]]:
    """Yield public functions of the standard library that have a docstring."""
    for text in load_documents("stdlib"):
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


def every_second_layer(model: Path, made: Path) -> None:
    """Write a dense model with half the layers. Its tensors keep their names except for the layers' numbers."""
    prefix, kept = "model.layers.", {}
    for name, tensor in load_file(model / "model.safetensors").items():
        layer, _, rest = name.removeprefix(prefix).partition(".")
        if not name.startswith(prefix):
            kept[name] = tensor
        elif int(layer) % 2 == 0:
            kept[f"{prefix}{int(layer) // 2}.{rest}"] = tensor
    shutil.copytree(model, made, ignore=shutil.ignore_patterns("*.safetensors", "compression.json", "*.png", "README.md"))
    save_file(kept, made / "model.safetensors", {"format": "pt"})
    config = json.loads((made / "config.json").read_text())
    config["num_hidden_layers"] = (config["num_hidden_layers"] + 1) // 2
    (made / "config.json").write_text(json.dumps(config))


def run(*command: str) -> dict[str, Any]:
    """Run a `compress` command in its own process."""
    done = subprocess.run([sys.executable, "-m", "cli", *command, "--json"], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    values: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return values


class Benchmark:
    """One set of options, and the file of finished runs."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.lines = RESULTS / f"{arguments.name}.jsonl"
        self.done = remembered(self.lines)
        self.work = BUILD / "distill"
        self.work.mkdir(parents=True, exist_ok=True)
        self.data = self.work / "signatures.jsonl"
        if not self.data.exists():
            self.data.write_text("".join(json.dumps(row) + "\n" for row in examples()))
        self.samples = ["--validation-samples", str(arguments.samples // 2), "--evaluation-samples", str(arguments.samples)]
        self.common = ["--data", str(self.data), *LIMITS, "--threads", str(arguments.threads)]

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
            run("distill", *pair, *text, "-o", str(of_text))
        made = []
        for name, model, steps in (
            ("teacher", "demo", self.arguments.teacher_steps),
            ("student", str(of_text), self.arguments.student_steps),
        ):
            made.append(self.work / name)
            if not made[-1].exists():
                own = ["--learning-rate", "0.002", "--steps", str(steps), *self.samples[2:]]
                figures = run("distill", "--student", model, "--recipe", "sft", *own, *self.common, "-o", str(made[-1]))
                self.figures_of(name).write_text(json.dumps(figures))
        return made[0], made[1]

    def figures_of(self, name: str) -> Path:
        """Return the file with the figures of "teacher" or "student" when it was made."""
        return self.work / f"{name}.json"

    def teacher_of(self, teacher: Path, experts: int | None) -> Path:
        """Return the teacher with another number of experts for each token."""
        if experts is None:
            return teacher
        made = self.work / f"teacher-{experts}"
        if not made.exists():
            shutil.copytree(teacher, made, ignore=shutil.ignore_patterns("compression.json", "*.png", "README.md"))
            config = json.loads((made / "config.json").read_text()) | {"num_experts_per_tok": experts}
            (made / "config.json").write_text(json.dumps(config))
        return made

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
        for name, model in (("teacher", teacher), ("student", student)):
            if not self.known({"recipe": name}, 0):
                self.record({"recipe": name}, 0, model, json.loads(self.figures_of(name).read_text()))
        for seed in range(self.arguments.seeds):
            for row in self.rows():
                if self.known(row, seed):
                    continue
                output = self.work / "result"
                recipe = ["--recipe", row["recipe"], "--student", str(student), "--seed", str(seed)]
                if row["recipe"] != "sft":
                    recipe += ["--teacher", str(self.teacher_of(teacher, row["experts"]))]
                if row["recipe"] == "ka":
                    recipe += ["--ka-samples", str(row["samples"]), "--ka-probability", str(row["probability"])]
                if row["router"] is not None:
                    recipe += ["--router-learning-rate", str(row["router"])]
                steps = ["--steps", str(self.arguments.steps), "--learning-rate", str(self.arguments.learning_rate)]
                figures = run(
                    "distill", *recipe, *steps, *SELECT, *self.samples, *self.common, "-o", str(output), "--overwrite"
                )
                self.record(row, seed, output, figures)
                shutil.rmtree(output)

    def known(self, row: dict[str, Any], seed: int) -> bool:
        """Return whether a run is finished."""
        return any(line["seed"] == seed and all(line.get(name) == own for name, own in row.items()) for line in self.done)

    def record(self, row: dict[str, Any], seed: int, model: Path, figures: dict[str, Any]) -> None:
        """Measure a run's model and append a line to the file."""
        rouge = run("evaluate", str(model), "--metric", "rouge-l", "--samples", str(self.arguments.samples), *self.common)
        kept = {name: figures.get(name) for name in KEPT}
        line = row | {"seed": seed, "rouge_l": rouge["value"], "rouge_l_values": rouge["values"]} | kept
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
    return f"{note}prompts, {seeds} seed(s), {threads}.\n\n{markdown(header, rows)}"


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


IN_TEXT = {"distill": quoted}
TABLES = dict.fromkeys(("distill", "distill_k", "distill_ka", "distill_sar"), table)


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
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--learning-rate", type=float, default=0.001)
    parser.add_argument("--teacher-steps", type=int, default=600)
    parser.add_argument("--student-steps", type=int, default=100)
    parser.add_argument("--text-steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=512, help="held-out prompts; half as many select the best state")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--name", default="distill", choices=TABLES)
    arguments = parser.parse_args()
    benchmark = Benchmark(arguments)
    benchmark.run()
    figures = {"steps": arguments.steps, "batch_size": BATCH_SIZE, "threads": arguments.threads, "lines": benchmark.done}
    save(arguments.name, figures)


if __name__ == "__main__":
    main()
