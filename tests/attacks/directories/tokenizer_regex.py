"""A regular expression takes exponential time, and the library then panics."""

import json
from pathlib import Path

REFUSED_BY = ("generate", "evaluate", "calibrate", "prune", "prune --plan", "merge", "densify")
SAYS = "exponential"
SIGNED = True


def plant(directory: Path) -> None:
    path = directory / "tokenizer.json"
    values = json.loads(path.read_text())
    pattern = {"type": "Split", "pattern": {"Regex": "(\\\\w|\\\\w\\\\w)+!"}, "behavior": "Isolated", "invert": False}
    values["pre_tokenizer"] = pattern
    path.write_text(json.dumps(values))
