"""Columns of a comparison: one dict per model to a table for people, and to CSV.

Keys are snake_case with the unit in the name; sizes are in bytes, times in seconds, shares from 0 to 1. Missing figures are
None.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
DASH = "–"
TASKS, TASKS_WITHOUT = "tasks", "tasks_without_skipping"


@dataclass(frozen=True)
class Column:
    """One column of the table."""

    title: str
    value: Callable[[Row], float | str | None]
    """The value by which the column is sorted."""
    text: Callable[[Row], str]
    about: str
    relative: bool = True
    """Whether the ratio to the first model's figure is meaningful."""


def size(count: float | None) -> str:
    """Return a number of bytes for people."""
    if count is None:
        return DASH
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def number(value: float | None, digits: int = 2) -> str:
    """Return a figure for people, or a dash for None."""
    return DASH if value is None else f"{value:,.{digits}f}"


def with_error(value: float | None, error: float | None, digits: int = 2) -> str:
    """Return a figure with its standard error, where there is one, or a dash for None."""
    spread = "" if value is None or error is None else f" ± {error:,.{digits}f}"
    return number(value, digits) + spread


def with_interval(value: float | None, low: float | None, high: float | None, digits: int = 3) -> str:
    """Return a figure with its interval, where there is one, or a dash for None."""
    is_known = value is not None and low is not None and low != high
    bounds = f" ({low:,.{digits}f} to {high:,.{digits}f})" if is_known else ""
    return number(value, digits) + bounds


def columns(rows: Sequence[Row]) -> list[Column]:
    """Return the columns in which at least one row has a figure, the model's name first."""
    skipping = _SKIPPED if any(row.get("skip_threshold") for row in rows) else []
    every = [_MODEL, *_quality(rows), *_SIZE, *_SPEED, *skipping]
    return [column for column in every if any(column.value(row) is not None for row in rows)]


def text_table(rows: Sequence[Row]) -> list[list[str]]:
    """Return the table for people: a header, then a line for each model."""
    shown = columns(rows)
    return [[column.title for column in shown], *([column.text(row) for column in shown] for row in rows)]


def to_csv(rows: Sequence[Row]) -> str:
    """Return the rows as CSV with a header. Lists are joined by spaces, and tasks have columns `tasks.NAME.METRIC`."""
    flat = [_flat(row) for row in rows]
    keys = list(dict.fromkeys(key for row in flat for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=keys, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def _flat(row: Row) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if key in (TASKS, TASKS_WITHOUT):
            flat |= {f"{key}.{task}.{name}": figure for task, own in (value or {}).items() for name, figure in own.items()}
        elif isinstance(value, list):
            flat[key] = " ".join(value if all(isinstance(part, str) for part in value) else map(json.dumps, value))
        else:
            flat[key] = value
    return flat


def _figure(title: str, key: str, text: Callable[[Any], str], about: str, relative: bool = True) -> Column:
    return Column(title, lambda row: row.get(key), lambda row: text(row.get(key)), about, relative)


def _quality(rows: Sequence[Row]) -> list[Column]:
    """Return perplexity, and the first figure of every task that any of the models was evaluated on."""
    several = len({row.get("perplexity_group") for row in rows if row.get("perplexity") is not None}) > 1

    def perplexity(row: Row) -> str:
        mark = f" [{row['perplexity_group']}]" if several and row.get("perplexity") is not None else ""
        return with_error(row.get("perplexity"), row.get("perplexity_stderr")) + mark

    about = "On held-out text, the same for all models, ± its standard error over documents; lower is better."
    if several:
        about += " Only figures with the same mark in brackets are of the same tokens and may be compared."
    found = Column("perplexity", lambda row: row.get("perplexity"), perplexity, about, relative=not several)
    tasks = {task: own for row in rows for task, own in (row.get(TASKS) or {}).items() if own}
    measured = [_task(task, next(iter(own)), key) for task, own in tasks.items() for key in (TASKS, TASKS_WITHOUT)]
    return [found, _RATIO, _UNSKIPPED, *measured]


def _task(task: str, metric: str, key: str) -> Column:
    def value(row: Row) -> float | None:
        figure: float | None = (row.get(key) or {}).get(task, {}).get(metric)
        return figure

    title, about = task, f"{metric} of lm-evaluation-harness."
    if key == TASKS_WITHOUT:
        title, about = f"{task}, nothing skipped", f"{metric} of lm-evaluation-harness with all chosen experts."
    return Column(title, value, lambda row: number(value(row), 4), about)


def _parameters(count: int | None) -> str:
    if count is None:
        return DASH
    return f"{count / 1e6:,.2f} M" if count < 1e9 else f"{count / 1e9:,.2f} B"


def _experts(row: Row) -> str:
    counts = row.get("experts_per_layer") or []
    if not counts:
        return "dense"
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def _mean_experts(row: Row) -> float:
    """Return the mean number of experts per layer, 0 for a dense model."""
    counts = row.get("experts_per_layer") or []
    return sum(counts) / len(counts) if counts else 0.0


def _rate(value: float | None) -> str:
    return number(value, 1)


def _seconds(value: float | None) -> str:
    return DASH if value is None else f"{value:.3f} s" if value < 10 else f"{value:.1f} s"


def _share(value: float | None) -> str:
    return DASH if value is None else f"{value:.1%}"


def _ratio(row: Row) -> str:
    ends = (row.get("perplexity_ratio_low"), row.get("perplexity_ratio_high"))
    return with_interval(row.get("perplexity_ratio"), *ends)


_RATIO = Column(
    "ratio, 95 %",
    lambda row: row.get("perplexity_ratio"),
    _ratio,
    "Perplexity over that of the first model that reads the same tokens, with its interval, paired by document.",
    relative=False,
)
_UNSKIPPED = Column(
    "nothing skipped",
    lambda row: row.get("perplexity_without_skipping"),
    lambda row: with_error(row.get("perplexity_without_skipping"), row.get("perplexity_without_skipping_stderr")),
    "Perplexity with all chosen experts, for models whose perplexity is measured with skipping.",
)
_MODEL = Column("model", lambda row: str(row["label"]), lambda row: str(row["label"]), "As it was given.", relative=False)
_SIZE = [
    _figure("weights", "bytes", size, "Bytes of the stored tensors."),
    _figure("parameters", "parameters", _parameters, "Stored parameters."),
    _figure("active", "active_parameters", _parameters, "Parameters that one token uses: top-k of the routed experts."),
    Column("experts", _mean_experts, _experts, "Routed experts per MoE layer; sorted by their mean.", relative=False),
]
_SPEED = [
    _figure("prefill t/s", "prefill_tokens_per_second_mean", _rate, "Tokens per second while a prompt is read."),
    _figure("decode t/s", "decode_tokens_per_second_mean", _rate, "Tokens per second, one after the other."),
    _figure("first token", "time_to_first_token_seconds", _seconds, "From the prompt's tokens to the first new one."),
    _figure("peak memory", "peak_memory_bytes", size, "Most that the model's own process had resident."),
]
_SKIPPED = [
    _figure("skipped", "experts_skipped_share", _share, "Expert evaluations skipped on the held-out text.", relative=False),
    _figure(
        "skipped, decode",
        "decode_experts_skipped_share",
        _share,
        "Expert evaluations skipped in the decode test, whose tokens are random.",
        relative=False,
    ),
]
