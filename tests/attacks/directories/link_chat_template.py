"""A chat template that links out of the directory, to be copied into results, uploaded, and shown in answers."""

from pathlib import Path

REFUSED_BY = ("every",)
SAYS = "link leads out"
SIGNED = False


def plant(directory: Path) -> None:
    """Link to a file of this system."""
    path = directory / "chat_template.jinja"
    path.unlink(missing_ok=True)
    path.symlink_to("/etc/hostname")
