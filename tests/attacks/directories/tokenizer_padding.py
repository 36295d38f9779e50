"""Every text is padded to 10¹² tokens, and the process ends by SIGABRT."""

import json
from pathlib import Path

REFUSED_BY = ("generate", "evaluate", "calibrate", "prune", "prune --plan", "merge", "densify")
SAYS = "strategy Fixed"
SIGNED = True


def plant(directory: Path) -> None:
    path = directory / "tokenizer.json"
    values = json.loads(path.read_text())
    values["padding"] = {
        **{"strategy": {"Fixed": 10**12}, "direction": "Right", "pad_to_multiple_of": None},
        **{"pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>"},
    }
    path.write_text(json.dumps(values))
