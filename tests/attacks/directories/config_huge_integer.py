"""config.json has an integer of a million digits, which takes quadratic time to read."""

from pathlib import Path

REFUSED_BY = "every"
SAYS = "too many digits"
SIGNED = True


def plant(directory: Path) -> None:
    config = directory / "config.json"
    config.write_text(config.read_text().replace("{", '{"seed": ' + "9" * 1_000_000 + ",", 1))
