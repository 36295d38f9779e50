"""Heads of 2^31 dimensions: rotary frequencies of 8 GB are made before any shape is compared."""

import json
from pathlib import Path

REFUSED_BY = ("every",)
SAYS = "head_dim"
SIGNED = True


def plant(directory: Path) -> None:
    """Change config.json."""
    path = directory / "config.json"
    values = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(values | {"head_dim": 2**31}))
