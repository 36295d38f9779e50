"""A header of 100,000 lists in one another: a parser that recurses runs out of its stack."""

from pathlib import Path

REFUSED_BY = "every"
SAYS = "nested too deeply"
SIGNED = True


def plant(directory: Path) -> None:
    text = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
