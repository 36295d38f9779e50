"""The weights are pickled, under the name of a safetensors file."""

from pathlib import Path

REFUSED_BY = "every"
SAYS = "header"
SIGNED = True


PAYLOAD = b"cbuiltins\nopen\n(S'pwned'\nS'w'\ntR."
"""Unpickled, it opens a file to write."""


def plant(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(PAYLOAD)
