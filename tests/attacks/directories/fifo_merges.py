"""A pipe for a companion file: opening it would wait forever."""

import os
from pathlib import Path

REFUSED_BY = ("every",)
SAYS = "neither a regular file"
SIGNED = False


def plant(directory: Path) -> None:
    """Put a pipe in the place of the file."""
    path = directory / "merges.txt"
    path.unlink(missing_ok=True)
    os.mkfifo(path)
