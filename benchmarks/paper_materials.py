"""The small models and data that the commands of docs/reproduce run on: `python benchmarks/paper_materials.py materials`.

Everything is made from what is on this machine: the demo model, the source of the standard library, scikit-learn's digits
and matplotlib's fonts. What exists is not made again.

    next_line.yaml, .jsonl            a task of lm-evaluation-harness: which of four lines comes next in a held-out file
    signatures/train, validation, test.jsonl   prompts with responses: a function's signature from its name and docstring
    student                           an untrained dense student of three layers with the demo model's tokenizer
    switch                            a small Switch Transformer, trained for a short time
    digits.npz, letters.npz           images of two tasks
    teacher-untrained, student-resnet, student-convnext   classifiers with random weights
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from distill import examples_by_file
from encoder_decoder import train_teacher
from moe_kd import MODELS, write_digits, write_letters, write_model

from calibrate.text import load_documents
from engine.checkpoint.model_directory import DEMO_DIRECTORY
from engine.transformers_models.transformers_model import quiet_transformers

CONTEXT_LINES, CHOICES = 12, 4
COUNTS = {"train": 1024, "validation": 128, "test": 128}
"""Files of prompts with responses, and their number of rows. No document is in two of them."""


def next_lines(count: int) -> Iterator[dict[str, Any]]:
    """Yield questions: lines of a held-out file, and the line after them among three other lines of that file."""
    draw = random.Random(0)
    made = 0
    for text in load_documents("stdlib", split="held-out"):
        lines = [line for line in text.splitlines() if line.strip()]
        others = sorted({line for line in lines if 20 <= len(line) <= 80})
        starts = [place for place in range(CONTEXT_LINES, len(lines)) if 20 <= len(lines[place]) <= 80]
        if len(others) < 50:
            continue
        for place in draw.sample(starts, 4):
            wrong = draw.sample([line for line in others if line != lines[place]], CHOICES - 1)
            label = draw.randrange(CHOICES)
            choices = [*wrong[:label], lines[place], *wrong[label:]]
            context = "\n".join(lines[place - CONTEXT_LINES : place])
            yield {"context": context, "choices": [f"\n{choice}" for choice in choices], "label": label}
            made += 1
            if made == count:
                return


def write_task(path: Path, count: int = 200) -> None:
    """Write the task's YAML file, and its questions beside it."""
    questions = path.with_suffix(".jsonl")
    write_rows(questions, next_lines(count))
    measures = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")]
    task = {
        "task": "next_line",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(questions.resolve())}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "label",
        "target_delimiter": "",
        "metric_list": measures,
    }
    path.write_text(yaml.safe_dump(task, sort_keys=False))


def write_rows(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    """Write one JSON object on each line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_instructions(directory: Path) -> None:
    """Write the files of COUNTS, each in an order that does not follow the documents."""
    directory.mkdir(exist_ok=True)
    for name, rows in examples_by_file().items():
        random.Random(0).shuffle(rows)
        write_rows(directory / f"{name}.jsonl", iter(rows[: COUNTS[name]]))


def write_student(path: Path) -> None:
    """Write a dense model with random weights: the demo model's shape and tokenizer with half its layers and one FFN."""
    import torch
    from transformers import AutoTokenizer, MistralConfig, MistralForCausalLM

    own = json.loads((DEMO_DIRECTORY / "config.json").read_text())
    shared = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    config = {key: own[key] for key in (*shared, "max_position_embeddings")} | {
        "intermediate_size": 2 * own["intermediate_size"],
        "num_hidden_layers": own["num_hidden_layers"] // 2,
        "tie_word_embeddings": own.get("tie_word_embeddings", False),
        **{key: own[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in own},
    }
    torch.manual_seed(0)
    with quiet_transformers():
        MistralForCausalLM(MistralConfig(**config)).save_pretrained(path)
        AutoTokenizer.from_pretrained(DEMO_DIRECTORY).save_pretrained(path)


def write_switch(path: Path, steps: int) -> None:
    """Write a Switch Transformer that has been trained on restoring case and punctuation for so many steps."""
    work = path.with_name("switch-work")
    work.mkdir(exist_ok=True)
    train_teacher(work, steps, 3e-3)
    (work / "teacher").rename(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--switch-steps", type=int, default=300)
    arguments = parser.parse_args()
    made: dict[str, Callable[[Path], None]] = {
        "next_line.yaml": write_task,
        "signatures": write_instructions,
        "student": write_student,
        "switch": lambda path: write_switch(path, arguments.switch_steps),
        "digits.npz": lambda path: write_digits(path, 256),
        "letters.npz": write_letters,
        "teacher-untrained": lambda path: write_model(path, MODELS["teacher"], 0),
        "student-resnet": lambda path: write_model(path, MODELS["ResNet"], 0),
        "student-convnext": lambda path: write_model(path, MODELS["ConvNeXt"], 0),
    }
    arguments.directory.mkdir(parents=True, exist_ok=True)
    for name, write in made.items():
        if not (arguments.directory / name).exists():
            write(arguments.directory / name)


if __name__ == "__main__":
    main()
