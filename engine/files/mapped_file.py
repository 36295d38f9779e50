"""Files of tensors that are memory-mapped: what every format of such files has in common.

A subclass reads and checks its header when it is opened; tensors are then read by the locations of their entries.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, Self

from engine.errors import CheckpointError
from engine.files.element_type import ElementType
from engine.files.json_file import reading, shown

if TYPE_CHECKING:
    import torch

RELEASE_EVERY_BYTES = 64 << 20
"""Bytes that are read before their mapped pages are given back."""
_MOST_BYTES_OF_A_CALL = 1 << 30
SMALL_BYTES, SAMPLE_BYTES = 16_384, 4_096
"""Sizes in bytes: a tensor up to SMALL_BYTES is sampled completely; a larger one is sampled by SAMPLE_BYTES bytes."""


@dataclass(frozen=True)
class TensorEntry:
    """Location of one tensor in the file: bytes `begin` to `end`, counted from the start of the file."""

    element: ElementType
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the elements in torch, which this imports."""
        return self.element.torch

    @property
    def nbytes(self) -> int:
        """The tensor's size in bytes."""
        return self.end - self.begin


class Extent(NamedTuple):
    """Some consecutive bytes of a file."""

    begin: int
    end: int

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.end - self.begin


def extent_of(tensor: torch.Tensor, address: int) -> Extent:
    """Return the bytes from a tensor's first to its last, whatever its strides are. address: of the file's first byte."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr() - address
    return Extent(begin, begin + (last + 1) * tensor.element_size())


def read_part(path: Path, descriptor: int, target: memoryview, place: int, size: int) -> None:
    """Read `size` bytes of weights, from a place of an open file on. Several threads may read at once.

    target: memory, which may be longer, as direct I/O needs it. Raises CheckpointError for a disk that fails and for a file
    that has become shorter.
    """
    done = 0
    while done < size:
        try:
            count = os.preadv(descriptor, [target[done : done + _MOST_BYTES_OF_A_CALL]], place + done)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise CheckpointError(f"{path}: weights cannot be read ({reason}); check the disk") from error
        if count == 0:
            raise CheckpointError(f"{path}: file became shorter while in use; start again once it is written")
        done += count


def _identity(file: BinaryIO) -> tuple[int, int, int, int]:
    """Return a key that changes when the file at a path is replaced or rewritten."""
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _sampled(name: str, entry: TensorEntry) -> tuple[int, int]:
    """Return the offset in the file and the length of a tensor's sample, in bytes."""
    if entry.nbytes <= SMALL_BYTES:
        return entry.begin, entry.nbytes
    return entry.begin + zlib.crc32(name.encode(errors="surrogatepass")) % (entry.nbytes - SAMPLE_BYTES + 1), SAMPLE_BYTES


class MappedFile:
    """One file of tensors: validated completely when opened, memory-mapped when a tensor is first requested.

    Attributes: `path`; `size` in bytes; `entries`, each tensor's location, in the header's order.
    No file descriptor stays open between calls. Invalid content raises only CheckpointError.
    """

    what = "file"
    """Name of the format in messages."""
    entries: dict[str, TensorEntry]

    def __init__(self, path: Path) -> None:
        """Read and check the header of the file at `path`; CheckpointError says what is wrong with it."""
        self.path = path
        self.header_only = False
        """Whether only the header was fetched; reading tensors then raises CheckpointError."""
        self._map: mmap.mmap | None = None
        self._is_served = False
        """Whether tensors come from memory that this file did not map."""
        self._kept: list[tuple[int, int]] = []
        """Parts of the mapping that `release` leaves alone, in order."""
        with reading(path, self.what) as file:
            self._identity = _identity(file)
            self.size = self._identity[2]
            self.read_header(file)

    def read_header(self, file: BinaryIO) -> None:
        """Read and check the header, and set `entries`."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def serve_from(self, memory: mmap.mmap) -> None:
        """Return tensors from `memory`, which has the file's layout and which the caller fills, and never release it."""
        self._map, self._is_served = memory, True

    @property
    def address(self) -> int | None:
        """Address of the mapping; None for a file that has not mapped its tensors."""
        if self._map is None or self._is_served:
            return None
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def keep(self, begin: int, end: int) -> None:
        """Let `release` leave a part of the mapping alone, from page to page: something else than the file is there."""
        self._kept = sorted([*self._kept, (begin, end)])

    def check_unchanged(self, file: BinaryIO) -> None:
        """Raise CheckpointError for a file that is not the one whose header was checked."""
        if _identity(file) != self._identity:
            raise CheckpointError(f"{self.path}: file changed while in use; start again once it is written")

    def _mapping(self) -> mmap.mmap | bytearray:
        """Return the whole file, mapped copy-on-write: torch needs writable buffers, and no write reaches the file."""
        if self.header_only:
            raise CheckpointError(f"{self.path}: only its header was fetched; fetch the file to read its tensors")
        if self._map is None:
            with reading(self.path, self.what) as file:
                self.check_unchanged(file)
                self._map = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_COPY)
        return self._map

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor called `name`, in the dtype and shape of its entry; CheckpointError if the file has none.

        The tensor is a read-only view of the mapping by convention, and keeps the mapping alive. It is a copy only if
        the file stores its elements at addresses that are not multiples of their size.
        """
        import torch  # here: headers are read without it

        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path}: no tensor {shown(name)}; give a checkpoint that holds it")
        if entry.nbytes == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        data = torch.frombuffer(self._mapping(), dtype=torch.uint8, count=entry.nbytes, offset=entry.begin)
        if entry.begin % entry.element.itemsize:
            data = data.clone()
        return data.view(entry.dtype).view(entry.shape)

    def raw(self, name: str) -> memoryview:
        """Return the bytes of a tensor of this file: memory-mapped and read-only by convention."""
        entry = self.entries[name]
        return memoryview(self._mapping())[entry.begin : entry.end] if entry.nbytes else memoryview(b"")

    def release(self) -> None:
        """Drop the mapping's resident pages; tensors stay valid and load from the file again when next read.

        Changes in written pages would be lost. This is safe only because nothing writes to mapped tensors.
        """
        if self._map is None or self._is_served:
            return
        place = 0
        for begin, end in [*self._kept, (self.size, self.size)]:
            if place < begin:
                self._map.madvise(mmap.MADV_DONTNEED, place, begin - place)
            place = max(place, end)

    def samples(self) -> Iterator[tuple[str, bytes]]:
        """Yield each tensor's name and a sample of its bytes: all bytes of a small tensor, a block of a larger one.

        The position of the block depends on the name only. Samples distinguish contents without reading whole files,
        and are equal in a copy of the file. No page becomes resident.
        """
        if self.header_only:
            raise CheckpointError(f"{self.path}: only its header was fetched; fetch the file to read its tensors")
        places = {name: _sampled(name, entry) for name, entry in self.entries.items()}
        with reading(self.path, self.what) as file:
            self.check_unchanged(file)
            if hasattr(os, "posix_fadvise"):  # request all samples before waiting for the first
                for place, size in filter(itemgetter(1), places.values()):  # a size of 0 would mean the rest of the file
                    os.posix_fadvise(file.fileno(), place, size, os.POSIX_FADV_WILLNEED)
            for name in sorted(places, key=lambda name: (places[name], name)):
                place, size = places[name]
                yield name, os.pread(file.fileno(), size, place)

    @property
    def state(self) -> str:
        """Name, size and modification time (ns) of the file; a different value means that the file was rewritten."""
        return f"{self.path.name} {self._identity[2]} {self._identity[3]}"

    def read_ahead(self, names: Iterable[str]) -> None:
        """Ask the operating system to read these tensors into its page cache; no process memory is used."""
        if not hasattr(os, "posix_fadvise"):
            return
        with reading(self.path, self.what) as file:
            for entry in (self.entries[name] for name in names):
                os.posix_fadvise(file.fileno(), entry.begin, entry.nbytes, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Drop the reference to the mapping, which ends with the last tensor on it; a later `tensor` maps the file anew.

        The mapping is not closed explicitly: torch does not lock the buffer, so live tensors would point to unmapped
        memory.
        """
        if not self._is_served:
            self._map, self._kept = None, []


def state_of(files: Iterable[MappedFile]) -> str:
    """Return the SHA-256 over the files' states, by which a resumed run detects files that were rewritten."""
    return hashlib.sha256("\n".join(file.state for file in files).encode(errors="surrogatepass")).hexdigest()


class Releasing:
    """Gives mapped pages back at intervals, counted over everything that is read."""

    def __init__(self, release: Callable[[], None]) -> None:
        """release: gives the pages back."""
        self._release, self._read = release, 0

    def read(self, size: int) -> None:
        """Count so many bytes that were read."""
        self._read += size
        if self._read >= RELEASE_EVERY_BYTES:
            self._release()
            self._read = 0
