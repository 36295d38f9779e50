"""The state of an interrupted search has a value of another type and a tensor of another shape."""

import json
from pathlib import Path

REFUSED_BY = ("prune --resume",)
SAYS = "digest"


def plant(directory: Path) -> None:
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    path = directory.parent / "work" / "diep.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = {name: torch.zeros(1, dtype=torch.int8) for name in load_file(path)}
    save_file(tensors, path, metadata={name: json.dumps([value]) for name, value in metadata.items()})
