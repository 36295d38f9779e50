"""What a checkpoint or artifact is, and whether it is whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from engine.artifact import check_checksums, read_provenance
from engine.checkpoint import Checkpoint, resolve
from engine.errors import OptionError
from engine.skip_tables import load_skip_tables

Progress = Callable[[Iterable[Any], str], Iterable[Any]]


def inspect(path: str, *, checksums: bool, progress: Progress) -> dict[str, Any]:
    """Everything `compress inspect --json` says. Raises CheckpointError for what is not whole."""
    directory = resolve(path)
    provenance = read_provenance(directory)
    if checksums and provenance is not None:
        check_checksums(directory, provenance)
    elif checksums:
        raise OptionError(f"{path}: has no checksums; only artifacts written by this tool carry them")
    checkpoint = Checkpoint(directory)
    checkpoint.check_finite(lambda names: progress(names, "reading weights"))
    tables = load_skip_tables(directory, checkpoint.config)
    return {
        "kind": "checkpoint" if provenance is None else "artifact",
        "architecture": checkpoint.config.architecture.model_type,
        "layers": len(checkpoint.config.layers),
        "experts_per_layer": list(checkpoint.config.experts_per_layer),
        "experts_per_token": checkpoint.config.experts_per_token,
        "parameters": checkpoint.parameters,
        "active_parameters": checkpoint.active_parameters,
        "bytes": checkpoint.bytes,
        "dtype": str(checkpoint.model_dtype).removeprefix("torch."),
        "skip_tables": tables is not None,
        "valid": True,
        "checksums_compared": checksums,
        "provenance": provenance,
    }
