"""Skip tables that link out of the directory."""

from pathlib import Path

REFUSED_BY = ("every",)
SAYS = "link leads out"
SIGNED = False


def plant(directory: Path) -> None:
    """Link to a file of this system."""
    path = directory / "skip_tables.safetensors"
    path.unlink(missing_ok=True)
    path.symlink_to("/etc/hostname")
