"""SHA-256 of files."""

from __future__ import annotations

import hashlib
from pathlib import Path

from engine.files.json_file import reading


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with reading(path, "file") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
