"""Metadata with 200 experts, and 6 in each stack: reading the others would leave the tensor."""

from pathlib import Path

from gguf_damage_for_tests import after_key, change

OF = "model.gguf"
REFUSED_BY = ("every",)
SAYS = "its metadata says 200 experts"


def plant(file: Path) -> None:
    """Change the number of experts."""
    change(file, after_key(file, "llama.expert_count") + 4, "I", 200)
