"""A damaged map of characters says that its table has 2³⁰ entries, and the process ends by SIGABRT."""

import json
from pathlib import Path

REFUSED_BY = ("generate", "evaluate", "calibrate", "prune", "prune --plan", "merge", "densify")
SAYS = "precompiled character map"
SIGNED = True


def plant(directory: Path) -> None:
    path = directory / "tokenizer.json"
    values = json.loads(path.read_text())
    damaged = "AAAAQA" + "AAAA" * 10 + "=="
    values["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": damaged}
    path.write_text(json.dumps(values))
