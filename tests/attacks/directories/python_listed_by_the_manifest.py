"""A module that the manifest lists with its checksum, as an attacker can write it who knows the format."""

from pathlib import Path

REFUSED_BY = ("every",)
SAYS = "configuration_evil.py"
SIGNED = True


def plant(directory: Path) -> None:
    """Put it there."""
    (directory / "configuration_evil.py").write_text("open('pwned', 'w')\n")
