"""A tensor that begins where another one is: one writes over the other where files are changed in place."""

from pathlib import Path

from gguf_damage_for_tests import after_name, change

OF = "model.gguf"
REFUSED_BY = ("every",)
SAYS = "overlaps"


def plant(file: Path) -> None:
    """Let attention's keys begin with the first tensor."""
    change(file, after_name(file, "blk.0.attn_k.weight") + 4 + 2 * 8 + 4, "Q", 0)
