"""Offsets lie beyond the end of the file: a reader that maps it would read other memory, or end by SIGBUS."""

import json
from pathlib import Path
from typing import Any

REFUSED_BY = "every"
SAYS = "past the end"
SIGNED = True


def lie(header: dict[str, Any]) -> None:
    for entry in header.values():
        if "data_offsets" in entry:
            entry["data_offsets"] = [offset + 2**40 for offset in entry["data_offsets"]]


def plant(directory: Path) -> None:
    weights = directory / "model.safetensors"
    data = weights.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    lie(header)
    text = json.dumps(header).encode()
    weights.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
