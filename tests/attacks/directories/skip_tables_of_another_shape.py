"""Tables for skipping have as many entries, in another shape, so that experts would be compared with strangers."""

from pathlib import Path

REFUSED_BY = ("inspect", "generate --skip-threshold", "quantize")
SAYS = "skip_tables.safetensors"
SIGNED = True


def plant(directory: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = directory / "skip_tables.safetensors"
    save_file({name: tensor.reshape(-1) for name, tensor in load_file(path).items()}, path)
