"""Speed and memory of several models side by side, with the tests and columns that benchmarks of GGUF models use.

Test `pp512` reads 512 tokens and test `tg128` generates 128 tokens one by one, both after `depth` tokens that are not
timed. Each test has a warm-up, then repetitions; the mean and standard deviation of tokens per second are reported.

Each (model, backend) pair runs in a separate process, so that the operating system reports its memory alone. The
workers (engine/bench/backends.py) stay alive and take turns in every repetition, so that other load of the machine
affects all of them equally.
"""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from engine.bench.backends import KINDS, BenchCase, BenchSpec
from engine.bench.options import FORMATS, BenchOptions
from engine.checkpoint.model_directory import resolve
from engine.errors import OptionError
from engine.generation.worker import Worker
from engine.onnx.runtime import backend_of

HEAD = ("model", "size", "params", "backend", "threads", "test", "t/s", "peak memory", "skipped")
"""Columns of the Markdown table."""
Cells = Callable[[dict[str, Any]], list[str]]


def cases_for(
    prompt_tokens: int = BenchOptions.prompt_tokens,
    generated_tokens: int = BenchOptions.generated_tokens,
    depth: int = BenchOptions.depth,
) -> list[BenchCase]:
    """Return the tests for `-p`, `-n` and `-d`; 0 tokens leaves a test out. Raises OptionError if none is left."""
    asked = [(kind, tokens) for kind, tokens in zip(KINDS, (prompt_tokens, generated_tokens), strict=True) if tokens]
    if not asked:
        raise OptionError("both tests are turned off; ask for prompt tokens, generated tokens, or both")
    return [BenchCase(kind, tokens, depth) for kind, tokens in asked]


def bench(
    specs: Sequence[BenchSpec],
    cases: Sequence[BenchCase],
    repetitions: int = BenchOptions.repetitions,
    progress: Callable[[Sequence[int]], Iterable[int]] = iter,
) -> list[dict[str, Any]]:
    """Run every case on every spec and return one row for each pair, in that order.

    `progress` wraps the list of rounds, including the warm-up. Raises OptionError for fewer than one repetition, and
    any CompressError of a worker.
    """
    if repetitions < 1:
        raise OptionError(f"repetitions is {repetitions}; it must be at least 1")
    for spec in specs:
        resolve(spec.model)  # download models, and refuse wrong names, before any worker starts
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(spec, "engine.bench.backends")) for spec in specs]
        pairs = [(case, worker) for case in cases for worker in workers]
        timed: dict[tuple[BenchCase, Worker[BenchSpec]], list[dict[str, Any]]] = {pair: [] for pair in pairs}
        warm: dict[tuple[BenchCase, Worker[BenchSpec]], dict[str, Any]] = {}
        for round_number in progress(range(repetitions + 1)):
            for case, worker in pairs:
                request = f"{case.kind} {case.tokens} {case.depth}"
                if round_number == 0:
                    warm[case, worker] = worker.ask(f"warm {request}")
                else:
                    timed[case, worker].append(worker.ask(f"run {request}"))
        memory = {worker: worker.ask("memory") for worker in workers}
        return [
            _row(worker, case, timed[case, worker], warm[case, worker], memory[worker])
            for worker in workers
            for case in cases
        ]


def bench_models(
    models: Sequence[str],
    backends: Sequence[str] = (),
    *,
    prompt_tokens: int = BenchOptions.prompt_tokens,
    generated_tokens: int = BenchOptions.generated_tokens,
    depth: int = BenchOptions.depth,
    repetitions: int = BenchOptions.repetitions,
    skip_threshold: float = BenchOptions.skip_threshold,
    progress: Callable[[Sequence[int]], Iterable[int]] = iter,
    **options: Any,
) -> list[dict[str, Any]]:
    """Run `bench` for each model on each backend; `options` are the other fields of BenchSpec.

    If no backend is named, each model uses its own: onnx for an exported model, otherwise torch. Only the `torch`
    backend skips experts, and the rows' `skip_threshold` shows this. Raises OptionError if skipping is requested and no
    backend supports it.
    """
    pairs = [(model, name) for model in models for name in backends or [backend_of(resolve(model), "auto")]]
    can_skip = any(name == "torch" for _, name in pairs)
    skips = {name: skip_threshold if name == "torch" or not can_skip else 0.0 for _, name in pairs}
    specs = [BenchSpec(model, name, skip_threshold=skips[name], **options) for model, name in pairs]
    return bench(specs, cases_for(prompt_tokens, generated_tokens, depth), repetitions, progress)


def _row(
    worker: Worker[BenchSpec],
    case: BenchCase,
    timed: list[dict[str, Any]],
    warm: dict[str, Any],
    memory: dict[str, int],
) -> dict[str, Any]:
    spec, about = worker.spec, worker.about
    rates = [case.tokens * spec.batch / each["seconds"] for each in timed]
    return {
        "model": spec.model,
        "backend": spec.backend,
        "test": case.name,
        "tokens_per_second_mean": statistics.mean(rates),
        "tokens_per_second_sd": statistics.stdev(rates) if len(rates) > 1 else 0.0,
        "peak_memory_bytes": memory["peak_memory_bytes"],
        "weights_bytes": about["weights_bytes"],
        "kv_cache_bytes": warm["kv_cache_bytes"],
        "experts_skipped_share": warm["experts_skipped_share"],
        "weights_read_bytes_per_token": warm["weights_read_bytes_per_token"],
        "tokens_per_second_median": statistics.median(rates),
        "tokens_per_second_rounds": rates,
        "parameters": about["parameters"],
        "threads": about["threads"],
        "batch": spec.batch,
        "dtype": about["dtype"],
        "weight_bits": about["weight_bits"],
        "device": about["device"],
        "skip_threshold": spec.skip_threshold,
        "load_seconds": about["load_seconds"],
        "resident_memory_bytes": memory["resident_memory_bytes"],
        "weights_resident_bytes": memory["weights_resident_bytes"],
        "other_memory_bytes": memory["other_memory_bytes"],
        "kv_cache_dtype": spec.kv_cache_dtype,
        "expert_hit_rate": timed[-1]["expert_hit_rate"],
        "expert_bytes_read_per_token": timed[-1]["expert_bytes_read_per_token"],
    }


def format_rows(rows: Sequence[dict[str, Any]], form: str, head: Sequence[str] = HEAD, cells: Cells | None = None) -> str:
    """Return the rows as a Markdown table, CSV with a header, one JSON object, or one JSON object per line."""
    if form == "json":
        return json.dumps({"rows": list(rows)}, indent=2)
    if form == "jsonl":
        return "\n".join(map(json.dumps, rows))
    if form == "csv":
        return _csv(rows)
    if form == "md":
        return _markdown(rows, head, cells or _cells)
    raise OptionError(f"format {form!r} is not known; choose {', '.join(FORMATS)}")


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    columns = [name for name, value in rows[0].items() if not isinstance(value, list)] if rows else []
    writer = csv.DictWriter(text, fieldnames=columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().rstrip("\n")


def _markdown(rows: Sequence[dict[str, Any]], head: Sequence[str], cells: Cells) -> str:
    table = [list(head), *(cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(head))]
    sides = ["<" if name in ("model", "backend", "test") else ">" for name in head]
    columns = list(zip(widths, sides, strict=True))
    lines = [[f"{cell:{side}{width}}" for cell, (width, side) in zip(line, columns, strict=True)] for line in table]
    rule = ["-" * (width - 1) + (":" if side == ">" else "-") for width, side in columns]
    return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], rule, *lines[1:]])


def about_model(row: dict[str, Any]) -> list[str]:
    """Return the first cells of a row, which describe the model and the test."""
    return [
        row["model"].replace("|", "\\|") + (f" ({row['weight_bits']} bits)" if row.get("weight_bits") else ""),
        f"{row['weights_bytes'] / 2**20:.2f} MiB" if row["weights_bytes"] < 2**30 else gib(row["weights_bytes"]),
        f"{row['parameters'] / 1e6:.2f} M" if row["parameters"] < 1e9 else f"{row['parameters'] / 1e9:.2f} B",
        row["backend"],
        str(row["threads"]),
        row["test"],
    ]


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        *about_model(row),
        f"{row['tokens_per_second_mean']:.2f} ± {row['tokens_per_second_sd']:.2f}",
        gib(row["peak_memory_bytes"]),
        f"{100 * row['experts_skipped_share']:.1f} %",
    ]


def gib(size: int) -> str:
    """Return a size in GiB as text."""
    return f"{size / 2**30:.2f} GiB"
