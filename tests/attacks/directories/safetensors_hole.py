"""Bytes between two tensors belong to none: a place to hide a payload in that no checksum of tensors covers."""

import json
from pathlib import Path
from typing import Any

REFUSED_BY = "every"
SAYS = "hole"
SIGNED = True


def lie(header: dict[str, Any]) -> None:
    del header[next(name for name in header if "layernorm" in name)]


def plant(directory: Path) -> None:
    weights = directory / "model.safetensors"
    data = weights.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    lie(header)
    text = json.dumps(header).encode()
    weights.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
