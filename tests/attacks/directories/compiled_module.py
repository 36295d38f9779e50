"""A compiled module deep in a hidden folder, which no listing of *.py would show."""

from pathlib import Path

REFUSED_BY = ("every",)
SAYS = "evil.cpython-311.pyc"
SIGNED = False


def plant(directory: Path) -> None:
    """Put it where clients of the hub keep what they know of a download."""
    place = directory / ".cache" / "huggingface"
    place.mkdir(parents=True)
    (place / "evil.cpython-311.pyc").write_bytes(b"\0" * 16)
