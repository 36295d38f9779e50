"""What commands print: figures and tables on stdout, or on stderr where stdout is for a machine, and progress bars."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import click


def is_first_process() -> bool:
    """Whether this process prints: of those that torchrun started, only one does."""
    return os.environ.get("RANK", "0") == "0" or "TORCHELASTIC_RUN_ID" not in os.environ


def progress_bar(iterable: Iterable[Any], description: str) -> Iterable[Any]:
    """A bar on stderr, if that is a terminal, for whatever takes over two seconds."""
    from tqdm import tqdm

    quiet = None if is_first_process() else True  # None: unless on a terminal
    bar: Iterable[Any] = tqdm(iterable, desc=description, delay=2, leave=False, disable=quiet)
    return bar


def table(rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def say(as_json: bool, text: str) -> None:
    """Print what people read: on stdout, or on stderr when stdout is for JSON."""
    if is_first_process():
        click.echo(text, err=as_json)
