"""A billion layers: transformers makes lists with an entry for each."""

import json
from pathlib import Path

REFUSED_BY = ("every",)
SAYS = "num_hidden_layers"
SIGNED = True


def plant(directory: Path) -> None:
    """Change config.json."""
    path = directory / "config.json"
    values = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(values | {"num_hidden_layers": 10**9}))
