"""A pickle with the name of a model, which runs code where somebody loads it with torch."""

from pathlib import Path

OF = "model.gguf"
REFUSED_BY = ("every",)
PICKLE = b"cos\nsystem\n(S'touch pwned'\ntR." + bytes(64)
SAYS = "so it is not a GGUF file"


def plant(file: Path) -> None:
    """Write the pickle."""
    file.write_bytes(PICKLE)
