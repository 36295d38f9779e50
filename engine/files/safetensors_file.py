"""Safetensors checkpoints: files are validated completely before use, and read by memory mapping.

The format: 8 bytes with the header's length (little-endian); the header, a JSON object that gives each tensor's dtype,
shape and byte range; the data, which the ranges cover without gap or overlap. The reference library is not used here,
so that every error about an untrusted file names the tensor and says what to do.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, Self

from engine.errors import CheckpointError
from engine.files.element_type import ELEMENT_TYPES, ElementType
from engine.files.json_file import load_json, parse_object, reading, shown
from engine.files.model_files import check_inside

if TYPE_CHECKING:
    import torch

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000

_WHAT = "safetensors file"
HEADER_LENGTH = struct.Struct("<Q")
_MAX_RANK = 64  # torch operations refuse tensors of higher rank
_MAX_BYTES = 2**63 - 1  # torch counts elements and bytes in int64
SMALL_BYTES, SAMPLE_BYTES = 16_384, 4_096
"""Sizes in bytes: a tensor up to SMALL_BYTES is sampled completely; a larger one is sampled by SAMPLE_BYTES bytes."""
PICKLES = (".bin", ".pt", ".pth")
METADATA = "__metadata__"
_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}
_AGAIN = "fetch or write the file again"


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


class Sized(Protocol):
    """An ElementType, or a dtype of torch."""

    @property
    def itemsize(self) -> int:
        """Size of an element in bytes."""


def tensor_bytes(dtype: Sized, shape: Iterable[int]) -> int | None:
    """Return the size of a tensor in bytes, or None if it exceeds int64.

    A tensor with a zero dimension is empty, but its strides are not: the product of its other dimensions must fit too.
    """
    nonzero, empty = dtype.itemsize, False
    for size in shape:
        nonzero *= size or 1
        empty = empty or size == 0
        if nonzero > _MAX_BYTES:
            return None
    return 0 if empty else nonzero


def _is_natural(value: object) -> bool:
    """Return whether `value` is a non-negative integer. JSON's true and false, which are ints in Python, do not count."""
    return type(value) is int and value >= 0


def _parse_shape(where: str, dtype: ElementType, raw: object) -> tuple[tuple[int, ...], int]:
    """Return the shape in a header's entry and the tensor's size in bytes."""
    if not isinstance(raw, list) or not all(map(_is_natural, raw)):
        raise CheckpointError(f"{where}: shape {shown(raw)} is not a list of non-negative integers; {_AGAIN}")
    if len(raw) > _MAX_RANK:
        raise CheckpointError(f"{where}: shape has {len(raw)} dimensions, more than {_MAX_RANK}; {_AGAIN}")
    nbytes = tensor_bytes(dtype, raw)
    if nbytes is None:
        raise CheckpointError(f"{where}: shape {shown(raw)} is too large to address; {_AGAIN}")
    return tuple(raw), nbytes


def _parse_offsets(where: str, raw: object) -> tuple[int, int]:
    """Return the byte range in a header's entry, counted from the start of the data."""
    if not isinstance(raw, list) or len(raw) != 2 or not all(map(_is_natural, raw)) or raw[0] > raw[1]:
        raise CheckpointError(f"{where}: data_offsets {shown(raw)} is not [begin, end] with 0 <= begin <= end; {_AGAIN}")
    return raw[0], raw[1]


def _parse_entry(where: str, raw: object, data_start: int, file_size: int) -> TensorEntry:
    """Parse and check one tensor's entry of the header; error messages begin with `where`."""
    if not isinstance(raw, dict) or raw.keys() != _ENTRY_KEYS:
        raise CheckpointError(f"{where}: entry does not hold exactly dtype, shape and data_offsets; {_AGAIN}")
    dtype = ELEMENT_TYPES.get(raw["dtype"]) if isinstance(raw["dtype"], str) else None
    if dtype is None:
        known = ", ".join(ELEMENT_TYPES)
        raise CheckpointError(f"{where}: unknown dtype {shown(raw['dtype'])}; convert the tensor to one of {known}")
    shape, nbytes = _parse_shape(where, dtype, raw["shape"])
    begin, end = _parse_offsets(where, raw["data_offsets"])
    if end - begin != nbytes:
        raise CheckpointError(f"{where}: data_offsets span {end - begin} bytes, dtype and shape {nbytes}; {_AGAIN}")
    if data_start + end > file_size:
        missing = data_start + end - file_size
        raise CheckpointError(f"{where}: data runs {missing} bytes past the end of the file; {_AGAIN}")
    return TensorEntry(dtype, shape, data_start + begin, data_start + end)


def _check_coverage(path: Path, entries: Mapping[str, TensorEntry], data_start: int, file_size: int) -> None:
    """Refuse data that belongs to two tensors or to none."""
    reached = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin < reached:
            raise CheckpointError(f"{path}: tensor {shown(name)}: data overlaps another tensor's; {_AGAIN}")
        if entry.begin > reached:
            gap = entry.begin - reached
            raise CheckpointError(f"{path}: tensor {shown(name)}: a hole of {gap} unused bytes before it; {_AGAIN}")
        reached = entry.end
    if reached < file_size:
        raise CheckpointError(f"{path}: {file_size - reached} trailing bytes after the last tensor; {_AGAIN}")


def _parse_metadata(path: Path, raw: object) -> dict[str, str]:
    """Check and return the header's metadata. Its keys need no check: keys in JSON are strings."""
    if not isinstance(raw, dict) or not all(isinstance(value, str) for value in raw.values()):
        raise CheckpointError(f"{path}: {METADATA} does not map strings to strings; {_AGAIN}")
    return raw


def _read_header(path: Path, file: BinaryIO, file_size: int) -> tuple[dict[str, Any], int]:
    """Return the header's JSON object and the byte offset of the data after it."""
    prefix = file.read(HEADER_LENGTH.size)
    if len(prefix) < HEADER_LENGTH.size:
        raise CheckpointError(f"{path}: {len(prefix)} bytes are too short for a {_WHAT}; {_AGAIN}")
    (length,) = HEADER_LENGTH.unpack(prefix)
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path}: header length {length} is over {MAX_HEADER_BYTES}, not a {_WHAT}; {_AGAIN}")
    data_start = HEADER_LENGTH.size + length
    header = file.read(length) if data_start <= file_size else b""
    if len(header) < length:
        raise CheckpointError(f"{path}: truncated, header ends at byte {data_start} but file at {file_size}; {_AGAIN}")
    return parse_object(header, f"{path}: header"), data_start


def _identity(file: BinaryIO) -> tuple[int, int, int, int]:
    """Return a key that changes when the file at a path is replaced or rewritten."""
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _sampled(name: str, entry: TensorEntry) -> tuple[int, int]:
    """Return the offset in the file and the length of a tensor's sample, in bytes."""
    if entry.nbytes <= SMALL_BYTES:
        return entry.begin, entry.nbytes
    return entry.begin + zlib.crc32(name.encode(errors="surrogatepass")) % (entry.nbytes - SAMPLE_BYTES + 1), SAMPLE_BYTES


class SafetensorsFile:
    """One safetensors file: validated completely when opened, memory-mapped when a tensor is first requested.

    Attributes: `path`; `metadata`, the header's free texts; `entries`, each tensor's location, in the header's order.
    No file descriptor stays open between calls. Invalid content raises only CheckpointError.
    """

    def __init__(self, path: Path) -> None:
        """Read and check the header of the file at `path`; CheckpointError says what is wrong with it."""
        self.path = path
        self.header_only = False
        """Whether only the header was fetched; reading tensors then raises CheckpointError."""
        self._map: mmap.mmap | None = None
        with reading(path, _WHAT) as file:
            self._identity = _identity(file)
            self.size = self._identity[2]
            header, data_start = _read_header(path, file, self.size)
        self.metadata = _parse_metadata(path, header.pop(METADATA, {}))
        self.entries = {
            name: _parse_entry(f"{path}: tensor {shown(name)}", raw, data_start, self.size) for name, raw in header.items()
        }
        _check_coverage(path, self.entries, data_start, self.size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_unchanged(self, file: BinaryIO) -> None:
        """Raise CheckpointError for a file that is not the one whose header was checked."""
        if _identity(file) != self._identity:
            raise CheckpointError(f"{self.path}: file changed while in use; start again once it is written")

    def _mapping(self) -> mmap.mmap:
        """Return the whole file, mapped copy-on-write: torch needs writable buffers, and no write reaches the file."""
        if self.header_only:
            raise CheckpointError(f"{self.path}: only its header was fetched; fetch the file to read its tensors")
        if self._map is None:
            with reading(self.path, _WHAT) as file:
                self._check_unchanged(file)
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
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)

    def samples(self) -> Iterator[tuple[str, bytes]]:
        """Yield each tensor's name and a sample of its bytes: all bytes of a small tensor, a block of a larger one.

        The position of the block depends on the name only. Samples distinguish contents without reading whole files,
        and are equal in a copy of the file. No page becomes resident.
        """
        if self.header_only:
            raise CheckpointError(f"{self.path}: only its header was fetched; fetch the file to read its tensors")
        places = {name: _sampled(name, entry) for name, entry in self.entries.items()}
        with reading(self.path, _WHAT) as file:
            self._check_unchanged(file)
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
        with reading(self.path, _WHAT) as file:
            for entry in (self.entries[name] for name in names):
                os.posix_fadvise(file.fileno(), entry.begin, entry.nbytes, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Drop the reference to the mapping, which ends with the last tensor on it; a later `tensor` maps the file anew.

        The mapping is not closed explicitly: torch does not lock the buffer, so live tensors would point to unmapped
        memory.
        """
        self._map = None


def indexed_shards(directory: Path) -> dict[str, set[str]]:
    """Return the shards listed in the index, file name to tensor names, in the index's order."""
    path = directory / INDEX_NAME
    check_inside(directory, path)
    weight_map = load_json(path, "checkpoint index").get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{path}: weight_map is missing or not an object; {_AGAIN}")
    shards: dict[str, set[str]] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not _is_shard_name(name):
            raise CheckpointError(
                f"{path}: tensor {shown(tensor)}: {shown(name)} is not a plain *.safetensors file name; {_AGAIN}"
            )
        shards.setdefault(name, set()).add(tensor)
    return shards


def _is_shard_name(name: str) -> bool:
    """Return whether `name` can only be a file in the checkpoint directory itself, on any operating system."""
    return name.isprintable() and name.endswith(".safetensors") and not any(mark in name for mark in ("/", "\\", ":"))


def _check_names(index: Path, shard: SafetensorsFile, expected: set[str]) -> None:
    """Raise CheckpointError for a shard whose tensors differ from those in the index."""
    absent = expected - shard.entries.keys()
    if absent:
        raise CheckpointError(
            f"{shard.path}: no tensor {shown(min(absent))}, which {index.name} puts there; fetch both files again"
        )
    extra = shard.entries.keys() - expected
    if extra:
        raise CheckpointError(
            f"{shard.path}: tensor {shown(min(extra))} is not listed in {index.name}; fetch both files again"
        )


def _no_weights_error(directory: Path) -> CheckpointError:
    """Return the error for a directory with neither an index nor the single file."""
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        reason = error.strerror or type(error).__name__
        return CheckpointError(f"{directory}: cannot be listed ({reason}); give the directory of a checkpoint")
    shards = [name for name in names if name.endswith(".safetensors")]
    if shards:
        return CheckpointError(
            f"{directory}: holds {len(shards)} safetensors files, first {shown(shards[0])}, but neither {INDEX_NAME} "
            f"nor {SINGLE_NAME}; fetch the index, or name a single file {SINGLE_NAME}"
        )
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles:
        return CheckpointError(
            f"{directory}: only pickled weights, such as {shown(pickles[0])}, and these are never loaded since they "
            "can run code; convert them to safetensors"
        )
    return CheckpointError(f"{directory}: no {SINGLE_NAME} or {INDEX_NAME}; give the directory of a checkpoint")


def open_shards(directory: Path) -> tuple[dict[str, SafetensorsFile], list[SafetensorsFile]]:
    """Open a checkpoint: return a dict from tensor name to the file that holds it, and the list of all files in order.

    If there is an index, it decides; otherwise `model.safetensors` is the whole checkpoint. Raises CheckpointError for
    weights that are missing, not safetensors, outside the directory, or different from the index.
    """
    index = directory / INDEX_NAME
    if os.path.lexists(index):
        shards = indexed_shards(directory)
        for name in shards:
            check_inside(directory, directory / name)
        files = [SafetensorsFile(directory / name) for name in shards]
        for file, expected in zip(files, shards.values(), strict=True):
            _check_names(index, file, expected)
    elif os.path.lexists(directory / SINGLE_NAME):
        check_inside(directory, directory / SINGLE_NAME)
        files = [SafetensorsFile(directory / SINGLE_NAME)]
    else:
        raise _no_weights_error(directory)
    return {name: file for file in files for name in file.entries}, files


def state_of(files: Iterable[SafetensorsFile]) -> str:
    """Return the SHA-256 over the files' states, by which a resumed run detects files that were rewritten."""
    return hashlib.sha256("\n".join(file.state for file in files).encode(errors="surrogatepass")).hexdigest()
