"""Hidden states of many sequences, in memory up to a limit and beyond it in a file; those that a pass leaves to go on with.

Shape suffixes: S sequences, L positions, D hidden.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from engine.errors import DataError
from engine.files.json_file import writing
from engine.passes.memory_budget import kept_bytes


class Activations:
    """Hidden states of S sequences, [S, L, D], read and replaced batch by batch."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, path: Path | None = None, together: int = 1) -> None:
        """`path`: a file of their own, which stays when they are closed; what it holds already is what they are.

        together: how many such are held at a time. What does not fit on the disk raises OutputError where it is written.
        """
        self.shape, self.dtype, self.path = shape, dtype, path
        self._row_bytes = shape[1] * shape[2] * dtype.itemsize
        in_memory = path is None and together * shape[0] * self._row_bytes <= kept_bytes()
        self._tensor = torch.empty(shape, dtype=dtype) if in_memory else None
        # A plain file and not a map: pages of a map count as resident, those of the page cache do not.
        self._file: Any = None
        if path is not None:
            self._file = open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)  # noqa: SIM115
        elif not in_memory:
            self._file = tempfile.TemporaryFile(prefix="moe-compress-", buffering=0)  # noqa: SIM115

    def __getitem__(self, rows: slice) -> Tensor:
        if self._tensor is not None:
            return self._tensor[rows]
        start, stop, _ = rows.indices(self.shape[0])
        data = torch.empty((stop - start, *self.shape[1:]), dtype=self.dtype)
        left = _bytes(data)
        self._file.seek(start * self._row_bytes)
        while left:  # a read may give less than it is asked for
            if not (count := self._file.readinto(left)):
                raise DataError(f"{self.path}: ends too early; remove it, or leave out --resume")
            left = left[count:]
        return data

    def __setitem__(self, rows: slice, values: Tensor) -> None:
        if self._tensor is not None:
            self._tensor[rows] = values
            return
        left = _bytes(values.detach().cpu().contiguous())
        with writing(self.path or Path(tempfile.gettempdir()), "the model's hidden states"):
            self._file.seek((rows.start or 0) * self._row_bytes)
            while left:
                left = left[self._file.write(left) :]

    def select(self, rows: Iterable[int]) -> Tensor:
        """Some sequences in any order, [rows, L, D]."""
        return torch.cat([self[slice(row, row + 1)] for row in rows])

    def close(self) -> None:
        """Let go of the memory or the file."""
        self._tensor = None
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _bytes(tensor: Tensor) -> memoryview:
    """A contiguous tensor's own memory."""
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array).cast("B")


@contextmanager
def closed_on_error(*several: Activations) -> Iterator[None]:
    """Let go of them where the body of the `with` raises."""
    try:
        yield
    except BaseException:
        for own in several:
            own.close()
        raise


class Shelf:
    """Activations of one shape by name; in a directory files, which an interrupted pass finds again when it goes on."""

    def __init__(self, directory: Path | None, shape: tuple[int, int, int], dtype: torch.dtype, together: int = 1) -> None:
        """together: how many are held at a time."""
        self.directory, self._shape, self._dtype, self._together = directory, shape, dtype, together
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)

    def begin(self, name: str) -> Activations:
        """Ones to be filled."""
        if self.directory is None:
            return Activations(self._shape, self._dtype, together=self._together)
        path = self.directory / f"{name}.partial"
        path.unlink(missing_ok=True)
        return Activations(self._shape, self._dtype, path)

    def finish(self, name: str) -> None:
        """They are whole, and may be found again."""
        if self.directory is not None:
            os.replace(self.directory / f"{name}.partial", self.directory / name)

    def has(self, name: str) -> bool:
        """Whether a pass before this one finished them."""
        return self.directory is not None and (self.directory / name).is_file()

    def find(self, name: str) -> Activations | None:
        """Those, where there are any."""
        if self.directory is None or not self.has(name):
            return None
        return Activations(self._shape, self._dtype, self.directory / name)

    def drop(self, name: str, own: Activations) -> None:
        """They are not needed again."""
        own.close()
        if self.directory is not None:
            (self.directory / name).unlink(missing_ok=True)
