"""An adapter's config, by which transformers with peft loads what it names on top of the model."""

import json
from pathlib import Path

REFUSED_BY = ("bench --backend transformers",)
SAYS = "adapter_config"
SIGNED = True


def plant(directory: Path) -> None:
    """Change adapter_config.json."""
    path = directory / "adapter_config.json"
    values = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(values | {"base_model_name_or_path": "evil/model", "peft_type": "LORA"}))
