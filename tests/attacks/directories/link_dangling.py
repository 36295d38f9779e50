"""A link out of the directory to be filled in later."""

from pathlib import Path

REFUSED_BY = ("every",)
SAYS = "link leads out"
SIGNED = False


def plant(directory: Path) -> None:
    """Link to a file that is not there."""
    path = directory / "added_tokens.json"
    path.unlink(missing_ok=True)
    path.symlink_to("/nonexistent/added_tokens.json")
