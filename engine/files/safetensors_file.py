"""Safetensors checkpoints: files validated whole before use and read by mapping.

The format: 8 bytes, the header's length (little-endian); the header, a JSON object that gives each tensor's dtype,
shape and byte range; the data, which the ranges cover without gap or overlap. The reference library is not used here,
so that every refusal of an untrusted file names the tensor that it is about and says what to do.
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
from typing import Any, BinaryIO, Self

import torch

from engine.errors import CheckpointError
from engine.files.json_file import load_json, parse_object, reading, shown
from engine.files.model_files import check_inside

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000

_WHAT = "safetensors file"
HEADER_LENGTH = struct.Struct("<Q")
_MAX_RANK = 64  # beyond this torch's own operations refuse a tensor
_MAX_BYTES = 2**63 - 1  # torch counts elements and bytes in int64
SMALL_BYTES, SAMPLE_BYTES = 16_384, 4_096
"""A tensor up to the first size is a sample as a whole; of larger ones so many bytes are."""
PICKLES = (".bin", ".pt", ".pth")
METADATA = "__metadata__"
_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}
_AGAIN = "fetch or write the file again"

_TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
# The wider unsigned integers are missing from older releases of torch.
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, own) for name, own in _TORCH_NAMES.items() if hasattr(torch, own)}


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: bytes `begin` to `end`, counted from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """The tensor's size in bytes."""
        return self.end - self.begin


def tensor_bytes(dtype: torch.dtype, shape: Iterable[int]) -> int | None:
    """Bytes of a tensor; None where int64 cannot count them.

    A zero dimension makes the tensor empty but not its strides, so the others must be countable by themselves.
    """
    nonzero, empty = dtype.itemsize, False
    for size in shape:
        nonzero *= size or 1
        empty = empty or size == 0
        if nonzero > _MAX_BYTES:
            return None
    return 0 if empty else nonzero


def _is_natural(value: object) -> bool:
    """Whether `value` is a non-negative integer; JSON's true and false, which Python counts as integers, are not."""
    return type(value) is int and value >= 0


def _parse_shape(where: str, dtype: torch.dtype, raw: object) -> tuple[tuple[int, ...], int]:
    """The shape in a header's entry and the tensor's bytes."""
    if not isinstance(raw, list) or not all(map(_is_natural, raw)):
        raise CheckpointError(f"{where}: shape {shown(raw)} is not a list of non-negative integers; {_AGAIN}")
    if len(raw) > _MAX_RANK:
        raise CheckpointError(f"{where}: shape has {len(raw)} dimensions, more than {_MAX_RANK}; {_AGAIN}")
    nbytes = tensor_bytes(dtype, raw)
    if nbytes is None:
        raise CheckpointError(f"{where}: shape {shown(raw)} is too large to address; {_AGAIN}")
    return tuple(raw), nbytes


def _parse_offsets(where: str, raw: object) -> tuple[int, int]:
    """The byte range in a header's entry, counted from the start of the data."""
    if not isinstance(raw, list) or len(raw) != 2 or not all(map(_is_natural, raw)) or raw[0] > raw[1]:
        raise CheckpointError(f"{where}: data_offsets {shown(raw)} is not [begin, end] with 0 <= begin <= end; {_AGAIN}")
    return raw[0], raw[1]


def _parse_entry(where: str, raw: object, data_start: int, file_size: int) -> TensorEntry:
    """One tensor's entry of the header, checked for itself; `where` begins the messages."""
    if not isinstance(raw, dict) or raw.keys() != _ENTRY_KEYS:
        raise CheckpointError(f"{where}: entry does not hold exactly dtype, shape and data_offsets; {_AGAIN}")
    dtype = DTYPES.get(raw["dtype"]) if isinstance(raw["dtype"], str) else None
    if dtype is None:
        known = ", ".join(DTYPES)
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
    """The header's free texts; JSON's keys are strings already."""
    if not isinstance(raw, dict) or not all(isinstance(value, str) for value in raw.values()):
        raise CheckpointError(f"{path}: {METADATA} does not map strings to strings; {_AGAIN}")
    return raw


def _read_header(path: Path, file: BinaryIO, file_size: int) -> tuple[dict[str, Any], int]:
    """The header's JSON object and the offset in bytes of the data after it."""
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
    """What changes when the file at a path is replaced or rewritten."""
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _sampled(name: str, entry: TensorEntry) -> tuple[int, int]:
    """Where in the file, and how long, the sample of a tensor is."""
    if entry.nbytes <= SMALL_BYTES:
        return entry.begin, entry.nbytes
    return entry.begin + zlib.crc32(name.encode(errors="surrogatepass")) % (entry.nbytes - SAMPLE_BYTES + 1), SAMPLE_BYTES


class SafetensorsFile:
    """One safetensors file, validated whole when opened, mapped into memory when a tensor is first asked for.

    Attributes: `path`; `metadata`, the header's free texts; `entries`, the place of each tensor in the header's order.
    No file descriptor stays open between calls. CheckpointError is all that any content of the file can raise.
    """

    def __init__(self, path: Path) -> None:
        """Read and check the header of the file at `path`; CheckpointError says what is wrong with it."""
        self.path = path
        self.header_only = False
        """Whether the data was left out when the file was fetched; its tensors are then refused."""
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
        """Refuse to go on with a file that is not the one whose header was checked."""
        if _identity(file) != self._identity:
            raise CheckpointError(f"{self.path}: file changed while in use; start again once it is written")

    def _mapping(self) -> mmap.mmap:
        """The whole file, mapped copy-on-write: torch takes only writable buffers, and no write reaches the file."""
        if self.header_only:
            raise CheckpointError(f"{self.path}: only its header was fetched; fetch the file to read its tensors")
        if self._map is None:
            with reading(self.path, _WHAT) as file:
                self._check_unchanged(file)
                self._map = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_COPY)
        return self._map

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor called `name`, in the dtype and shape of its entry; CheckpointError if the file has none.

        It is a view of the mapping, not to be written to, and keeps the mapping alive; only where the file puts
        its elements on addresses that are no multiple of their size is it a copy.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path}: no tensor {shown(name)}; give a checkpoint that holds it")
        if entry.nbytes == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        data = torch.frombuffer(self._mapping(), dtype=torch.uint8, count=entry.nbytes, offset=entry.begin)
        if entry.begin % entry.dtype.itemsize:
            data = data.clone()
        return data.view(entry.dtype).view(entry.shape)

    def release(self) -> None:
        """Give the mapping's resident pages back; tensors stay valid and load from the file again when next read.

        Pages that were written to would lose what was written: this is safe only because nobody writes to mapped
        tensors.
        """
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)

    def samples(self) -> Iterator[tuple[str, bytes]]:
        """Of each tensor its name and some of its bytes: all of a small one, of others a block where its name says.

        They tell contents apart without reading the file, and are equal in a copy of it. No page becomes resident.
        """
        if self.header_only:
            raise CheckpointError(f"{self.path}: only its header was fetched; fetch the file to read its tensors")
        places = {name: _sampled(name, entry) for name, entry in self.entries.items()}
        with reading(self.path, _WHAT) as file:
            self._check_unchanged(file)
            if hasattr(os, "posix_fadvise"):  # all are asked for before the first is waited for
                for place, size in filter(itemgetter(1), places.values()):  # a size of 0 means all that follows
                    os.posix_fadvise(file.fileno(), place, size, os.POSIX_FADV_WILLNEED)
            for name in sorted(places, key=lambda name: (places[name], name)):
                place, size = places[name]
                yield name, os.pread(file.fileno(), size, place)

    @property
    def state(self) -> str:
        """Name, size and time of the last change (ns): another one means that the file was written since."""
        return f"{self.path.name} {self._identity[2]} {self._identity[3]}"

    def read_ahead(self, names: Iterable[str]) -> None:
        """Ask the system to read these tensors into its cache, while something else is computed; it is nobody's memory."""
        if not hasattr(os, "posix_fadvise"):
            return
        with reading(self.path, _WHAT) as file:
            for entry in (self.entries[name] for name in names):
                os.posix_fadvise(file.fileno(), entry.begin, entry.nbytes, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Let go of the mapping, which ends with the last tensor on it; a later `tensor` maps the file anew.

        The mapping is not closed outright: torch does not lock the buffer, so live tensors would then point nowhere.
        """
        self._map = None


def indexed_shards(directory: Path) -> dict[str, set[str]]:
    """The index's shards, each file name with its tensors' names, in the index's order."""
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
    """Whether `name` can only be a file of the checkpoint directory itself, on any system."""
    return name.isprintable() and name.endswith(".safetensors") and not any(mark in name for mark in ("/", "\\", ":"))


def _check_names(index: Path, shard: SafetensorsFile, expected: set[str]) -> None:
    """Refuse a shard that holds other tensors than the index says."""
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
    """What to say of a directory with neither an index nor the single file."""
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
    """Open a checkpoint: the file that holds each tensor, by the tensor's name, and all files in order.

    The index, if there is one, decides; otherwise `model.safetensors` is the whole checkpoint. CheckpointError for
    weights that are missing, not safetensors, outside the directory, or other than the index says.
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
    """SHA-256 over the files' states, by which a run that is resumed tells that none was written since."""
    return hashlib.sha256("\n".join(file.state for file in files).encode(errors="surrogatepass")).hexdigest()
