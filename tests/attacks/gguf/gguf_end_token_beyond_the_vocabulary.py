"""An end token beyond the vocabulary: an index outside of the logits."""

from pathlib import Path

from gguf_damage_for_tests import after_key, change

OF = "model.gguf"
REFUSED_BY = ("every",)
SAYS = "eos_token_id is 2147483648; that is no real model"


def plant(file: Path) -> None:
    """Change the number of the end token."""
    change(file, after_key(file, "tokenizer.ggml.eos_token_id") + 4, "I", 2**31)
