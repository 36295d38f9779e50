"""Safetensors checkpoints: files validated whole before use and read by mapping, shards written in bounded memory.

The format: 8 bytes, the header's length (little-endian); the header, a JSON object that gives each tensor's dtype,
shape and byte range; the data, which the ranges cover without gap or overlap. The reference library is not used here,
so that every refusal of an untrusted file names the tensor that it is about and says what to do.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import torch

from engine.errors import CheckpointError, OutputError
from engine.json_file import load_json, parse_object, reading, replacing, shown, write_json, writing

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
DEFAULT_SHARD_BYTES = 2_000_000_000
MAX_HEADER_BYTES = 100_000_000

_WHAT = "safetensors file"
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 64  # of the data's start: tensors are used where they lie, and most then begin with a cache line
_BLOCK = 1 << 20  # bytes written at a time
_MAX_RANK = 64  # beyond this torch's own operations refuse a tensor
_MAX_BYTES = 2**63 - 1  # torch counts elements and bytes in int64
PICKLES = (".bin", ".pt", ".pth")
_METADATA = "__metadata__"
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
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


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


def _tensor_bytes(dtype: torch.dtype, shape: Iterable[int]) -> int | None:
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
    nbytes = _tensor_bytes(dtype, raw)
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
        raise CheckpointError(f"{path}: {_METADATA} does not map strings to strings; {_AGAIN}")
    return raw


def _read_header(path: Path, file: BinaryIO, file_size: int) -> tuple[dict[str, Any], int]:
    """The header's JSON object and the offset in bytes of the data after it."""
    prefix = file.read(_LENGTH.size)
    if len(prefix) < _LENGTH.size:
        raise CheckpointError(f"{path}: {len(prefix)} bytes are too short for a {_WHAT}; {_AGAIN}")
    (length,) = _LENGTH.unpack(prefix)
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path}: header length {length} is over {MAX_HEADER_BYTES}, not a {_WHAT}; {_AGAIN}")
    data_start = _LENGTH.size + length
    header = file.read(length) if data_start <= file_size else b""
    if len(header) < length:
        raise CheckpointError(f"{path}: truncated, header ends at byte {data_start} but file at {file_size}; {_AGAIN}")
    return parse_object(header, f"{path}: header"), data_start


def _identity(file: BinaryIO) -> tuple[int, int, int, int]:
    """What changes when the file at a path is replaced or rewritten."""
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


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
        self.metadata = _parse_metadata(path, header.pop(_METADATA, {}))
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


def _check_inside(directory: Path, path: Path) -> None:
    """Refuse a link that leads out of the checkpoint, except to the `blobs` of a Hugging Face cache.

    That cache has the layout `snapshots/REVISION/FILE`, each file a link to `../../blobs/HASH`.
    """
    base = Path(os.path.realpath(directory))
    target = Path(os.path.realpath(path))
    if not any(target.is_relative_to(root) for root in (base, base.parent.parent / "blobs")):
        raise CheckpointError(f"{path}: link leads out of the checkpoint directory; put the file itself there")


def indexed_shards(directory: Path) -> dict[str, set[str]]:
    """The index's shards, each file name with its tensors' names, in the index's order."""
    path = directory / INDEX_NAME
    _check_inside(directory, path)
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
            _check_inside(directory, directory / name)
        files = [SafetensorsFile(directory / name) for name in shards]
        for file, expected in zip(files, shards.values(), strict=True):
            _check_names(index, file, expected)
    elif os.path.lexists(directory / SINGLE_NAME):
        _check_inside(directory, directory / SINGLE_NAME)
        files = [SafetensorsFile(directory / SINGLE_NAME)]
    else:
        raise _no_weights_error(directory)
    return {name: file for file in files for name in file.entries}, files


Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True)
class _Shard:
    """One file to be written: its header, padded, and the tensors' places in it."""

    path: Path
    header: bytes
    entries: dict[str, TensorEntry]


def _layout_bytes(layout: Layout) -> dict[str, int]:
    """Each tensor's bytes; ValueError for a layout that the format cannot hold."""
    sizes: dict[str, int] = {}
    for name, (dtype, shape) in layout.items():
        nbytes = _tensor_bytes(dtype, shape)
        if name == _METADATA or dtype not in _DTYPE_NAMES or nbytes is None or min(shape, default=0) < 0:
            raise ValueError(f"no safetensors file can hold tensor {name!r} with {dtype} and shape {shape}")
        sizes[name] = nbytes
    return sizes


def _split(sizes: Mapping[str, int], shard_bytes: int) -> list[list[str]]:
    """The tensors' names by shard, in order, each shard as full as `shard_bytes` of data allow, at least one tensor."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, nbytes in sizes.items():
        if shards[-1] and filled + nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += nbytes
    return shards


def _plan_shard(path: Path, layout: Layout, sizes: Mapping[str, int], metadata: Mapping[str, str]) -> _Shard:
    """Place the tensors of `layout` in one file, the widest dtypes first so that all are aligned."""
    header: dict[str, object] = {_METADATA: dict(metadata)} if metadata else {}
    ranges: dict[str, tuple[int, int]] = {}
    end = 0
    for name in sorted(layout, key=lambda name: -layout[name][0].itemsize):
        dtype, shape = layout[name]
        begin, end = end, end + sizes[name]
        ranges[name] = begin, end
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH.size + len(text)) % _ALIGNMENT)
    start = _LENGTH.size + len(text)
    entries = {name: TensorEntry(*layout[name], start + begin, start + end) for name, (begin, end) in ranges.items()}
    return _Shard(path, _LENGTH.pack(len(text)) + text, entries)


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset` bytes, in blocks; a write may take less than it is given."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done : done + _BLOCK], offset + done)


def _raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements' bytes in order: no copy of a CPU tensor that is contiguous."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data


class ShardWriter:
    """Writes a checkpoint whose layout is known beforehand, one tensor at a time, keeping none of them.

    Until `finish` no file has its header, so what an interrupted run leaves behind is refused by every reader. As a
    context it finishes at the end of the body, and removes its files if the body or `finish` raises. Use that breaks
    the layout is a bug of the caller and raises ValueError; a directory that cannot be written raises OutputError.
    """

    def __init__(
        self,
        directory: Path,
        layout: Layout,
        shard_bytes: int = DEFAULT_SHARD_BYTES,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Plan the shards of `layout`, tensor name to dtype and shape, and create their files in `directory`.

        Tensors go to shards in the layout's order; a shard holds at most `shard_bytes` bytes of data, unless one tensor
        alone is larger. `metadata` goes into every header, `{"format": "pt"}` by default. The directory is made if need
        be; one that already holds safetensors weights is refused, since old and new files could be read as one.
        """
        if shard_bytes <= 0:
            raise ValueError(f"shard_bytes is {shard_bytes}, not positive")
        self.directory = directory
        sizes = _layout_bytes(layout)
        self.total_size = sum(sizes.values())
        groups = _split(sizes, shard_bytes)
        self._shards = [
            _plan_shard(
                directory / _shard_name(number, len(groups)),
                {name: layout[name] for name in names},
                sizes,
                {"format": "pt"} if metadata is None else metadata,
            )
            for number, names in enumerate(groups, start=1)
        ]
        by_tensor = {name: shard for shard in self._shards for name in shard.entries}
        self._shard_of = {name: by_tensor[name] for name in layout}
        self._pending = set(layout)
        self._finished = False
        self._created: list[Path] = []
        self._create()

    def _create(self) -> None:
        """Make the directory and the empty files, all or none of them."""
        with writing(self.directory, "a checkpoint"):
            self.directory.mkdir(parents=True, exist_ok=True)
            old = sorted(path.name for pattern in ("*.safetensors", INDEX_NAME) for path in self.directory.glob(pattern))
        if old:
            raise OutputError(
                f"{self.directory}: already holds weights, such as {shown(old[0])}; remove them or give another output "
                "directory"
            )
        try:
            for shard in self._shards:
                with writing(shard.path, "a shard"):
                    shard.path.touch(exist_ok=False)
                    self._created.append(shard.path)
        except BaseException:
            self.discard()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self.discard()
            return
        try:
            self.finish()
        except BaseException:
            self.discard()
            raise

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor, of the layout's dtype and shape, in any order and from any device.

        ValueError for a name that is unknown or was added before, or for another dtype or shape; OutputError if the
        disk takes no more, after which the tensor may be added again.
        """
        entry = self._entry(name)
        if tuple(tensor.shape) != entry.shape:
            raise ValueError(f"tensor {name!r} is {tuple(tensor.shape)}, the layout says {entry.shape}")
        self.add_rows(name, [tensor])

    def add_rows(self, name: str, rows: Iterable[torch.Tensor]) -> None:
        """The same of a tensor that comes in pieces: one after the other, they are its elements in order."""
        entry, path, offset = self._entry(name), self._shard_of[name].path, 0
        for piece in rows:
            data = _raw_bytes(piece)
            if piece.dtype != entry.dtype:
                raise ValueError(f"tensor {name!r} is {piece.dtype}, the layout says {entry.dtype}")
            if offset + len(data) > entry.nbytes:
                raise ValueError(f"tensor {name!r} has more than the {entry.nbytes} bytes that the layout says")
            if data:
                self._write(path, data, entry.begin + offset, f"tensor {shown(name)}")
            offset += len(data)
        if offset != entry.nbytes:
            raise ValueError(f"tensor {name!r} has {offset} bytes, the layout says {entry.nbytes}")
        self._pending.remove(name)

    def _entry(self, name: str) -> TensorEntry:
        """Of a tensor that is still to be added."""
        if name not in self._shard_of:
            raise ValueError(f"tensor {name!r} is not in the layout")
        if name not in self._pending:
            raise ValueError(f"tensor {name!r} was added before")
        return self._shard_of[name].entries[name]

    @staticmethod
    def _write(path: Path, data: memoryview, offset: int, what: str, sync: bool = False) -> None:
        """Write `data` at `offset` of a file that exists, then with `sync` all of the file through to the disk."""
        with writing(path, what), path.open("r+b", buffering=0) as file:
            _write_at(file.fileno(), data, offset)
            if sync:
                os.fsync(file.fileno())

    def finish(self) -> list[Path]:
        """Write the headers and the index; the paths of all files, once the disk has them.

        A single shard has an index too: vLLM takes every safetensors file of a directory for weights, unless an index says
        which are. ValueError if a tensor of the layout was not added.
        """
        if self._pending:
            first = next(name for name in self._shard_of if name in self._pending)
            raise ValueError(f"{len(self._pending)} tensors were not added, first {first!r}")
        index = self.directory / INDEX_NAME
        if not self._finished:
            for shard in self._shards:
                self._write(shard.path, memoryview(shard.header), 0, "the header", sync=True)
            self._created.append(index)
            self._write_index(index)
            self._finished = True
        return [*(shard.path for shard in self._shards), index]

    def _write_index(self, path: Path) -> None:
        weight_map = {name: shard.path.name for name, shard in self._shard_of.items()}
        write_json(path, {"metadata": {"total_size": self.total_size}, "weight_map": weight_map})

    def discard(self) -> None:
        """Remove the files of an unfinished checkpoint; a finished one is left alone."""
        if self._finished:
            return
        for path in self._created:
            try:
                path.unlink(missing_ok=True)
            except OSError:
                # What led here is the error to report; a file without its header is refused by every reader anyway.
                continue
        self._created.clear()


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], what: str) -> None:
    """Write a file of `tensors` that are in memory anyway, replacing an old one only when whole; OutputError as above."""
    layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    shard = _plan_shard(path, layout, _layout_bytes(layout), metadata)
    with replacing(path, what) as partial, partial.open("wb", buffering=0) as file:
        _write_at(file.fileno(), memoryview(shard.header), 0)
        for name, tensor in tensors.items():
            if shard.entries[name].nbytes:
                _write_at(file.fileno(), _raw_bytes(tensor), shard.entries[name].begin)
        os.fsync(file.fileno())


def _shard_name(number: int, count: int) -> str:
    """The file name of shard `number` (from 1) of `count`, as Hugging Face names them."""
    return SINGLE_NAME if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
