"""The header of a statistics file holds 100,000 lists in one another, as text within its metadata."""

import json
from pathlib import Path

REFUSED_BY = ("prune --statistics",)
SAYS = "not a statistics file"


def plant(directory: Path) -> None:
    path = directory.parent / "statistics"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"] = {"statistics": "[" * 100_000}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
