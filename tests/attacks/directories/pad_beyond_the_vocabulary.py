"""A padding token beyond the vocabulary, an index out of range in the embeddings."""

import json
from pathlib import Path

REFUSED_BY = ("every",)
SAYS = "pad_token_id"
SIGNED = True


def plant(directory: Path) -> None:
    """Change config.json."""
    path = directory / "config.json"
    values = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(values | {"pad_token_id": 10**6}))
