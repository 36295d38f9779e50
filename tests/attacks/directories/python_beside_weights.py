"""A module beside the weights of an artifact, for anything that imports from the model's directory."""

from pathlib import Path

REFUSED_BY = ("every",)
SAYS = "configuration_evil.py"
SIGNED = False


def plant(directory: Path) -> None:
    """Put it there."""
    (directory / "configuration_evil.py").write_text("open('pwned', 'w')\n")
