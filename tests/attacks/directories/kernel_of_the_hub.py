"""Attention by a kernel of the hub: transformers would fetch it and import it."""

import json
from pathlib import Path

REFUSED_BY = ("bench --backend transformers",)
SAYS = "attn_implementation"
SIGNED = True


def plant(directory: Path) -> None:
    """Change config.json."""
    path = directory / "config.json"
    values = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(values | {"attn_implementation": "evil/kernel"}))
