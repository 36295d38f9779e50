"""A config.json that links out of the directory; an error that quotes its content would show it."""

from pathlib import Path

REFUSED_BY = ("every",)
SAYS = "link leads out"
SIGNED = False


def plant(directory: Path) -> None:
    """Link to a file of this system."""
    path = directory / "config.json"
    path.unlink(missing_ok=True)
    path.symlink_to("/etc/hostname")
