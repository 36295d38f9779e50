"""A custom_generate directory in an artifact whose checksums were written anew. They cannot list a file of a folder."""

from pathlib import Path

REFUSED_BY = ("every",)
SAYS = "custom_generate"
SIGNED = True


def plant(directory: Path) -> None:
    """Put it there."""
    (directory / "custom_generate").mkdir()
    (directory / "custom_generate" / "generate.py").write_text("open('pwned', 'w')\n")
