"""Responses that a student writes while it is trained: by the compiled kernels in bfloat16, and by torch in its own dtype.

    python benchmarks/response_writing.py [--rounds 5] [--prompts 16] [--lengths 160,512]

The students are the demo model, a mixture, and a dense model of its most used experts, both in float32 as they are trained.
The ways write for the same prompts, in turn, with a sampling temperature of 1 and no end token, so that all write equally
many tokens: all prompts have 96 tokens at most and go up to the length of the row. The bfloat16 copy of the weights is
brought up to date in every round, as in training. `paged_float32` is the way of the kernels in float32, where they multiply
matrices alone and torch computes the attention of each sequence; training does not take it.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from results import ROOT, markdown, save, times
from torch import Tensor

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


def loaded(directory: Path) -> Decoder:
    """Return a model in float32."""
    checkpoint = Checkpoint(directory)
    return Decoder(checkpoint.config, checkpoint.weights(torch.float32))


def prompts_of(tokens_SL: Tensor) -> list[list[int]]:
    """Return beginnings of sequences, of different lengths up to LONGEST_PROMPT."""
    return [row[: LONGEST_PROMPT - 2 * number].tolist() for number, row in enumerate(tokens_SL)]


Way = Callable[..., list[Example]]


def written(writer: Way, prompts: list[list[int]], length: int) -> tuple[int, float]:
    """Return the number of tokens of responses and the seconds that they took."""
    started = time.perf_counter()
    examples = writer(prompts, length, (), SamplingOptions(temperature=1.0), torch.Generator().manual_seed(0))
    return sum(len(example.response) for example in examples), time.perf_counter() - started


def measured(student: Decoder, prompts: list[list[int]], length: int, rounds: int) -> dict[str, Any]:
    """Return tokens a second of each way in each round."""
    compiled = Writer(student, torch.bfloat16)
    writers: dict[str, Way] = {
        "compiled": compiled,
        "torch": Writer(student),
        "paged_float32": partial(write_together, student),
    }
    for writer in writers.values():
        written(writer, prompts[:2], length)
    found: dict[str, list[float]] = {name: [] for name in writers}
    for _ in range(rounds):
        for name, writer in writers.items():
            tokens, seconds = written(writer, prompts, length)
            found[name].append(tokens / seconds)
    return {"length": length, "dtype": str(compiled.dtype), **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--lengths", type=lambda text: [int(part) for part in text.split(",")], default=[160, 512])
    arguments = parser.parse_args()
    checkpoint = Checkpoint(DEMO_DIRECTORY)
    text = CalibrationOptions(samples=arguments.prompts, evaluation_samples=0).filled(checkpoint)
    tokens_SL, _ = calibration_texts(text, load_tokenizer(checkpoint), checkpoint.config.vocabulary_size)
    prompts = prompts_of(tokens_SL)
    with tempfile.TemporaryDirectory() as directory:
        dense = Path(directory) / "dense"
        command = ["densify", "demo", "--ffns", "1", "--distill-steps", "1", "--evaluation-samples", "2", "-o", str(dense)]
        subprocess.run([sys.executable, "-m", "cli", *command], cwd=ROOT, check=True, stdout=sys.stderr)
        students = {"the demo model": loaded(DEMO_DIRECTORY), "dense, of one expert a layer": loaded(dense)}
        rows = [
            {"student": name} | measured(student, prompts, length, arguments.rounds)
            for name, student in students.items()
            for length in arguments.lengths
        ]
    save("response_writing", {"prompts": len(prompts), "rows": rows})


def table(figures: dict[str, Any]) -> str:
    """Return a row for each student and length; rows that were made without the kernels of float32 have none."""
    rows = []
    for row in figures["rows"]:
        of_torch = statistics.median(row["torch"])
        cells = [row["student"], str(row["length"]), f"{of_torch:,.0f}"]
        for name in ("compiled", "paged_float32"):
            made = row.get(name)
            ratio = times(statistics.median(made) / of_torch, made, row["torch"]) if made else "–"
            cells += [f"{statistics.median(made):,.0f}" if made else "–", ratio]
        rows.append(cells)
    header = ["student", "tokens with the prompt", "torch: tokens/s", "bfloat16: tokens/s", "ratio (range)"]
    header += ["float32, not taken: tokens/s", "ratio (range)"]
    about = "kernels in bfloat16 and in float32, beside torch in float32; medians of rounds in turn"
    return f"{figures['prompts']} prompts at a time, {about}.\n\n{markdown(header, rows)}"


TABLES = {"response_writing": table}


if __name__ == "__main__":
    main()
