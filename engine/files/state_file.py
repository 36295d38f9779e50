"""State files of interrupted runs: safetensors files with a digest of their content.

A state file that was damaged or changed is refused, because a run resumed from it would give another result.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from engine.errors import DataError
from engine.files.mapped_file import Releasing
from engine.files.safetensors_file import SafetensorsFile
from engine.files.safetensors_writer import raw_bytes, write_tensors

DIGEST = "sha256"
"""Metadata key of the digest."""


def write_state(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], what: str, *, is_cache: bool = False
) -> None:
    """Write a file with its digest, replacing an old file only once the new one is complete; OutputError names `what`.

    is_cache: as in `write_tensors`.
    """
    digest = _digest(metadata, ((name, tensors[name]) for name in sorted(tensors)))
    write_tensors(path, tensors, {**metadata, DIGEST: digest}, what, is_cache=is_cache)


def check_digest(file: SafetensorsFile, *, may_lack: bool = False) -> None:
    """Raise DataError unless the content is, byte for byte, the content that `write_state` wrote.

    may_lack: accept files of earlier versions, which have no digest.
    """
    if may_lack and DIGEST not in file.metadata:
        return
    said = {key: value for key, value in file.metadata.items() if key != DIGEST}
    if file.metadata.get(DIGEST) != _digest(said, _read_once(file)):
        raise DataError(f"{file.path}: is damaged or was changed (its digest differs); leave out --resume, or make it again")


def _read_once(file: SafetensorsFile) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor by name, and release the mapped pages on the way."""
    releasing = Releasing(file.release)
    for name in sorted(file.entries):
        yield name, file.tensor(name)
        releasing.read(file.entries[name].nbytes)
    file.release()


def _digest(metadata: Mapping[str, str], tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return one SHA-256 over the metadata and over the tensors' names, dtypes, shapes and bytes."""
    whole = hashlib.sha256(json.dumps(sorted(metadata.items())).encode())
    for name, tensor in tensors:
        whole.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        whole.update(raw_bytes(tensor))
    return whole.hexdigest()
