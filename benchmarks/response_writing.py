"""Responses that a student writes while it is trained: by the compiled kernels in bfloat16, and by torch in its own dtype.

    python benchmarks/response_writing.py [--rounds 5] [--prompts 16] [--lengths 160,512] [--before COMMIT]

The students are the demo model, a mixture, and a dense model of its most used experts, both in float32 as they are trained.
The ways write for the same prompts, in turn, with a sampling temperature of 1 and no end token, so that all write equally
many tokens: all prompts have 96 tokens at most and go up to the length of the row. The bfloat16 copy of the weights is
brought up to date in every round, as in training. `paged_float32` is the way of the kernels in float32, where they multiply
matrices alone and torch computes the attention of each sequence; training does not take it. `before` is this project at
another commit, in a process of its own: by default the last at which every student wrote by torch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from results import ROOT, markdown, save, times
from torch import Tensor
from two_trees import Version, checkout

from calibrate.batches import calibration_texts
from calibrate.instructions import Example
from calibrate.options import CalibrationOptions
from compress.distillation.writer import Writer, write_together
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_directory import DEMO_DIRECTORY
from engine.checkpoint.tokenizer import load_tokenizer
from engine.decoder.model import Decoder
from engine.generation.options import SamplingOptions

LONGEST_PROMPT = 96
BEFORE = "9e8306ab"
"""The last commit at which torch wrote every response."""

WORKER = """
import json, sys, time
import torch
from pathlib import Path
from compress.distillation.responses import write_responses
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.model import Decoder
from engine.generation.options import SamplingOptions
checkpoint = Checkpoint(Path(sys.argv[1]))
student = Decoder(checkpoint.config, checkpoint.weights(torch.float32))
for line in sys.stdin:
    prompts, length = json.loads(line)
    started = time.perf_counter()
    options, generator = SamplingOptions(temperature=1.0), torch.Generator().manual_seed(0)
    examples = write_responses(student, prompts, length, (), options, generator)
    print(sum(len(example.response) for example in examples), time.perf_counter() - started, flush=True)
"""


def loaded(directory: Path) -> Decoder:
    """Return a model in float32."""
    checkpoint = Checkpoint(directory)
    return Decoder(checkpoint.config, checkpoint.weights(torch.float32))


def prompts_of(tokens_SL: Tensor) -> list[list[int]]:
    """Return beginnings of sequences, of different lengths up to LONGEST_PROMPT."""
    return [row[: LONGEST_PROMPT - 2 * number].tolist() for number, row in enumerate(tokens_SL)]


Writing = Callable[[list[list[int]], int], tuple[int, float]]


def written(writer: Callable[..., list[Example]], prompts: list[list[int]], length: int) -> tuple[int, float]:
    """Return the number of tokens of responses and the seconds that they took."""
    started = time.perf_counter()
    examples = writer(prompts, length, (), SamplingOptions(temperature=1.0), torch.Generator().manual_seed(0))
    return sum(len(example.response) for example in examples), time.perf_counter() - started


class Before(Version):
    """Another version of this project, whose process keeps a student and writes when it is asked to."""

    def __call__(self, prompts: list[list[int]], length: int) -> tuple[int, float]:
        """Return the number of tokens of responses and the seconds that they took."""
        tokens, seconds = self.ask(json.dumps([prompts, length])).split()
        return int(tokens), float(seconds)


def measured(
    directory: Path, old: Path | None, prompts: list[list[int]], lengths: Sequence[int], rounds: int
) -> list[dict[str, Any]]:
    """Return tokens a second of each way in each round, a row for each length. `old`: the directory of the other version."""
    student = loaded(directory)
    compiled = Writer(student, torch.bfloat16)
    ways: dict[str, Writing] = {
        "compiled": partial(written, compiled),
        "torch": partial(written, Writer(student)),
        "paged_float32": partial(written, partial(write_together, student)),
    }
    before = None if old is None else Before(old, WORKER, str(directory), work=old)
    if before is not None:
        ways["before"] = before
    rows = []
    for length in lengths:
        for write in ways.values():
            write(prompts[:2], length)
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, write in ways.items():
                tokens, seconds = write(prompts, length)
                found[name].append(tokens / seconds)
        rows.append({"length": length, "dtype": str(compiled.dtype), **found})
    if before is not None:
        before.stop()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--lengths", type=lambda text: [int(part) for part in text.split(",")], default=[160, 512])
    parser.add_argument("--before", default=BEFORE, help="a commit or a directory; empty: none")
    arguments = parser.parse_args()
    checkpoint = Checkpoint(DEMO_DIRECTORY)
    text = CalibrationOptions(samples=arguments.prompts, evaluation_samples=0).filled(checkpoint)
    tokens_SL, _ = calibration_texts(text, load_tokenizer(checkpoint), checkpoint.config.vocabulary_size)
    prompts = prompts_of(tokens_SL)
    with tempfile.TemporaryDirectory() as directory, ExitStack() as trees:
        old, commit = trees.enter_context(checkout(arguments.before)) if arguments.before else (None, "")
        dense = Path(directory) / "dense"
        command = ["densify", "demo", "--ffns", "1", "--distill-steps", "1", "--evaluation-samples", "2", "-o", str(dense)]
        subprocess.run([sys.executable, "-m", "cli", *command], cwd=ROOT, check=True, stdout=sys.stderr)
        students = {"the demo model": DEMO_DIRECTORY, "dense, of one expert a layer": dense}
        rows = [
            {"student": name} | row
            for name, student in students.items()
            for row in measured(student, old, prompts, arguments.lengths, arguments.rounds)
        ]
    save("response_writing", {"prompts": len(prompts), "before": commit, "rows": rows})


def table(figures: dict[str, Any]) -> str:
    """Return a row for each student and length: each way's speed, and that of the kernels in bfloat16 as its multiple."""
    beside = {"torch": "torch", "paged_float32": "kernels in float32, not taken"}
    if figures["before"]:
        beside["before"] = f"all by torch, at `{figures['before'][:7]}`"
    rows = []
    for row in figures["rows"]:
        made = row["compiled"]
        cells = [row["student"], str(row["length"]), f"{statistics.median(made):,.0f}"]
        for name in beside:
            other = statistics.median(row[name])
            cells.append(f"{other:,.0f}; {times(statistics.median(made) / other, made, row[name])}")
        rows.append(cells)
    header = ["student", "tokens with the prompt", "kernels in bfloat16: tokens/s"]
    header += [f"{title}: tokens/s; ratio (range)" for title in beside.values()]
    about = "The other ways compute in float32, and their ratios are those of the kernels in bfloat16 to them"
    return f"{figures['prompts']} prompts at a time; medians of rounds in turn. {about}.\n\n{markdown(header, rows)}"


TABLES = {"response_writing": table}


if __name__ == "__main__":
    main()
