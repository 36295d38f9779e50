"""A pipe with the name of a model: opening it would wait forever."""

import os
from pathlib import Path

OF = "model.gguf"
REFUSED_BY = ("every",)
SAYS = "is not a regular file"


def plant(file: Path) -> None:
    """Put a pipe in the place of the file."""
    file.unlink()
    os.mkfifo(file)
