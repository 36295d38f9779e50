"""The header of a GGUF file: metadata and the locations of tensors, read without trust.

The format, version 3 (github.com/ggml-org/ggml, docs/gguf.md), is little-endian: "GGUF", the version, the numbers of tensors
and of metadata entries; each entry's key, type and value; each tensor's name, dimensions (the innermost first), type and
offset; then the data, which begins at a multiple of the alignment, as does each tensor. Version 2 is read too: version 3
only adds that files may have the other byte order.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from engine.errors import CheckpointError, UnsupportedError
from engine.files.gguf_types import BLOCK_TYPES, NOT_READ, BlockType
from engine.files.json_file import shown

WHAT = "GGUF file"
MAGIC = b"GGUF"
MAX_HEADER_BYTES = 256_000_000
"""Limit on the header, of which the vocabulary is the largest part; a vocabulary of 262,144 tokens takes about 16 MB."""
DEFAULT_ALIGNMENT, MAX_ALIGNMENT = 32, 1 << 20
ALIGNMENT_KEY = "general.alignment"
_VERSIONS = (2, 3)
_MAX_NAME, _MAX_KEY, _MAX_RANK = 127, 65_535, 4
_MAX_BYTES = 2**63 - 1
_START = struct.Struct("<4sIQQ")
_LENGTH, _TYPE = struct.Struct("<Q"), struct.Struct("<I")
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Codes of `struct` for numbers, by the numbers that stand for the types."""
_BOOL, _STRING, _ARRAY = 7, 8, 9
_LEAST_ENTRY, _LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 4 + 8
"""Fewest bytes of a metadata entry and of a tensor's description."""
_AGAIN = "fetch or write the file again"


@dataclass(frozen=True)
class GgufTensor:
    """A tensor as the header describes it."""

    type: BlockType
    shape: tuple[int, ...]
    """The dimensions in numbers, the outermost first."""
    offset: int
    """First byte, counted from the start of the data."""

    @property
    def bytes_shape(self) -> tuple[int, ...]:
        """Shape of the stored blocks in bytes: the last dimension is the size of a row."""
        return (*self.shape[:-1], self.shape[-1] // self.type.numbers * self.type.bytes)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        size = 1
        for dimension in self.bytes_shape:
            size *= dimension
        return size


@dataclass(frozen=True)
class Header:
    """Everything in a file but its data."""

    metadata: dict[str, Any]
    """Values by key: integers, floats, booleans, texts, and lists of one of these."""
    spans: dict[str, slice]
    """Where the file has each metadata entry, key, type and value, by key."""
    tensors: dict[str, GgufTensor]
    alignment: int
    data_start: int
    """First byte of the data."""


class _Bad(Exception):
    """The header is damaged; the message lacks the file's name."""


def read_header(where: str, file: BinaryIO, size: int) -> Header:
    """Read and check the header of an opened file of `size` bytes.

    Raises CheckpointError for a damaged file, and UnsupportedError for a type or version that is not read; the messages
    begin with `where`. No more memory is used than the header has bytes, times a small factor.
    """
    if size < _START.size:
        raise CheckpointError(f"{where}: {size} bytes are too short for a {WHAT}; {_AGAIN}")
    with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as data:
        try:
            return _Reader(data, min(size, MAX_HEADER_BYTES), size).header()
        except _Bad as error:
            raise CheckpointError(f"{where}: {error}; {_AGAIN}") from None
        except UnsupportedError as error:
            raise UnsupportedError(f"{where}: {error}") from None


class _Reader:
    """A cursor in the header. `end`: the byte that the header cannot pass."""

    def __init__(self, data: mmap.mmap, end: int, size: int) -> None:
        self.data, self.end, self.size, self.place = data, end, size, 0

    def take(self, count: int, what: str) -> int:
        """Move over `count` bytes and return the place where they begin."""
        place = self.place
        if count > self.end - place:
            if self.end < self.size:
                raise _Bad(f"{what} ends past the first {MAX_HEADER_BYTES} bytes, and headers are shorter")
            raise _Bad(f"truncated: {what} at byte {place} is of {count} bytes, and the file ends at byte {self.size}")
        self.place += count
        return place

    def number(self, code: struct.Struct, what: str) -> Any:
        return code.unpack_from(self.data, self.take(code.size, what))[0]

    def text(self, what: str, longest: int | None = None) -> str:
        length = self.number(_LENGTH, f"the length of {what}")
        if longest is not None and length > longest:
            raise _Bad(f"{what} has {length} bytes, and there are at most {longest}")
        place = self.take(length, what)
        try:
            return self.data[place : place + length].decode()
        except UnicodeDecodeError as error:
            raise _Bad(f"{what} is not UTF-8 at byte {place + error.start}") from None

    def header(self) -> Header:
        magic, version, tensors, entries = _START.unpack_from(self.data, self.take(_START.size, "the start"))
        if magic != MAGIC:
            raise _Bad(f"begins with {shown(magic)}, so it is not a {WHAT}")
        if version and version & 0xFFFF == 0:
            raise UnsupportedError("is written for processors with the other byte order; take the little-endian file")
        if version not in _VERSIONS:
            known = " and ".join(map(str, _VERSIONS))
            raise UnsupportedError(f"has version {version} of GGUF, and versions {known} are read; convert the model anew")
        self._check_count(entries, _LEAST_ENTRY, "metadata entries")
        self._check_count(tensors, _LEAST_TENSOR, "tensors")
        metadata: dict[str, Any] = {}
        spans: dict[str, slice] = {}
        for _ in range(entries):
            begin = self.place
            key = self.text("a metadata key", _MAX_KEY)
            if key in metadata:
                raise _Bad(f"metadata: the key {shown(key)} occurs twice")
            metadata[key] = self.value(f"metadata {shown(key)}")
            spans[key] = slice(begin, self.place)
        alignment = _alignment(metadata)
        found: dict[str, GgufTensor] = {}
        for _ in range(tensors):
            name = self.text("a tensor's name", _MAX_NAME)
            if name in found:
                raise _Bad(f"tensor {shown(name)} occurs twice")
            found[name] = self.tensor(f"tensor {shown(name)}")
        header = Header(metadata, spans, found, alignment, _aligned(self.place, alignment))
        _check_coverage(header, self.size)
        return header

    def _check_count(self, count: int, least: int, what: str) -> None:
        if count * least > self.end - self.place:
            raise _Bad(f"has {count} {what}, which do not fit into a header of {self.end} bytes")

    def value(self, what: str) -> Any:
        kind = self.number(_TYPE, f"the type of {what}")
        return self.array(what) if kind == _ARRAY else self.scalar(kind, what)

    def scalar(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self.text(what)
        return next(self.numbers(kind, 1, what))

    def array(self, what: str) -> list[Any]:
        kind, count = self.number(_TYPE, f"the type of {what}"), self.number(_LENGTH, f"the length of {what}")
        if kind != _STRING:
            return list(self.numbers(kind, count, what))
        self._check_count(count, _LENGTH.size, f"texts in {what}")
        return [self.text(what) for _ in range(count)]

    def numbers(self, kind: int, count: int, what: str) -> Iterator[Any]:
        code = _SCALARS.get(kind)
        if code is None:
            raise _Bad(f"{what} is of type {kind}, which is unknown")
        size = struct.calcsize(f"<{code}")
        place = self.take(count * size, what)
        if kind == _BOOL and set(self.data[place : place + count]) - {0, 1}:
            raise _Bad(f"{what} is neither true nor false")
        return iter(struct.unpack_from(f"<{count}{code}", self.data, place))

    def tensor(self, what: str) -> GgufTensor:
        rank = self.number(_TYPE, f"the rank of {what}")
        if not 1 <= rank <= _MAX_RANK:
            raise _Bad(f"{what} has {rank} dimensions, and there are 1 to {_MAX_RANK}")
        shape = tuple(self.numbers(10, rank, f"the shape of {what}"))[::-1]
        number, offset = self.number(_TYPE, f"the type of {what}"), self.number(_LENGTH, f"the offset of {what}")
        kind = BLOCK_TYPES.get(number)
        if kind is None:
            weights = [each.name for each in BLOCK_TYPES.values() if each.element is None or each.element.is_floating_point]
            name, known = NOT_READ.get(number, number), ", ".join(weights)
            raise UnsupportedError(f"{what} is of type {name}, which is not read; take a file of one of {known}")
        if shape[-1] % kind.numbers:
            raise _Bad(f"{what} has rows of {shape[-1]} numbers, which blocks of {kind.numbers} ({kind.name}) do not divide")
        tensor = GgufTensor(kind, shape, offset)
        if 0 in shape or tensor.nbytes > _MAX_BYTES:
            raise _Bad(f"{what} has shape {list(shape)}, which is empty or too large to address")
        return tensor


def _alignment(metadata: dict[str, Any]) -> int:
    alignment = metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)
    is_power = type(alignment) is int and 8 <= alignment <= MAX_ALIGNMENT and alignment & (alignment - 1) == 0
    if not is_power:
        raise _Bad(f"{ALIGNMENT_KEY} is {shown(alignment)} and must be a power of two from 8 to {MAX_ALIGNMENT}")
    return int(alignment)


def _aligned(place: int, alignment: int) -> int:
    return place + -place % alignment


def _check_coverage(header: Header, size: int) -> None:
    """Refuse data that belongs to two tensors, to none, or lies outside the file. Only padding is between tensors."""
    reached = 0
    for name, tensor in sorted(header.tensors.items(), key=lambda item: item[1].offset):
        what, begin = f"tensor {shown(name)}", _aligned(reached, header.alignment)
        if tensor.offset % header.alignment:
            raise _Bad(f"{what} begins at {tensor.offset}, which is not a multiple of {header.alignment}")
        if tensor.offset < reached:
            raise _Bad(f"{what}: data overlaps another tensor's")
        if tensor.offset > begin:
            raise _Bad(f"{what}: a hole of {tensor.offset - begin} unused bytes before it")
        reached = tensor.offset + tensor.nbytes
        if header.data_start + reached > size:
            raise _Bad(f"{what}: data runs {header.data_start + reached - size} bytes past the end of the file")
    end = header.data_start + reached
    if size > _aligned(end, header.alignment):
        raise _Bad(f"{size - end} trailing bytes after the last tensor")
