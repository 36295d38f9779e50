"""GGUF files written: a header, and then each tensor's bytes, piece by piece. The format is that of gguf_header.py.

The header is written here because GGUFWriter of the package `gguf` refuses empty lists and puts the architecture first, so
that the metadata of a file would not be copied as they are; a test compares all that both write.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from engine.errors import OutputError
from engine.files.gguf_file import GgufFile
from engine.files.gguf_header import DEFAULT_ALIGNMENT, MAGIC, GgufTensor
from engine.files.gguf_types import BLOCK_TYPES, BlockType

TYPE_NUMBERS = {kind.name: number for number, kind in BLOCK_TYPES.items()}
"""The number that stands for each type in files, by name."""
_VERSION = 3
_READ_AT_ONCE = 64 << 20
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
UINT16, INT32 = 2, _INT32
"""Types of metadata that are asked for by name."""


def metadata_entry(key: str, value: Any, kind: int | None = None) -> bytes:
    """Return an entry of the metadata. `kind`: the type's number; by default whole numbers are unsigned, of 32 bits.

    The whole numbers of a list are signed.
    """
    if isinstance(value, list):
        own = _kind_of(value[0]) if value else _STRING
        own = _INT32 if own == _UINT32 else own
        content = struct.pack("<IIQ", _ARRAY, own, len(value)) + b"".join(_scalar(own, each) for each in value)
    else:
        own = _kind_of(value) if kind is None else kind
        content = struct.pack("<I", own) + _scalar(own, value)
    return _text(key) + content


def changed_entry(entry: bytes, key: str, value: Any) -> bytes:
    """Return an entry with another number of the same type, in place of a number or of a list with one for each layer."""
    place = len(_text(key))
    kind, element = struct.unpack_from("<II", entry, place)
    return metadata_entry(key, value, element if kind == _ARRAY else kind)


def _kind_of(value: Any) -> int:
    return {bool: _BOOL, int: _UINT32, float: _FLOAT32, str: _STRING}[type(value)]


def _scalar(kind: int, value: Any) -> bytes:
    return _text(value) if kind == _STRING else struct.pack(f"<{_CODES[kind]}", value)


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


class GgufFileWriter:
    """A GGUF file that is written tensor by tensor, in the order of its header.

    Attributes: `digests`, the SHA-256 of each tensor's bytes.
    """

    def __init__(
        self,
        path: Path,
        entries: Iterable[bytes],
        tensors: Mapping[str, tuple[BlockType, tuple[int, ...]]],
        alignment: int = DEFAULT_ALIGNMENT,
    ) -> None:
        """Write the header. `entries`: the metadata. `tensors`: types, and shapes with the outermost dimension first."""
        self.digests: dict[str, bytes] = {}
        self._alignment, metadata = alignment, list(entries)
        self._waiting = {name: GgufTensor(*own, 0).nbytes for name, own in tensors.items()}
        self._file = path.open("wb")
        self._file.write(struct.pack("<4sIQQ", MAGIC, _VERSION, len(tensors), len(metadata)))
        self._file.writelines(metadata)
        offset = 0
        for name, (kind, shape) in tensors.items():
            sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
            self._file.write(_text(name) + sizes + struct.pack("<IQ", TYPE_NUMBERS[kind.name], offset))
            offset += self._waiting[name] + -self._waiting[name] % alignment
        self._pad()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            assert not self._waiting
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()

    def write(self, name: str, pieces: Iterable[Any]) -> None:
        """Write the bytes of the next tensor. `pieces`: contiguous buffers."""
        assert name == next(iter(self._waiting))
        left, digest = self._waiting.pop(name), hashlib.sha256()
        for piece in pieces:
            digest.update(data := memoryview(piece).cast("B"))
            left -= self._file.write(data)
        assert left == 0
        self.digests[name] = digest.digest()
        self._pad()

    def _pad(self) -> None:
        self._file.write(bytes(-self._file.tell() % self._alignment))


def check_written(file: GgufFile, digests: Mapping[str, bytes]) -> None:
    """Raise OutputError unless a file that was written has these tensors, with these SHA-256 of their bytes."""
    for name in dict.fromkeys([*file.entries, *digests]):
        if name not in file.entries or name not in digests or _digest(file, name) != digests[name]:
            raise OutputError(
                f"{file.path}: tensor {name} was read back with other bytes; check the disk, and write it again"
            )
        file.release()


def _digest(file: GgufFile, name: str) -> bytes:
    digest, data = hashlib.sha256(), file.raw(name)
    for start in range(0, len(data), _READ_AT_ONCE):
        digest.update(data[start : start + _READ_AT_ONCE])
        file.release()
    return digest.digest()
