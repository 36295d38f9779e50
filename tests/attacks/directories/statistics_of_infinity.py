"""Statistics hold infinity where experts are compared, so that the choice would be whatever comparisons of that give."""

from pathlib import Path

REFUSED_BY = ("prune --statistics",)
SAYS = "NaN or infinity"


def plant(directory: Path) -> None:
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    path = directory.parent / "statistics"
    with safe_open(path, "pt") as file:
        metadata = {"statistics": file.metadata()["statistics"]}  # without the digest, as earlier versions wrote it
    tensors = load_file(path)
    tensors["layers.0.tokens_routed"] = torch.full_like(tensors["layers.0.tokens_routed"].double(), float("inf"))
    save_file(tensors, path, metadata=metadata)
