"""A count of 2^62 metadata entries: a reader that makes room for them takes all memory."""

from pathlib import Path

from gguf_damage_for_tests import change

OF = "model.gguf"
REFUSED_BY = ("every",)
SAYS = "do not fit"


def plant(file: Path) -> None:
    """Change the count, which follows that of tensors."""
    change(file, 16, "Q", 2**62)
