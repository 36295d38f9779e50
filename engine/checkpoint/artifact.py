"""Artifact directories: checkpoints with a compression.json that holds plan, provenance and figures.

This module reads, checks and writes compression.json, and writes such a directory completely or not at all.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.checkpoint.remote_code import FILE_NAME as MODELLING_FILE
from engine.errors import CheckpointError, OptionError, OutputError
from engine.files.json_file import load_json, shown, write_json
from engine.files.model_files import CODE_SUFFIXES, check_entries, code_in, files_in, named
from engine.files.output_lock import claimed
from engine.files.sha256 import file_sha256

FILE_NAME = "compression.json"
SCHEMA_VERSION = 1
_KINDS: dict[str, type] = {"method": str, "source": dict, "options": dict, "figures": dict}
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def read_provenance(directory: Path) -> dict[str, Any] | None:
    """Return the content of compression.json, or None for a checkpoint that was not written by this project."""
    path = directory / FILE_NAME
    if not path.exists():
        return None
    values = load_json(path, "provenance")
    version = values.get("schema_version")
    if version != SCHEMA_VERSION:
        raise CheckpointError(
            f"{path}: schema_version is {shown(version)} and this version reads {SCHEMA_VERSION}; update moe-compress"
        )
    files = values.get("files")
    if not isinstance(files, dict) or not all(_is_file_entry(name, entry) for name, entry in files.items()):
        raise CheckpointError(f"{path}: files must map plain file names to bytes and sha256; the file is damaged")
    for name, kind in _KINDS.items():
        if not isinstance(values.get(name, kind()), kind):
            raise CheckpointError(f"{path}: {name} is {shown(values[name])}, which is not valid; the file is damaged")
    return values


def _is_file_entry(name: str, entry: Any) -> bool:
    return (
        Path(name).name == name
        and name not in ("", ".", "..")
        and isinstance(entry, dict)
        and isinstance(entry.get("bytes"), int)
        and isinstance(entry.get("sha256"), str)
    )


def write_provenance(directory: Path, values: Mapping[str, Any]) -> None:
    """Write compression.json, with the size and SHA-256 of every other file of the directory."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
        for path in sorted(directory.iterdir())
        if path.name != FILE_NAME
    }
    write_json(directory / FILE_NAME, {"schema_version": SCHEMA_VERSION} | dict(values) | {"files": files})


def check_sizes(directory: Path, provenance: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a file is missing or has another size than when the artifact was written."""
    for name, entry in provenance["files"].items():
        path = directory / name
        if not os.path.isfile(path):  # os.path.isfile, because Path.is_file raises for a name that is too long
            if name.endswith(".py") and directory.absolute().parent.name == "snapshots":
                continue  # the hub's cache: code is not downloaded, and this engine runs none
            raise CheckpointError(f"{directory}: {shown(name)} is missing; copy the artifact again")
        if path.stat().st_size != entry["bytes"]:
            size, written = path.stat().st_size, shown(entry["bytes"])
            raise CheckpointError(f"{path}: has {size} bytes, was written with {written}; copy it again")
    for path in sorted(directory.iterdir()):
        decides = path.name == "config.json" or path.suffix == ".safetensors" or path.name.endswith(".index.json")
        if decides and path.name not in provenance["files"]:
            raise CheckpointError(
                f"{path}: is not part of this artifact ({FILE_NAME}); remove it, or copy the artifact again"
            )
    for code in code_in(directory):
        if str(code) != MODELLING_FILE or MODELLING_FILE not in provenance["files"]:
            raise CheckpointError(
                f"{named(directory, directory / code)}: is code that is not part of this artifact ({FILE_NAME}); remove it, "
                "and ask where it came from"
            )


def check_checksums(directory: Path, provenance: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a file differs, byte for byte, from the file that was written."""
    check_sizes(directory, provenance)
    for name, entry in provenance["files"].items():
        if (directory / name).is_file() and file_sha256(directory / name) != entry["sha256"]:
            raise CheckpointError(f"{directory / name}: checksum differs from {FILE_NAME}; copy the artifact again")


def compare_checksums(directory: Path) -> None:
    """Check the checksums of a directory that must be an artifact and must hold no other files.

    Raises OptionError if the directory carries no checksums, and CheckpointError if a check fails.
    """
    provenance = written_here(directory)
    check_checksums(directory, provenance)
    for path in files_in(directory):
        if str(path) != FILE_NAME and str(path) not in provenance["files"] and not _is_left_by_hub(directory, path):
            raise CheckpointError(
                f"{named(directory, directory / path)}: is not part of this artifact ({FILE_NAME}); remove it, or copy the "
                "artifact again"
            )


def written_here(directory: Path) -> dict[str, Any]:
    """Return the provenance of a directory that must be an artifact. Raises OptionError if it has none."""
    check_entries(directory)
    provenance = read_provenance(directory)
    if provenance is None:
        raise OptionError(f"{directory}: has no checksums; only artifacts written by this tool carry them")
    return provenance


def _is_left_by_hub(directory: Path, path: Path) -> bool:
    """Return whether a file was left by a client of the hub next to its downloads, and is no part of the model."""
    known = str(path) == ".gitattributes" or path.parts[:2] == (".cache", "huggingface")
    return known and not (directory / path).is_symlink() and path.suffix.lower() not in CODE_SUFFIXES


def partial_path(output: Path) -> Path:
    """Return the temporary sibling that a result is written to before it is renamed."""
    return output.with_name(f".{output.name}.partial")


def check_output(output: Path, overwrite: bool, marker: str = "config.json") -> None:
    """Raise OutputError unless a result can be written to `output`. Nothing is created.

    An existing directory is replaced only if it is empty or holds `marker`, the file that identifies such a result.
    """
    if output.name in ("", ".."):
        raise OutputError(f"{output}: names no new directory; give another --output")
    if os.path.lexists(output):
        if not overwrite:
            raise OutputError(f"{output}: exists already; give another --output, or --overwrite to replace it")
        if not output.is_dir() or output.is_symlink():
            raise OutputError(f"{output}: is not a directory, so it is not replaced; give another --output")
        if any(output.iterdir()) and not (output / marker).is_file():
            raise OutputError(f"{output}: holds something else (no {marker}), so it is not replaced; give another --output")
    parent = output.absolute().parent
    while not os.path.exists(parent):
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise OutputError(f"{output}: cannot be made in {parent}; give another --output")


def check_file_output(output: Path, overwrite: bool) -> None:
    """Raise OutputError unless a result that is one file can be written to `output`. Nothing is created."""
    if os.path.lexists(output) and not overwrite:
        raise OutputError(f"{output}: exists already; give another file, or --overwrite to replace it")
    if not output.name or os.path.isdir(output) or not os.access(output.absolute().parent, os.W_OK | os.X_OK):
        raise OutputError(f"{output}: cannot be written as a file; give another one, in a directory that exists")
    if not os.path.isdir(output.absolute().parent):
        raise OutputError(f"{output}: {output.absolute().parent} is not a directory; give another file")


@contextmanager
def whole_or_nothing(output: Path, overwrite: bool, marker: str = "config.json") -> Iterator[Path]:
    """Yield a temporary sibling directory to write to, and rename it to `output` in one step when the body ends.

    If the body raises, the sibling is removed; if the process is killed, the next run removes it. An old directory is
    exchanged with the new one in a single system call and removed afterwards. Raises OutputError if another run is
    writing `output`; during the body, other runs are refused in the same way.
    """
    with claimed(output):
        check_output(output, overwrite, marker)
        with _made_whole(output) as partial:
            yield partial


@contextmanager
def _made_whole(output: Path) -> Iterator[Path]:
    partial = partial_path(output)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        for path in (*partial.iterdir(), partial):
            _sync(path)
        if output.exists():
            _exchange(partial, output)
        else:
            partial.rename(output)
        _sync(output.absolute().parent)
    except OSError as error:
        raise OutputError(
            f"{output}: cannot be written ({error.strerror or error}); make space or give another --output"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(new: Path, old: Path) -> None:
    """Swap two directories atomically if the operating system supports it, and by two renames otherwise."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is not None:
        done = renameat2(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE)
        if done == 0:
            return
    aside = old.with_name(f".{old.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    old.rename(aside)
    try:
        new.rename(old)
    except OSError:
        aside.rename(old)
        raise
    shutil.rmtree(aside, ignore_errors=True)
