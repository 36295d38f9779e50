"""A token has the id 2³² - 1, which is not a row of any embedding."""

import json
from pathlib import Path

REFUSED_BY = ("generate", "evaluate", "calibrate", "prune", "prune --plan", "merge", "densify")
SAYS = "id 4294967295"
SIGNED = True


def plant(directory: Path) -> None:
    path = directory / "tokenizer.json"
    values = json.loads(path.read_text())
    values["added_tokens"][0]["id"] = 2**32 - 1
    path.write_text(json.dumps(values))
