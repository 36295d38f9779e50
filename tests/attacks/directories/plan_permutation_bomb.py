"""A plan gives an expert a permutation of a million numbers, each of thousands of digits."""

import json
from pathlib import Path

REFUSED_BY = ("prune --plan",)
SAYS = "plan"


def plant(directory: Path) -> None:
    path = directory.parent / "plan.json"
    values = json.loads(path.read_text())
    source = {"expert": 0, "permutation": " ".join(["9" * 5_000] * 1_000)}
    values["layers"]["0"] = [{"parts": [{"sources": [source]}], "router": [{"expert": 0}]}] * 2
    path.write_text(json.dumps(values))
