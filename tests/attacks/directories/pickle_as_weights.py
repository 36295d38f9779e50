"""The weights are pickled, under the name of a safetensors file."""

import pickle
from pathlib import Path

REFUSED_BY = "every"
SAYS = "header"
SIGNED = True


class _Payload:
    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, ("pwned", "w")


def plant(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(pickle.dumps(_Payload()))
