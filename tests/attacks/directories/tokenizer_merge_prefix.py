"""Merges lack the prefix that the library cuts off without looking, and the process ends by SIGABRT."""

import json
from pathlib import Path

REFUSED_BY = ("generate", "evaluate", "calibrate", "prune", "prune --plan", "merge", "densify")
SAYS = "lacks the prefix"
SIGNED = True


def plant(directory: Path) -> None:
    path = directory / "tokenizer.json"
    values = json.loads(path.read_text())
    model = values["model"]
    model["continuing_subword_prefix"] = "éé"
    model["merges"] = [["t", "h"]]
    path.write_text(json.dumps(values))
