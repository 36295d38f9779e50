"""A directory of small tensor files that may be lost at any time: a cache on disk with a limited size.

Each file has a key, 64 hexadecimal digits, as its name. The files are state files (state_file.py): safetensors with a
digest of their content, which is compared whenever a file is read. The ones that were used least recently are removed
when the size reaches its limit. One process at a time uses a directory. Files with other names are left alone.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import torch

from engine.errors import DataError, OptionError
from engine.files.json_file import writing
from engine.files.safetensors_file import LoadedFile
from engine.files.safetensors_writer import PAGE_BYTES
from engine.files.state_file import check_digest, write_state

KEY = "key"
"""Metadata key of the file's own key: a file that was renamed is refused."""
SECRET_BYTES = 32
HEADER_BYTES = PAGE_BYTES
"""Allowance for the header of a file that is about to be written: it ends on a page, and names one or two tensors."""
_SUFFIX = ".safetensors"
_NAME = re.compile(r"[0-9a-f]{64}\.safetensors")
_PARTIAL = re.compile(r"\.[0-9a-f]{64}\.safetensors\.partial")


class _KeptFile(LoadedFile):
    """A file whose time of change is that of its last use, which another thread may set while this one reads.

    The digest of its content tells whether it was replaced.
    """

    def check_unchanged(self, file: BinaryIO) -> None:
        """Do nothing."""


class KeptFiles:
    """The files of one directory. Any thread may use it; reading and writing files does not hold the lock."""

    def __init__(self, directory: Path, limit: int) -> None:
        """Open or create the directory, and remove what exceeds `limit`, in bytes.

        Raises OptionError for a directory that cannot be used, that others may write to, or that another process uses.
        """
        self.directory, self.limit = directory, limit
        self._guard = threading.Lock()
        self._sizes: OrderedDict[str, int] = OrderedDict()
        """Size in bytes by key, the least recently used file first."""
        self.bytes = 0
        """Size of all files together."""
        self._last_time = 0
        try:
            _private_directory(directory)
            self._descriptor = _locked(directory)
            self.secret = _secret(directory / "secret")
            """Random bytes that belong to the directory and stay the same as long as it exists."""
            self._scan()
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise OptionError(f"{directory}: cannot be used as a cache ({reason}); give another directory") from error
        self._make_room(0)

    def __contains__(self, key: str) -> bool:
        with self._guard:
            return key in self._sizes

    def read(self, key: str) -> dict[str, torch.Tensor]:
        """Return the tensors of a file. Raises CheckpointError or DataError if it cannot be read or is damaged."""
        path = self._path(key)
        file = _KeptFile(path)
        check_digest(file)
        if file.metadata.get(KEY) != key:
            raise DataError(f"{path}: holds another file's content; remove it")
        return {name: file.tensor(name) for name in file.entries}

    def write(self, key: str, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Write a file as the most recently used one. Returns False if it is larger than the limit. Raises OutputError."""
        size = sum(tensor.nbytes for tensor in tensors.values()) + HEADER_BYTES
        if size > self.limit:
            return False
        self._make_room(size)
        path = self._path(key)
        write_state(path, tensors, {KEY: key}, "cached keys and values", is_cache=True)
        with writing(path, "cached keys and values"):
            written = path.stat().st_size
        with self._guard:
            self.bytes += written - self._sizes.pop(key, 0)
            self._sizes[key] = written
            used = self._next_time()
        self._stamp(path, used)
        return True

    def touch(self, keys: Iterable[str]) -> None:
        """Make files the most recently used ones, the last one most of all."""
        for key in keys:
            with self._guard:
                if key not in self._sizes:
                    continue
                self._sizes.move_to_end(key)
                used = self._next_time()
            self._stamp(self._path(key), used)

    def forget(self, key: str) -> None:
        """Take a file for absent from now on, without any access to the disk; `remove` removes it."""
        with self._guard:
            self.bytes -= self._sizes.pop(key, 0)

    def remove(self, key: str) -> None:
        """Remove a file, if it exists."""
        self.forget(key)
        with suppress(OSError):
            self._path(key).unlink()

    def close(self) -> None:
        """Let other processes use the directory. Further calls have no effect."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}{_SUFFIX}"

    def _next_time(self) -> int:
        """Return the time in nanoseconds, later than all before: times that a file system sets may be equal."""
        self._last_time = max(time.time_ns(), self._last_time + 1)
        return self._last_time

    @staticmethod
    def _stamp(path: Path, used: int) -> None:
        with suppress(OSError):
            os.utime(path, ns=(used, used))

    def _scan(self) -> None:
        """Find the files that are there, and remove those that a killed process did not complete."""
        found: list[tuple[int, str, int]] = []
        with os.scandir(self.directory) as entries:
            for entry in entries:
                if _PARTIAL.fullmatch(entry.name):
                    os.unlink(entry.path)
                elif _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_mtime_ns, entry.name.removesuffix(_SUFFIX), status.st_size))
        self._sizes.update((key, size) for _, key, size in sorted(found))
        self.bytes = sum(self._sizes.values())

    def _make_room(self, size: int) -> None:
        """Remove the least recently used files until `size` more bytes are within the limit."""
        while True:
            with self._guard:
                if not self._sizes or self.bytes + size <= self.limit:
                    return
                oldest = next(iter(self._sizes))
            self.remove(oldest)


def _private_directory(directory: Path) -> None:
    """Create a directory for this user alone. Raises OptionError for one that others may write to."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OptionError(f"{directory}: other users can write there, and its content is trusted; give another directory")


def _locked(directory: Path) -> int:
    """Return a descriptor whose lock on the directory ends with the process. Raises OptionError if another one has it."""
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise OptionError(f"{directory}: another process uses this cache; give another directory") from None
    except OSError:
        pass  # a file system without locks
    return descriptor


def _secret(path: Path) -> bytes:
    """Return the secret in a file, which is created if there is none or if it is damaged."""
    with suppress(FileNotFoundError):
        found = path.read_bytes()
        if len(found) == SECRET_BYTES:
            return found
    made = secrets.token_bytes(SECRET_BYTES)
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(made)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    return made
