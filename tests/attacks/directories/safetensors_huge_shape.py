"""A shape whose size wraps around in 64 bits to that of the data: memory for 2⁶⁶ elements would be asked for."""

import json
from pathlib import Path
from typing import Any

REFUSED_BY = "every"
SAYS = "too large"
SIGNED = True


def lie(header: dict[str, Any]) -> None:
    header[next(name for name in header if "layernorm" in name)]["shape"] = [2**33, 2**33, 16]


def plant(directory: Path) -> None:
    weights = directory / "model.safetensors"
    data = weights.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    lie(header)
    text = json.dumps(header).encode()
    weights.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
