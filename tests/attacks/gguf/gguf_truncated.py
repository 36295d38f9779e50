"""The first half of a file, as an interrupted download leaves it."""

import os
from pathlib import Path

OF = "model.gguf"
REFUSED_BY = ("every",)
SAYS = "past the end of the file"


def plant(file: Path) -> None:
    """Cut the file."""
    os.truncate(file, file.stat().st_size // 2)
