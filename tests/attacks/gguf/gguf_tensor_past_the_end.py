"""A tensor beyond the end of the file: reading its mapped pages ends the process by a signal."""

from pathlib import Path

from gguf_damage_for_tests import after_name, change

OF = "model.gguf"
REFUSED_BY = ("every",)
SAYS = "past the end of the file"


def plant(file: Path) -> None:
    """Give the embeddings 2^40 rows."""
    change(file, after_name(file, "token_embd.weight") + 4 + 8, "Q", 2**40)
