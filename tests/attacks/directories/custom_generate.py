"""A custom_generate/generate.py, which transformers runs when it loads a model with trust_remote_code=True."""

from pathlib import Path

REFUSED_BY = ("every",)
SAYS = "custom_generate"
SIGNED = False


def plant(directory: Path) -> None:
    """Put it there."""
    (directory / "custom_generate").mkdir()
    (directory / "custom_generate" / "generate.py").write_text("open('pwned', 'w')\n")
