"""Output of commands: text and tables on stdout, or on stderr where stdout is for JSON, and progress bars."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import click


def is_first_process() -> bool:
    """Return whether this process prints: only the first process of torchrun does."""
    return os.environ.get("RANK", "0") == "0" or "TORCHELASTIC_RUN_ID" not in os.environ


def progress_bar(iterable: Iterable[Any], description: str) -> Iterable[Any]:
    """Return the iterable with a progress bar on stderr, if that is a terminal, once it takes over two seconds."""
    from tqdm import tqdm

    quiet = None if is_first_process() else True  # None disables the bar only where stderr is no terminal
    bar: Iterable[Any] = tqdm(iterable, desc=description, delay=2, leave=False, disable=quiet)
    return bar


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return aligned columns, the first left-aligned, the others right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def say(as_json: bool, text: str) -> None:
    """Print text for people: on stdout, or on stderr where stdout is for JSON."""
    if is_first_process():
        click.echo(text, err=as_json)
