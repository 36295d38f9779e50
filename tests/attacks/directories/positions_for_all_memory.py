"""As many positions as config.json may say: tables and caches for all of them would be hundreds of gigabytes."""

import json
from pathlib import Path

REFUSED_BY = ("export",)
SAYS = "max_position_embeddings"
SIGNED = True


def plant(directory: Path) -> None:
    """Change config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 2**31 - 1}))
