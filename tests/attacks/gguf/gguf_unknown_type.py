"""A tensor of a type that does not exist, whose blocks have no size."""

from pathlib import Path

from gguf_damage_for_tests import after_name, change

OF = "model.gguf"
REFUSED_BY = ("every",)
SAYS = "is of type 4096, which is not read"


def plant(file: Path) -> None:
    """Change the type of the embeddings."""
    change(file, after_name(file, "token_embd.weight") + 4 + 2 * 8, "I", 4096)
