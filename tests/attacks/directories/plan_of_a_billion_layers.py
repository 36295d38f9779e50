"""A plan numbers a layer with 5,000 digits, which Python refuses to read as an integer."""

import json
from pathlib import Path

REFUSED_BY = ("prune --plan",)
SAYS = "plan"


def plant(directory: Path) -> None:
    path = directory.parent / "plan.json"
    values = json.loads(path.read_text())
    values["layers"]["1" * 5_000] = [0, 1]
    path.write_text(json.dumps(values))
