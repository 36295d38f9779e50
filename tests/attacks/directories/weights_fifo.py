"""The weights are a named pipe: whoever opens it waits until somebody writes, forever."""

import os
from pathlib import Path

REFUSED_BY = "every"
SAYS = "model.safetensors"


def plant(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    os.mkfifo(directory / "model.safetensors")
