"""Forty normalizers double the text each, which asks for a terabyte at the first prompt, and the process ends by SIGABRT."""

import json
from pathlib import Path

REFUSED_BY = ("generate", "evaluate", "calibrate", "prune", "prune --plan", "merge", "densify")
SAYS = "normalizer lengthens"
SIGNED = True


def plant(directory: Path) -> None:
    path = directory / "tokenizer.json"
    values = json.loads(path.read_text())
    double = {"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}
    values["normalizer"] = {"type": "Sequence", "normalizers": [double] * 40}
    path.write_text(json.dumps(values))
