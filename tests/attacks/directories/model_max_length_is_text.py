"""A greatest length that is text, which is compared with numbers of tokens."""

import json
from pathlib import Path

REFUSED_BY = (
    "generate",
    "evaluate",
    "serve",
)
SAYS = "model_max_length"
SIGNED = True


def plant(directory: Path) -> None:
    """Change tokenizer_config.json."""
    path = directory / "tokenizer_config.json"
    values = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(values | {"model_max_length": "x"}))
