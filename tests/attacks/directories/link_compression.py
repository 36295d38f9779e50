"""A compression.json that links out of the directory, so that another artifact's checksums vouch for this one."""

from pathlib import Path

REFUSED_BY = ("every",)
SAYS = "link leads out"
SIGNED = False


def plant(directory: Path) -> None:
    """Link to a file of this system."""
    path = directory / "compression.json"
    path.unlink(missing_ok=True)
    path.symlink_to("/etc/hostname")
