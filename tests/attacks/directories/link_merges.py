"""A merges.txt that links out of the directory: its target would be copied into results, and uploaded by push."""

from pathlib import Path

REFUSED_BY = ("every",)
SAYS = "link leads out"
SIGNED = False


def plant(directory: Path) -> None:
    """Link to a file of this system."""
    path = directory / "merges.txt"
    path.unlink(missing_ok=True)
    path.symlink_to("/etc/hostname")
