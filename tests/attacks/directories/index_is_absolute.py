"""The index names a shard by an absolute path."""

import json
from pathlib import Path

REFUSED_BY = "every"
SAYS = "plain"
SIGNED = True


def plant(directory: Path) -> None:
    index = directory / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"] = dict.fromkeys(values["weight_map"], str(directory.absolute() / "model.safetensors"))
    index.write_text(json.dumps(values))
