"""The index names a shard above the directory: whoever opens it would read, or publish, files of the machine."""

import json
from pathlib import Path

REFUSED_BY = "every"
SAYS = "plain"
SIGNED = True


def plant(directory: Path) -> None:
    (directory.parent / "elsewhere.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    index = directory / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"] = dict.fromkeys(values["weight_map"], "../elsewhere.safetensors")
    index.write_text(json.dumps(values))
