"""Two tensors share their bytes, so that a change of one is a change of the other, or secrets show through."""

import json
from pathlib import Path
from typing import Any

REFUSED_BY = "every"
SAYS = "model.safetensors"
SIGNED = True


def lie(header: dict[str, Any]) -> None:
    names = sorted(name for name in header if "layernorm" in name)
    header[names[0]]["data_offsets"] = header[names[1]]["data_offsets"]


def plant(directory: Path) -> None:
    weights = directory / "model.safetensors"
    data = weights.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    lie(header)
    text = json.dumps(header).encode()
    weights.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
