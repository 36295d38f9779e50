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
from engine.files.safetensors_file import SafetensorsFile
from engine.files.safetensors_writer import raw_bytes, write_tensors

DIGEST = "sha256"
"""Metadata key."""


def write_state(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], what: str) -> None:
    """Write a file with its digest, replacing an old one only when whole; OutputError names `what`."""
    digest = _digest(metadata, ((name, tensors[name]) for name in sorted(tensors)))
    write_tensors(path, tensors, {**metadata, DIGEST: digest}, what)


def check_digest(file: SafetensorsFile, *, may_lack: bool = False) -> None:
    """Raise DataError for a file that is not, byte for byte, what `write_state` wrote.

    may_lack: take files of earlier versions, which have no digest, as they are.
    """
    if may_lack and DIGEST not in file.metadata:
        return
    said = {key: value for key, value in file.metadata.items() if key != DIGEST}
    if file.metadata.get(DIGEST) != _digest(said, ((name, file.tensor(name)) for name in sorted(file.entries))):
        raise DataError(f"{file.path}: is not what was written (its digest differs); leave out --resume, or make it again")


def _digest(metadata: Mapping[str, str], tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """One digest for texts, and for names, types, shapes and bytes."""
    whole = hashlib.sha256(json.dumps(sorted(metadata.items())).encode())
    for name, tensor in tensors:
        whole.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        whole.update(raw_bytes(tensor))
    return whole.hexdigest()
