"""More positions than 64 bits count: tables, caches and messages that are made of the number raise or never end."""

import json
from pathlib import Path

REFUSED_BY = ("every",)
SAYS = "max_position_embeddings"
SIGNED = True


def plant(directory: Path) -> None:
    """Change config.json."""
    path = directory / "config.json"
    values = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(values | {"max_position_embeddings": 10**30}))
