"""An end token beyond the vocabulary, an index out of range for whatever looks it up."""

import json
from pathlib import Path

REFUSED_BY = ("every",)
SAYS = "eos_token_id"
SIGNED = True


def plant(directory: Path) -> None:
    """Change generation_config.json."""
    path = directory / "generation_config.json"
    values = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(values | {"eos_token_id": [2, 10**9]}))
