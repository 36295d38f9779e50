"""A list of 2^60 texts in the metadata: a reader that makes room for them takes all memory."""

from pathlib import Path

from gguf_damage_for_tests import after_key, change

OF = "model.gguf"
REFUSED_BY = ("every",)
SAYS = "texts in metadata"


def plant(file: Path) -> None:
    """Change the length of the vocabulary, after the types of list and items."""
    change(file, after_key(file, "tokenizer.ggml.tokens") + 8, "Q", 2**60)
