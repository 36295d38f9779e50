"""Model code with the size of ours and other content, in an artifact whose checksums were written anew."""

from pathlib import Path

REFUSED_BY = ("bench --backend transformers",)
SAYS = "trust_remote_code"
SIGNED = True


def plant(directory: Path) -> None:
    """Put it there."""
    path = directory / "modeling_compressed.py"
    source = path.read_text() if path.is_file() else ""
    path.write_text("open('pwned', 'w')\n" + source[19:])
