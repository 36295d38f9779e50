"""A socket beside the weights, which cannot be opened as a file."""

import os
import socket
from pathlib import Path

REFUSED_BY = ("every",)
SAYS = "neither a regular file"
SIGNED = False


def plant(directory: Path) -> None:
    """Bind one there; its path must be short, so it is bound by a relative one."""
    before = os.getcwd()
    os.chdir(directory)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind("vocab.json")
    finally:
        os.chdir(before)
