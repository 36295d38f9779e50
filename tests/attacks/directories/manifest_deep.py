"""compression.json is 100,000 objects in one another: a parser that recurses runs out of its stack."""

from pathlib import Path

REFUSED_BY = "every"
SAYS = "nested too deeply"


def plant(directory: Path) -> None:
    (directory / "compression.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
