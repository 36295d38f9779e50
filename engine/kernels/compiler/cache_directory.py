"""The directory of compiled kernels on disk, which is named after everything that their code depends on.

Numba's own cache checks only the file of a function, but kernels are made of functions of several files. Here the name of
the directory contains a digest of every file of this package and of Numba's version, and a digest of the processor. A change
of any of them leads to a new directory, and directories of older digests are removed.

Processes that start together compile each kernel once: a process that compiles one holds a lock on a file beside its code.

The directory lies where Numba would keep its own cache: in `NUMBA_CACHE_DIR` if that is set, else beside the package's
files, else in the user's cache directory. The first of these places that is writable is taken.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from numba.misc.appdirs import AppDirs

from engine.kernels.compiler.processor import FEATURES, HOST, NAME

_ROOM = Path(__file__).resolve().parents[1]
_PREFIX = "moe_compress_kernels"
_LONGEST_WAIT = 60.0
"""Seconds to wait for another process that compiles a kernel. No kernel takes so long; the process may have been stopped."""
_RETRY_SECONDS = 0.02


def _digest(*parts: bytes) -> str:
    made = hashlib.sha256()
    for part in parts:
        made.update(len(part).to_bytes(8, "little") + part)
    return made.hexdigest()[:16]


def source_digest(room: Path = _ROOM) -> str:
    """Return a digest of the package's files and of the versions that compile them."""
    paths = sorted(room.rglob("*.py"))
    files = [part for path in paths for part in (path.relative_to(room).as_posix().encode(), path.read_bytes())]
    return _digest(*files, numba.__version__.encode(), llvmlite.__version__.encode(), sys.version.encode())


def processor_digest() -> str:
    """Return a digest of the processor's name, and of the name and features that kernels are compiled for."""
    return _digest(HOST.encode(), NAME.encode(), FEATURES.encode())


def _parents() -> Iterator[Path]:
    if numba.config.CACHE_DIR:
        yield Path(numba.config.CACHE_DIR)
    yield _ROOM / "__pycache__"
    yield Path(AppDirs(appname="numba", appauthor=False).user_cache_dir)


@cache
def cache_directory() -> Path:
    """Return the directory, which is created if it does not exist.

    Raises:
        RuntimeError: none of the places is writable.
    """
    # One parent may serve several checkouts, and one home several processors: a checkout removes only its own old code.
    checkout = f"{_PREFIX}-{_digest(str(_ROOM).encode())}"
    current = f"{checkout}-{source_digest()}"
    for parent in _parents():
        place = parent / f"{current}-{processor_digest()}"
        is_new = not place.is_dir()
        try:
            place.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=place).close()
        except OSError:
            continue
        if is_new:
            for old in parent.glob(f"{checkout}-*"):
                if not old.name.startswith(current):
                    shutil.rmtree(old, ignore_errors=True)
        return place
    raise RuntimeError(
        "compiled kernels cannot be kept: neither the package nor the user's cache directory can be written to"
    )


class _Locator(_CacheLocator):  # type: ignore[misc]
    """Makes Numba keep a function in the directory. The directory's name covers every change of the code."""

    def __init__(self, function: Any) -> None:
        self._line = function.__code__.co_firstlineno

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> _Locator:
        return cls(py_func)

    def get_cache_path(self) -> str:
        return str(cache_directory())

    def get_source_stamp(self) -> str:
        return source_digest()

    def get_disambiguator(self) -> str:
        return str(self._line)


class _CacheFiles(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_Locator,)


class KernelCache(FunctionCache):  # type: ignore[misc]
    """Numba's cache of one function, kept in the directory."""

    _impl_class = _CacheFiles

    def holds(self, signature: Any, context: Any) -> bool:
        """Return whether the directory holds the function's code, compiled for this signature."""
        context.refresh()
        name = self._cache_file._load_index().get(self._index_key(signature, context.codegen()))
        return name is not None and Path(self._cache_file._data_path(name)).exists()

    @contextmanager
    def locked(self, *, waits: bool = True) -> Iterator[bool]:
        """Hold the function's lock, which excludes other processes. Yields whether the caller may compile the function.

        The value is False only if another process holds the lock and `waits` is False. A lock only saves work, so the
        caller may also go on without it: after a minute, or on a file system that has no locks.
        """
        path = Path(self._cache_path) / f"{self._impl.filename_base}.lock"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            yield True
            return
        try:
            is_ours = _wait(descriptor, _LONGEST_WAIT if waits else 0.0)
            yield is_ours or waits
            if is_ours:  # whoever waits for this file, or makes a new one, finds the code on disk
                path.unlink(missing_ok=True)
        finally:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may have a copy of the descriptor
            os.close(descriptor)


def _wait(descriptor: int, seconds: float) -> bool:
    """Lock the file within so many seconds. Return False if another process kept it locked."""
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(_RETRY_SECONDS)
        except OSError:
            return True
        else:
            return True
