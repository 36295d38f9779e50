"""An auto_map in tokenizer_config.json, by which transformers would import a tokenizer's class from the directory."""

import json
from pathlib import Path

REFUSED_BY = ("every",)
SAYS = "evil.py"
SIGNED = True


def plant(directory: Path) -> None:
    """Name a class and put its module there."""
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}))
    (directory / "evil.py").write_text("open('pwned', 'w')\n")
