"""A file that the manifest does not list; it is harmless until something reads it, and is not what was written."""

from pathlib import Path

REFUSED_BY = ("inspect --checksums",)
SAYS = "notes.txt"
SIGNED = False


def plant(directory: Path) -> None:
    """Put it in a folder."""
    (directory / "notes").mkdir()
    (directory / "notes" / "notes.txt").write_text("read me\n")
