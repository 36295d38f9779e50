"""The directory of compiled kernels on disk, which is named after everything that their code depends on.

Numba's own cache checks only the file of a function, but kernels are made of functions of several files. Here the name of
the directory contains a digest of every file of this package and of Numba's version, and a digest of the processor. A change
of any of them leads to a new directory, and directories of older digests are removed.

The directory lies where Numba would keep its own cache: in `NUMBA_CACHE_DIR` if that is set, else beside the package's
files, else in the user's cache directory. The first of these places that is writable is taken.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from numba.misc.appdirs import AppDirs

from engine.kernels.processor import FEATURES, NAME

_ROOM = Path(__file__).resolve().parent
_PREFIX = "moe_compress_kernels"


def _digest(*parts: bytes) -> str:
    made = hashlib.sha256()
    for part in parts:
        made.update(len(part).to_bytes(8, "little") + part)
    return made.hexdigest()[:16]


def source_digest(room: Path = _ROOM) -> str:
    """Return a digest of the package's files and of the versions that compile them."""
    files = [part for path in sorted(room.glob("*.py")) for part in (path.name.encode(), path.read_bytes())]
    return _digest(*files, numba.__version__.encode(), llvmlite.__version__.encode(), sys.version.encode())


def processor_digest() -> str:
    """Return a digest of the processor's name and features."""
    return _digest(NAME.encode(), FEATURES.encode())


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
