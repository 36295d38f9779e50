"""A vocabulary of 10^12 tokens: embeddings that no memory holds, if they are made before shapes are compared."""

import json
from pathlib import Path

REFUSED_BY = ("every",)
SAYS = "vocab_size"
SIGNED = True


def plant(directory: Path) -> None:
    """Change config.json."""
    path = directory / "config.json"
    values = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(values | {"vocab_size": 10**12}))
