"""Pickled weights and state lie beside the safetensors file: whoever unpickles them runs what they say."""

from pathlib import Path

REFUSED_BY = ()
SAYS = ""
SIGNED = True


PAYLOAD = b"cbuiltins\nopen\n(S'pwned'\nS'w'\ntR."
"""Unpickled, it opens a file to write."""


def plant(directory: Path) -> None:
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "tokenizer.pkl", "skip_tables.pt"):
        (directory / name).write_bytes(PAYLOAD)
