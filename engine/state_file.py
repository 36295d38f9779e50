"""Files that this program writes for itself and reads back: safetensors with a digest of all that is in them.

A state that was damaged on its disk, or changed, is refused: a run that went on from it would end in another result.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from engine.errors import DataError
from engine.safetensors_file import SafetensorsFile
from engine.safetensors_writer import raw_bytes, write_tensors

DIGEST = "sha256"
"""Metadata key."""


def write_state(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], what: str) -> None:
    """Write a file that StateFile reads, replacing an old one only when whole; OutputError names `what`."""
    digest = _digest(metadata, ((name, tensors[name]) for name in sorted(tensors)))
    write_tensors(path, tensors, {**metadata, DIGEST: digest}, what)


class StateFile(SafetensorsFile):
    """One file of `write_state`. DataError for a file that is not, byte for byte, what was written."""

    def __init__(self, path: Path, *, may_lack_digest: bool = False) -> None:
        """may_lack_digest: for files that earlier versions wrote, which are then taken as they are."""
        super().__init__(path)
        if may_lack_digest and DIGEST not in self.metadata:
            return
        said = {key: value for key, value in self.metadata.items() if key != DIGEST}
        if self.metadata.get(DIGEST) != _digest(said, ((name, self.tensor(name)) for name in sorted(self.entries))):
            raise DataError(f"{path}: is not what was written (its digest differs); leave out --resume, or make it again")


def _digest(metadata: Mapping[str, str], tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """One digest for texts, and for names, types, shapes and bytes."""
    whole = hashlib.sha256(json.dumps(sorted(metadata.items())).encode())
    for name, tensor in tensors:
        whole.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        whole.update(raw_bytes(tensor))
    return whole.hexdigest()
