"""Metadata with 2^31 layers: a reader that lists their tensors first takes all memory and hours."""

from pathlib import Path

from gguf_damage_for_tests import after_key, change

OF = "model.gguf"
REFUSED_BY = ("every",)
SAYS = "num_hidden_layers is 2147483648; that is no real model"


def plant(file: Path) -> None:
    """Change the number of layers."""
    change(file, after_key(file, "llama.block_count") + 4, "I", 2**31)
