"""The cost of skipping: perplexity, accuracy and the share of skipped experts of two trained models, by rule and threshold.

    python benchmarks/skipping.py [--models demo,shared-expert] [--samples 256] [--limit N]

The models are the demo model and the second model of benchmarks/methods.py. The
text is the half of the held-out documents that nothing was chosen on. The task asks which of four lines comes next in a
held-out file (benchmarks/paper_materials.py). Every figure comes from `compress evaluate`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from methods import MODELS, train_second_model
from paper_materials import write_task
from results import RESULTS, ROOT, markdown, remember, remembered, save

from calibrate.collect import collect
from calibrate.skipping import skip_tables
from calibrate.text import token_batches
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_directory import resolve
from engine.checkpoint.skip_table_file import FILE_NAME, SKIP_RULES, has_importance, has_skip_tables
from engine.checkpoint.tokenizer import load_tokenizer
from engine.files.safetensors_file import SafetensorsFile

THRESHOLDS = (0.5, 1.0, 1.5)
LENGTH = 256
DONE = RESULTS / "skipping.jsonl"


def calibrated(model: str, source: str = "stdlib") -> None:
    """Write tables for all rules beside a model that lacks them, from 128 × 256 tokens of a text."""
    checkpoint = Checkpoint(resolve(model))
    if not _has_all_tables(checkpoint):
        text = {"samples": 128, "sequence_length": 256, "seed": 0}
        tokens = token_batches(source, load_tokenizer(checkpoint), **text)
        skip_tables(collect(checkpoint, tokens, dtype=checkpoint.model_dtype)).save(checkpoint.directory / FILE_NAME)


def _has_all_tables(checkpoint: Checkpoint) -> bool:
    if not has_skip_tables(checkpoint.directory, checkpoint.config):
        return False
    with SafetensorsFile(checkpoint.directory / FILE_NAME) as file:
        return has_importance(file)


def evaluated(model: str, *options: str) -> dict[str, Any]:
    """Return the JSON of `compress evaluate`."""
    command = [sys.executable, "-m", "cli", "evaluate", model, *options, "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def measure(model: str, rule: str, threshold: float, task: Path, samples: int, limit: int | None) -> dict[str, Any]:
    """Return the figures of one row."""
    skipping = ["--skip-threshold", str(threshold), "--skip-rule", rule]
    windows = ["--samples", str(samples), "--sequence-length", str(LENGTH)]
    text = evaluated(model, *skipping, "--data", "stdlib", "--split", "report", *windows)
    of_task = evaluated(model, *skipping, "--tasks", str(task), *(["--limit", str(limit)] if limit else []))
    (scores,) = of_task["value"].values()
    return {
        "perplexity": text["value"],
        "perplexity_stderr": text["value_stderr"],
        "documents": text["documents"],
        "skipped_share": text["experts_skipped_share"],
        "accuracy": scores["acc,none"],
        "accuracy_stderr": scores["acc_stderr,none"],
    }


def table(figures: dict[str, Any]) -> str:
    """Return a row for each model, rule and threshold."""
    rows = []
    for row in figures["rows"]:
        is_whole = row["threshold"] == 0
        name = f"{row['model']}, every chosen expert" if is_whole else f"{row['rule']} at {row['threshold']:g}"
        cells = [f"{row['perplexity']:.2f} ± {row['perplexity_stderr']:.2f}"]
        cells.append(f"{100 * row['accuracy']:.1f} ± {100 * row['accuracy_stderr']:.1f}")
        rows.append([name, "none" if is_whole else f"{row['skipped_share']:.1%}", *cells])
    header = ["model, rule and threshold", "experts skipped", "perplexity ± standard error", "next line, % right"]
    return markdown(header, rows)


def in_text(figures: dict[str, Any]) -> dict[str, str]:
    """Return the share that the default rule skips at threshold 1, and what it costs, by model."""
    found: dict[str, str] = {}
    for model in dict.fromkeys(row["model"] for row in figures["rows"]):
        whole, *skipping = (row for row in figures["rows"] if (row["model"], row["rule"]) == (model, SKIP_RULES[0]))
        row, name = skipping[THRESHOLDS.index(1.0)], model.replace("-", "_")
        found[f"{name}_share"] = f"{row['skipped_share']:.0%}"
        found[f"{name}_cost"] = f"{row['perplexity'] / whole['perplexity'] - 1:.1%}"
    return found


TABLES = {"skipping": table}
IN_TEXT = {"skipping": in_text}


def rows(models: Sequence[str], samples: int, limit: int | None) -> list[dict[str, Any]]:
    """Return the rows of all models; those of an interrupted run are in benchmarks/results/skipping.jsonl."""
    made, known = [], remembered(DONE)
    with tempfile.TemporaryDirectory() as directory:
        task = Path(directory) / "next_line.yaml"
        write_task(task)
        for name in models:
            calibrated(MODELS[name])
            asked = [(SKIP_RULES[0], 0.0), *((rule, threshold) for rule in SKIP_RULES for threshold in THRESHOLDS)]
            for rule, threshold in asked:
                row = {"model": name, "rule": rule, "threshold": threshold, "samples": samples, "limit": limit}
                found = next((own for own in known if row.items() <= own.items()), None)
                if found is None:
                    found = row | measure(MODELS[name], rule, threshold, task, samples, limit)
                    print(found, file=sys.stderr, flush=True)
                    remember(DONE, found)
                made.append(found)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--samples", type=int, default=256, help="sequences of 256 tokens")
    parser.add_argument("--limit", type=int, help="examples of the task; by default all")
    arguments = parser.parse_args()
    models = arguments.models.split(",")
    if "shared-expert" in models:
        train_second_model()
    save("skipping", {"samples": arguments.samples, "rows": rows(models, arguments.samples, arguments.limit)})


if __name__ == "__main__":
    main()
