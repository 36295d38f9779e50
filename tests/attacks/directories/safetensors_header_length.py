"""The first eight bytes say that the header is 2⁶³ bytes long: a reader that believes them asks for that much memory."""

from pathlib import Path

REFUSED_BY = "every"
SAYS = "header length"
SIGNED = True


def plant(directory: Path) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes((2**63).to_bytes(8, "little") + weights.read_bytes()[8:])
