"""compression.json lists a file above the directory: whoever copies or uploads what it lists would take that too."""

import json
from pathlib import Path

REFUSED_BY = "every"
SAYS = "plain file names"


def plant(directory: Path) -> None:
    manifest = directory / "compression.json"
    values = json.loads(manifest.read_text())
    values["files"]["../text.txt"] = {"bytes": 1, "sha256": ""}
    manifest.write_text(json.dumps(values))
