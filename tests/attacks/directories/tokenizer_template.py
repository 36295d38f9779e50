"""The template of a prompt repeats the prompt a hundred thousand times."""

import json
from pathlib import Path

REFUSED_BY = ("generate", "evaluate", "calibrate", "prune", "prune --plan", "merge", "densify")
SAYS = "TemplateProcessing"
SIGNED = True


def plant(directory: Path) -> None:
    path = directory / "tokenizer.json"
    values = json.loads(path.read_text())
    text = {"Sequence": {"id": "A", "type_id": 0}}
    pair = [text, {"Sequence": {"id": "B", "type_id": 0}}]
    values["post_processor"] = {
        **{"type": "TemplateProcessing", "single": [text] * 100_000},
        **{"pair": pair, "special_tokens": {}},
    }
    path.write_text(json.dumps(values))
