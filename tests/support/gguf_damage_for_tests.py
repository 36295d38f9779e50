"""Places in the bytes of a good GGUF file, for attacks that change a few of them."""

from __future__ import annotations

import struct
from pathlib import Path

from gguf_for_tests import text


def change(path: Path, place: int, code: str, *values: float) -> None:
    """Write numbers, by a code of `struct`, over the bytes at a place."""
    data = bytearray(path.read_bytes())
    struct.pack_into(f"<{code}", data, place, *values)
    path.write_bytes(data)


def after_key(path: Path, key: str) -> int:
    """Return the place of the type of a metadata entry; its value is 4 bytes later."""
    return path.read_bytes().index(text(key)) + len(text(key))


def after_name(path: Path, name: str) -> int:
    """Return the place of the rank of a tensor: dimensions of 8 bytes, the type of 4 and the offset of 8 follow."""
    return path.read_bytes().index(text(name)) + len(text(name))
