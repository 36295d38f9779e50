"""Tensors that a refit or a correction wrote into the work directory, from which the rest of the run reads them."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from engine.checkpoint.checkpoint import Checkpoint
from engine.files.safetensors_file import SafetensorsFile
from engine.files.state_file import check_digest


def mapped_tensors(checkpoint: Checkpoint, path: Path) -> dict[str, Tensor]:
    """Return the tensors of a state file, memory-mapped. Their pages are released with those of the checkpoint.

    Raises DataError for a damaged file.
    """
    file = SafetensorsFile(path)
    check_digest(file)
    checkpoint.companions.append(file)
    return {name: file.tensor(name) for name in file.entries}
