"""config.json says twice of which family the model is: a scanner may believe the one, and a loader the other."""

from pathlib import Path

REFUSED_BY = "every"
SAYS = "occurs twice"
SIGNED = True


def plant(directory: Path) -> None:
    config = directory / "config.json"
    config.write_text(config.read_text().replace("{", '{"model_type": "qwen3_moe",', 1))
