"""A folder that links out of the directory, whose files would be read under plain names."""

from pathlib import Path

REFUSED_BY = ("every",)
SAYS = "link leads out"
SIGNED = False


def plant(directory: Path) -> None:
    """Link to a folder of this system."""
    (directory / "additional_chat_templates").symlink_to("/etc")
