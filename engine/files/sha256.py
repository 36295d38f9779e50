"""SHA-256 of files."""

from __future__ import annotations

import hashlib
from pathlib import Path

from engine.files.json_file import reading


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal; the file is read in blocks."""
    digest = hashlib.sha256()
    with reading(path, "file") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
