"""Hidden states of many sequences: in memory up to a limit, and in a file beyond it or to resume an interrupted pass.

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
from engine.passes.memory_budget import UNLIMITED, MemoryBudget


class Activations:
    """Hidden states of S sequences, [S, L, D], read and replaced batch by batch."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        path: Path | None = None,
        together: int = 1,
        budget: MemoryBudget = UNLIMITED,
    ) -> None:
        """`path`: a file that is kept on close; if it exists already, its content is the hidden states.

        together: how many Activations of this shape are held at a time. budget: decides whether they stay in memory.
        Writing raises OutputError if the disk is full.
        """
        self.shape, self.dtype, self.path = shape, dtype, path
        self._row_bytes = shape[1] * shape[2] * dtype.itemsize
        in_memory = path is None and together * shape[0] * self._row_bytes <= budget.kept_bytes
        self._tensor = torch.empty(shape, dtype=dtype) if in_memory else None
        # A plain file instead of a mapping: mapped pages count as resident memory, pages of the page cache do not.
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
        while left:  # a read may return fewer bytes than requested
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
        """Return the sequences `rows`, in any order, [rows, L, D]."""
        return torch.cat([self[slice(row, row + 1)] for row in rows])

    def close(self) -> None:
        """Free the memory, or close the file."""
        self._tensor = None
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _bytes(tensor: Tensor) -> memoryview:
    """Return a view of a contiguous tensor's memory."""
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array).cast("B")


@contextmanager
def closed_on_error(*several: Activations) -> Iterator[None]:
    """Close the activations if the body raises."""
    try:
        yield
    except BaseException:
        for own in several:
            own.close()
        raise


class Shelf:
    """Activations of one shape by name. With a directory they are files, which an interrupted pass finds when it resumes."""

    def __init__(
        self,
        directory: Path | None,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        together: int = 1,
        budget: MemoryBudget = UNLIMITED,
    ) -> None:
        """together: how many are held at a time. budget: decides whether they stay in memory without a directory."""
        self.directory, self._shape, self._dtype, self._together, self._budget = directory, shape, dtype, together, budget
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)

    def begin(self, name: str) -> Activations:
        """Return new activations, to be filled."""
        if self.directory is None:
            return Activations(self._shape, self._dtype, together=self._together, budget=self._budget)
        path = self.directory / f"{name}.partial"
        path.unlink(missing_ok=True)
        return Activations(self._shape, self._dtype, path)

    def finish(self, name: str) -> None:
        """Mark activations as complete, so that they can be found again."""
        if self.directory is not None:
            os.replace(self.directory / f"{name}.partial", self.directory / name)

    def has(self, name: str) -> bool:
        """Return whether an earlier pass completed these activations."""
        return self.directory is not None and (self.directory / name).is_file()

    def find(self, name: str) -> Activations | None:
        """Return activations that an earlier pass completed, or None."""
        if self.directory is None or not self.has(name):
            return None
        return Activations(self._shape, self._dtype, self.directory / name)

    def drop(self, name: str, own: Activations) -> None:
        """Delete activations that are not needed any more."""
        own.close()
        if self.directory is not None:
            (self.directory / name).unlink(missing_ok=True)
