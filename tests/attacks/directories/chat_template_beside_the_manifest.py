"""A chat template in the folder that transformers reads more of them from, which the manifest does not list."""

from pathlib import Path

REFUSED_BY = ("inspect --checksums",)
SAYS = "additional_chat_templates"
SIGNED = False


def plant(directory: Path) -> None:
    """Put it there."""
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "default.jinja").write_text("{{ 'pwned' }}")
