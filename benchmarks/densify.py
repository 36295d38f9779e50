"""Dense models made from a mixture: perplexity by number of FFNs, selection of experts and training, against scratch.

    python benchmarks/densify.py [--model demo] [--ffns 2,1,4] [--selects usage,reap,…] [--steps 300]

A row is one dense model: untrained, after `--steps` of distillation, and after as many steps of fine-tuning;
`scratch` is the same dense architecture from random weights, trained for the same total of steps on the text alone; `paper`
is `usage` with the paper's loss, without the mixture's predictions. Training text, its order and the held-out text are the
same for all rows of a seed. The held-out text is 256 windows of those documents on which nothing was chosen. Each finished
figure is a line of results/NAME.jsonl and is not computed again. Interrupted trainings are resumed.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from held_out import LENGTH, WINDOWS, measured, windows_of
from results import BUILD, RESULTS, markdown, mean_and_spread, remember, remembered, save

from calibrate.batches import calibration_texts, training_text
from calibrate.collect import collect
from calibrate.options import CalibrationOptions
from compress.dense.block_error import shared_gates
from compress.dense.dense_plan import choose, dense_plan
from compress.dense.dense_student import dense_student, student_parameters
from compress.dense.dense_training import train_dense
from compress.options.densify import SELECTIONS
from compress.options.training import DenseTrainingOptions
from compress.report import canvas
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_directory import resolve
from engine.checkpoint.tokenizer import load_tokenizer
from engine.decoder.model import Decoder

SCRATCH, PAPER = "scratch", "paper"
SELECTS = [*SELECTIONS, PAPER, SCRATCH]
STAGES = ("untrained", "distilled", "fine-tuned")


class Benchmark:
    """One model, one set of options, and the file of finished figures."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.lines = RESULTS / f"{arguments.name}.jsonl"
        self.done = remembered(self.lines)
        self.checkpoint = Checkpoint(resolve(arguments.model))
        self.work = BUILD / arguments.name
        self.held_out = windows_of(arguments.model, "report")

    def figure(self, **key: Any) -> float | None:
        """Return an earlier measurement, or None if there is none."""
        found = [line["perplexity"] for line in self.done if all(line[name] == value for name, value in key.items())]
        return found[0] if found else None

    def record(self, decoder: Decoder, seconds: float, **key: Any) -> None:
        """Measure a model on the held-out text and append a line to the file."""
        line = key | measured(decoder, self.held_out) | {"seconds": seconds}
        self.done.append(line)
        remember(self.lines, line)
        print(line, flush=True)

    def run(self) -> None:
        """Compute every missing figure."""
        for seed in range(self.arguments.seeds):
            texts = Texts(self.checkpoint, self.arguments, seed)
            if self.figure(select="teacher", seed=seed) is None:
                mixture = Decoder(self.checkpoint.config, self.checkpoint.weights(self.checkpoint.model_dtype))
                self.record(mixture, 0.0, ffns=0, select="teacher", stage=STAGES[0], seed=seed)
            for ffns in self.arguments.ffns:
                for select in self.arguments.selects:
                    self.row(texts, ffns, select, seed)

    def row(self, texts: Texts, ffns: int, select: str, seed: int) -> None:
        """Compute the stages of one dense model, each from the state of the previous one."""
        key, work = {"ffns": ffns, "select": select, "seed": seed}, self.work / f"{ffns}-{select}-{seed}"
        stages = STAGES[2:] if select == SCRATCH else STAGES
        if all(self.figure(stage=stage, **key) is not None for stage in stages):
            return
        plan = texts.plan("usage" if select in (SCRATCH, PAPER) else select, ffns)
        work.mkdir(parents=True, exist_ok=True)
        for stage in stages:
            if self.figure(stage=stage, **key) is not None:
                continue
            started = time.monotonic()
            student = dense_student(plan, self.checkpoint, self.checkpoint.model_dtype)
            if select == SCRATCH:
                forget(student, seed)
            options = training_options(self.arguments, stage, select, seed)
            if options.steps:
                train_dense(
                    plan,
                    self.checkpoint,
                    texts.training_SL,
                    texts.validation_VL,
                    options,
                    dtype=self.checkpoint.model_dtype,
                    directory=work,
                    resume=True,
                    student=student,
                )
            self.record(student, time.monotonic() - started, stage=stage, **key)
        shutil.rmtree(work)


class Texts:
    """The texts of a seed, and plans from one calibration on them."""

    def __init__(self, checkpoint: Checkpoint, arguments: argparse.Namespace, seed: int) -> None:
        tokenizer = load_tokenizer(checkpoint)
        calibration = CalibrationOptions("stdlib", 128, LENGTH, 0, seed)
        self.tokens_SL, _ = calibration_texts(calibration, tokenizer, checkpoint.config.vocabulary_size)
        sequences = 2 * arguments.steps * arguments.batch_size
        self.training_SL, self.validation_VL = training_text(calibration, tokenizer, sequences, 32)
        self.checkpoint, self.seed = checkpoint, seed
        self.statistics = collect(checkpoint, self.tokens_SL, dtype=checkpoint.model_dtype, seed=seed)
        self.gates = shared_gates(checkpoint, self.tokens_SL[:16], dtype=checkpoint.model_dtype)

    def plan(self, select: str, ffns: int) -> Any:
        """Return the plan that `compress densify` makes."""
        chosen = choose(select, self.statistics, ffns, self.seed)
        return dense_plan(chosen, self.statistics, self.gates, self.checkpoint)


def training_options(arguments: argparse.Namespace, stage: str, select: str, seed: int) -> DenseTrainingOptions:
    """Return options with the total steps up to a stage. From scratch, all steps are on the text alone."""
    steps = arguments.steps
    common = DenseTrainingOptions(learning_rate=arguments.learning_rate, batch_size=arguments.batch_size, seed=seed)
    if select == PAPER:
        common = replace(common, lambda_supervised=1.0, lambda_layer=1.0, lambda_prediction=0.0)
    if select == SCRATCH:
        common = replace(common, learning_rate=arguments.scratch_learning_rate)
        return replace(common, finetune_steps=2 * steps)
    return replace(common, distill_steps=steps * (stage != STAGES[0]), finetune_steps=steps * (stage == STAGES[2]))


def forget(student: Decoder, seed: int) -> None:
    """Set random weights, as before any training: matrices normal with deviation 0.02, norms and a_i one, biases zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in student_parameters(student).items():
        if parameter.dim() > 1:
            drawn = 0.02 * torch.randn(parameter.shape, generator=generator)
        else:
            drawn = torch.full(parameter.shape, float(not name.endswith(".bias")))
        parameter.data = drawn.to(parameter.dtype)


def table(figures: dict[str, Any]) -> str:
    """Return perplexity by row and stage: mean ± standard deviation over seeds, and the ratio to the teacher's."""
    done, steps = figures["lines"], figures["steps"]
    teacher = statistics.mean(line["perplexity"] for line in done if line["select"] == "teacher")
    rows = []
    made = {(line["ffns"], SELECTS.index(line["select"])) for line in done if line["select"] != "teacher"}
    for ffns, select in ((ffns, SELECTS[place]) for ffns, place in sorted(made)):
        cells = []
        for stage in STAGES:
            own = [d["perplexity"] for d in done if (d["ffns"], d["select"], d["stage"]) == (ffns, select, stage)]
            cells.append(f"{mean_and_spread(own)} ({statistics.mean(own) / teacher:.2f}×)" if own else "–")
        rows.append([f"{ffns} {'FFN' if ffns == 1 else 'FFNs'}, {select}", *cells])
    header = ["", "untrained", f"{steps} distillation steps", f"+ {steps} fine-tuning steps"]
    seeds = len({line["seed"] for line in done})
    note = f"Perplexity on {figures['sequences']} × {figures['length']} held-out tokens, "
    note += f"{seeds} {'seed' if seeds == 1 else 'seeds'}, in brackets its ratio to the mixture's, {teacher:.2f}. "
    errors = [100 * line["perplexity_stderr"] / line["perplexity"] for line in done]
    note += f"Standard errors over documents are {min(errors):.0f} to {max(errors):.0f} %; all rows read the same text. "
    note += f"From scratch: {2 * steps} steps on the text alone.\n\n"
    return note + markdown(header, rows)


def quoted(figures: dict[str, Any]) -> dict[str, str]:
    """Return by how many percent a random choice ends above `usage`, and the ratio of untrained models' perplexity to the
    mixture's, the least and the most.
    """
    done = figures["lines"]
    by_ffns = [[means(done, ffns, name, STAGES[1]) for name in ("random", "usage")] for ffns in sorted(ffns_of(done))]
    worse = [100 * (own / usage - 1) for own, usage in by_ffns if own is not None and usage is not None]
    teacher = statistics.mean(line["perplexity"] for line in done if line["select"] == "teacher")
    made = [line for line in done if line["stage"] == STAGES[0] and line["select"] != "teacher"]
    untrained = [line["perplexity"] / teacher for line in made]
    said = {"random_low": f"{min(worse):.0f}", "random_high": f"{max(worse):.0f}"}
    return said | {"untrained_low": f"{min(untrained):.1f}", "untrained_high": f"{max(untrained):.1f}"}


def ffns_of(done: list[dict[str, Any]]) -> set[int]:
    """Return the numbers of FFNs of the rows."""
    return {line["ffns"] for line in done if line["ffns"]}


TABLES = {"densify": table}
IN_TEXT = {"densify": quoted}


def picture(figures: dict[str, Any], path: Path) -> None:
    """Draw perplexity over the stages, a panel for each number of FFNs, with the mixture's as a line."""
    from matplotlib.figure import Figure

    done = figures["lines"]
    teacher = statistics.mean(line["perplexity"] for line in done if line["select"] == "teacher")
    numbers = sorted(ffns_of(done))
    with canvas.style():
        figure = Figure(figsize=(3.6 * len(numbers), 3.8), layout="constrained")
        panels = figure.subplots(1, len(numbers), sharey=True, squeeze=False)[0]
        for axes, ffns in zip(panels, numbers, strict=True):
            for place, select in enumerate(dict.fromkeys(line["select"] for line in done if line["ffns"] == ffns)):
                own = {stage: means(done, ffns, select, stage) for stage in STAGES}
                points = [(stage, value) for stage, value in own.items() if value is not None]
                axes.plot(*zip(*points, strict=True), marker="o", label=select, color=f"C{place}")
            axes.axhline(teacher, color="#606060", linestyle="--", linewidth=0.8, label="the mixture")
            axes.set_yscale("log")
            axes.tick_params(axis="x", labelsize=8)
            axes.set_title("1 FFN" if ffns == 1 else f"{ffns} FFNs")
        panels[0].set_ylabel("perplexity on held-out text")
        panels[0].set_yticks([10, 20, 50, 100, 200], ["10", "20", "50", "100", "200"])
        panels[0].yaxis.set_minor_formatter("")
        panels[-1].legend(frameon=False, fontsize=8)
        canvas.save(figure, path)


def means(done: list[dict[str, Any]], ffns: int, select: str, stage: str) -> float | None:
    """Return the mean perplexity over seeds, or None if it was not measured."""
    own = [d["perplexity"] for d in done if (d["ffns"], d["select"], d["stage"]) == (ffns, select, stage)]
    return statistics.mean(own) if own else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--ffns", type=lambda text: [int(part) for part in text.split(",")], default=[2, 1, 4])
    parser.add_argument("--selects", type=lambda text: text.split(","), default=SELECTS)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--scratch-learning-rate", type=float, default=2e-3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--name", default="densify", choices=TABLES)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    benchmark = Benchmark(arguments)
    benchmark.run()
    figures = {"steps": arguments.steps, "batch_size": arguments.batch_size, "sequences": WINDOWS, "length": LENGTH}
    figures["lines"] = benchmark.done
    save(arguments.name, figures)
    picture(figures, RESULTS / f"{arguments.name}.png")


if __name__ == "__main__":
    main()
