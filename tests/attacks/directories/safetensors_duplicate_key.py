"""The header names a tensor twice: a scanner may look at one, and a loader take the other."""

from pathlib import Path

REFUSED_BY = "every"
SAYS = "occurs twice"
SIGNED = True


def plant(directory: Path) -> None:
    weights = directory / "model.safetensors"
    data = weights.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = b'{"lm_head.weight":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},' + data[9 : 8 + length]
    weights.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
