"""Checks of the entries of a model directory: links, special files, and files of code.

A directory is checked once, when it is opened, so that readers of its files need not handle links and pipes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from engine.errors import CheckpointError
from engine.files.json_file import shown

MAX_ENTRIES = 100_000
"""Limit on the files and folders that are visited; a model has a few hundred."""
CODE_SUFFIXES = frozenset((".py", ".pyc", ".pyd", ".pyi", ".pyo", ".pyw", ".pyx", ".pyz", ".so", ".dylib", ".dll"))
"""Suffixes of the files that Python imports."""


def check_entries(directory: Path) -> None:
    """Raise CheckpointError for a link that leads out of the directory, and for pipes, sockets and devices, at any depth."""
    if not directory.is_dir():
        return
    roots = _roots(directory)
    for entry in _entries(directory):
        if entry.is_symlink():
            _check_target(directory, Path(entry.path), roots)
        elif not (entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)):
            raise CheckpointError(
                f"{named(directory, entry.path)}: is neither a regular file nor a directory, and opening it may wait "
                "forever; remove it"
            )


def check_inside(directory: Path, path: Path) -> None:
    """Raise CheckpointError for a link that leads out of the directory, except to the `blobs` of a Hugging Face cache.

    That cache has the layout `snapshots/REVISION/FILE`, each file a link to `../../blobs/HASH`.
    """
    _check_target(directory, path, _roots(directory))


def files_in(directory: Path) -> Iterator[Path]:
    """Yield the relative paths of all entries at any depth that are not directories; links are not followed."""
    for entry in _entries(directory):
        if not entry.is_dir(follow_symlinks=False):
            yield Path(entry.path).relative_to(directory)


def code_in(directory: Path) -> Iterator[Path]:
    """Yield the relative paths of the files whose suffix Python would import."""
    return (path for path in files_in(directory) if path.suffix.lower() in CODE_SUFFIXES)


def named(directory: Path, path: str | Path) -> str:
    """Return a file's path for an error message, on one line even if the name contains control characters."""
    return str(path) if str(path).isprintable() else f"{directory}: {shown(os.path.relpath(path, directory))}"


def _roots(directory: Path) -> tuple[Path, ...]:
    """Return the directories that links may point into."""
    base = Path(os.path.realpath(directory))
    return (base, base.parent.parent / "blobs") if base.parent.name == "snapshots" else (base,)


def _check_target(directory: Path, path: Path, roots: tuple[Path, ...]) -> None:
    target = Path(os.path.realpath(path))
    if not any(target.is_relative_to(root) for root in roots):
        raise CheckpointError(
            f"{named(directory, path)}: link leads out of the checkpoint directory; put the file itself there"
        )


def _entries(directory: Path) -> Iterator[os.DirEntry[str]]:
    pending, count = [str(directory)], 0
    while pending:
        place = pending.pop()
        try:
            with os.scandir(place) as found:
                for entry in found:
                    count += 1
                    if count > MAX_ENTRIES:
                        raise CheckpointError(
                            f"{directory}: holds more than {MAX_ENTRIES} files; give a directory that holds the model alone"
                        )
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    yield entry
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise CheckpointError(
                f"{named(directory, place)}: cannot be listed ({reason}); give the directory of a checkpoint"
            ) from error
