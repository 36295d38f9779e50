"""Writing safetensors shards in bounded memory: planned in advance, filled tensor by tensor, valid only when complete.

The format is that of engine/files/safetensors_file.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from engine.errors import OutputError
from engine.files.element_type import ELEMENT_TYPES
from engine.files.json_file import replacing, shown, write_json, writing
from engine.files.mapped_file import TensorEntry
from engine.files.safetensors_file import HEADER_LENGTH, INDEX_NAME, METADATA, SINGLE_NAME, tensor_bytes

DEFAULT_SHARD_BYTES = 2_000_000_000
PAGE_BYTES = 4096
"""The data of a file begins on a multiple of this: direct reads, which pass the page cache by, need whole pages."""
_BLOCK = 1 << 20  # bytes written at a time
DTYPES: dict[str, torch.dtype] = {name: element.torch for name, element in ELEMENT_TYPES.items()}
"""The dtypes that a safetensors file can hold, by their names in its header."""
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True)
class _Shard:
    """One file to be written: its padded header and the tensors' locations in it."""

    path: Path
    header: bytes
    entries: dict[str, TensorEntry]


def _layout_bytes(layout: Layout) -> dict[str, int]:
    """Return each tensor's size in bytes; ValueError for a layout that the format cannot hold."""
    sizes: dict[str, int] = {}
    for name, (dtype, shape) in layout.items():
        nbytes = tensor_bytes(dtype, shape)
        if name == METADATA or dtype not in _DTYPE_NAMES or nbytes is None or min(shape, default=0) < 0:
            raise ValueError(f"no safetensors file can hold tensor {name!r} with {dtype} and shape {shape}")
        sizes[name] = nbytes
    return sizes


def _split(sizes: Mapping[str, int], shard_bytes: int) -> list[list[str]]:
    """Return the tensors' names by shard, in order. A shard has at most `shard_bytes` of data, or only one tensor."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, nbytes in sizes.items():
        if shards[-1] and filled + nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += nbytes
    return shards


def _aligned(layout: Layout, sizes: Mapping[str, int]) -> list[str]:
    """Return the names of tensors in the order of a file in which all are aligned.

    Those that fill whole pages come first, in their order, so that each begins on a page. The others follow, those of the
    widest dtypes first.
    """
    return sorted(layout, key=lambda name: sizes[name] % PAGE_BYTES and 1 + 1 / layout[name][0].itemsize)


def _plan_shard(
    path: Path, layout: Layout, names: Iterable[str], sizes: Mapping[str, int], metadata: Mapping[str, str]
) -> _Shard:
    """Place the tensors with these names in one file, in this order."""
    header: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    ranges: dict[str, tuple[int, int]] = {}
    end = 0
    for name in names:
        dtype, shape = layout[name]
        begin, end = end, end + sizes[name]
        ranges[name] = begin, end
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(HEADER_LENGTH.size + len(text)) % PAGE_BYTES)
    start = HEADER_LENGTH.size + len(text)
    entries = {
        name: TensorEntry(ELEMENT_TYPES[_DTYPE_NAMES[layout[name][0]]], layout[name][1], start + begin, start + end)
        for name, (begin, end) in ranges.items()
    }
    return _Shard(path, HEADER_LENGTH.pack(len(text)) + text, entries)


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at byte `offset`, in blocks; one system call may write fewer bytes than requested."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done : done + _BLOCK], offset + done)


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the elements' bytes in order, without a copy if the tensor is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data


class ShardWriter:
    """Writes a checkpoint whose layout is known in advance, one tensor at a time, without keeping tensors in memory.

    Before `finish`, no file has its header, so every reader refuses the files of an interrupted run. As a context
    manager, the writer finishes when the body ends, and removes its files if the body or `finish` raises. Calls that do
    not match the layout are bugs of the caller and raise ValueError; a directory that cannot be written raises
    OutputError.
    """

    def __init__(
        self,
        directory: Path,
        layout: Layout,
        shard_bytes: int = DEFAULT_SHARD_BYTES,
        metadata: Mapping[str, str] | None = None,
        shards: Sequence[Sequence[str]] | None = None,
    ) -> None:
        """Plan the shards of `layout`, tensor name to dtype and shape, and create their files in `directory`.

        Tensors go to shards in the layout's order. A shard holds at most `shard_bytes` bytes of data, unless one tensor
        alone is larger. Within a shard, tensors that fill whole pages come first, then those of wide dtypes. `shards` has
        the tensors' names in each shard, in the order of the file, where the caller decides both. `metadata` goes into
        every header, `{"format": "pt"}` by default. The directory is created if necessary. A directory that already holds
        safetensors weights is refused, since old and new files could be read as one checkpoint.
        """
        if shard_bytes <= 0:
            raise ValueError(f"shard_bytes is {shard_bytes}, not positive")
        self.directory = directory
        sizes = _layout_bytes(layout)
        self.total_size = sum(sizes.values())
        if shards is None:
            groups = _split(sizes, shard_bytes)
            shards = [_aligned({name: layout[name] for name in names}, sizes) for names in groups]
        elif sorted(name for names in shards for name in names) != sorted(layout):
            raise ValueError("the shards do not hold each tensor of the layout once")
        self._shards = [
            _plan_shard(
                *(directory / _shard_name(number, len(shards)), layout, names, sizes),
                {"format": "pt"} if metadata is None else metadata,
            )
            for number, names in enumerate(shards, start=1)
        ]
        by_tensor = {name: shard for shard in self._shards for name in shard.entries}
        self._shard_of = {name: by_tensor[name] for name in layout}
        self._pending = set(layout)
        self._finished = False
        self._created: list[Path] = []
        self._create()

    def _create(self) -> None:
        """Create the directory and all empty files, or none of them."""
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
        """Write one tensor with the layout's dtype and shape, in any order and from any device.

        Raises ValueError for a name that is unknown or was added before, or for another dtype or shape. Raises
        OutputError if the disk is full; the tensor may then be added again.
        """
        entry = self._entry(name)
        if tuple(tensor.shape) != entry.shape:
            raise ValueError(f"tensor {name!r} is {tuple(tensor.shape)}, the layout says {entry.shape}")
        self.add_rows(name, [tensor])

    def add_rows(self, name: str, rows: Iterable[torch.Tensor]) -> None:
        """Write one tensor from consecutive pieces, which together hold its elements in order. Raises as `add` does."""
        entry, path, offset = self._entry(name), self._shard_of[name].path, 0
        for piece in rows:
            data = raw_bytes(piece)
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
        """Return the entry of a tensor that is still to be added."""
        if name not in self._shard_of:
            raise ValueError(f"tensor {name!r} is not in the layout")
        if name not in self._pending:
            raise ValueError(f"tensor {name!r} was added before")
        return self._shard_of[name].entries[name]

    @staticmethod
    def _write(path: Path, data: memoryview, offset: int, what: str, sync: bool = False) -> None:
        """Write `data` at byte `offset` of an existing file; with `sync`, flush the whole file to disk."""
        with writing(path, what), path.open("r+b", buffering=0) as file:
            _write_at(file.fileno(), data, offset)
            if sync:
                os.fsync(file.fileno())

    def finish(self) -> list[Path]:
        """Write the headers and the index, and return the paths of all files once they are on disk.

        A single shard has an index too: without an index, vLLM takes every safetensors file of a directory for weights.
        Raises ValueError if a tensor of the layout was not added.
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
        """Remove the files of an unfinished checkpoint; a finished one is kept."""
        if self._finished:
            return
        for path in self._created:
            try:
                path.unlink(missing_ok=True)
            except OSError:
                # The earlier error is the one to report, and every reader refuses a file without its header.
                continue
        self._created.clear()


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], what: str, *, is_cache: bool = False
) -> None:
    """Write a file of `tensors` in memory, replacing an old file only once complete. Raises OutputError as above.

    is_cache: only this user may read the file, and it is not flushed to disk: after a power failure it may be damaged.
    """
    layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    sizes = _layout_bytes(layout)
    shard = _plan_shard(path, layout, _aligned(layout, sizes), sizes, metadata)
    opener = _private if is_cache else None
    with replacing(path, what) as partial, open(partial, "wb", buffering=0, opener=opener) as file:
        _write_at(file.fileno(), memoryview(shard.header), 0)
        for name, tensor in tensors.items():
            if shard.entries[name].nbytes:
                _write_at(file.fileno(), raw_bytes(tensor), shard.entries[name].begin)
        if not is_cache:
            os.fsync(file.fileno())


def _private(path: str, flags: int) -> int:
    """Open a new file that only this user may read and write."""
    return os.open(path, flags, 0o600)


def _shard_name(number: int, count: int) -> str:
    """Return the Hugging Face file name of shard `number` (from 1) of `count`."""
    return SINGLE_NAME if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
