"""A normalizer writes a megabyte for each character, twice, and the process ends by SIGABRT."""

import json
from pathlib import Path

REFUSED_BY = ("generate", "evaluate", "calibrate", "prune", "prune --plan", "merge", "densify")
SAYS = "normalizer Replace"
SIGNED = True


def plant(directory: Path) -> None:
    path = directory / "tokenizer.json"
    values = json.loads(path.read_text())
    long = {"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 1_000_000}
    values["normalizer"] = {"type": "Sequence", "normalizers": [long, long]}
    path.write_text(json.dumps(values))
