"""The decoder doubles forty times whatever the model writes."""

import json
from pathlib import Path

REFUSED_BY = ("generate", "evaluate", "calibrate", "prune", "prune --plan", "merge", "densify")
SAYS = "decoder lengthens"
SIGNED = True


def plant(directory: Path) -> None:
    path = directory / "tokenizer.json"
    values = json.loads(path.read_text())
    double = {"type": "Replace", "pattern": {"Regex": "."}, "content": "ee"}
    values["decoder"] = {"type": "Sequence", "decoders": [double] * 40}
    path.write_text(json.dumps(values))
