"""Safetensors checkpoints: files are validated completely before use, and read by memory mapping.

The format: 8 bytes with the header's length (little-endian); the header, a JSON object that gives each tensor's dtype,
shape and byte range; the data, which the ranges cover without gap or overlap. The reference library is not used here,
so that every error about an untrusted file names the tensor and says what to do.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from engine.errors import CheckpointError
from engine.files.element_type import ELEMENT_TYPES, ElementType
from engine.files.json_file import load_json, parse_object, reading, shown
from engine.files.mapped_file import MappedFile, TensorEntry
from engine.files.model_files import check_inside

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000

_WHAT = "safetensors file"
HEADER_LENGTH = struct.Struct("<Q")
_MAX_RANK = 64  # torch operations refuse tensors of higher rank
_MAX_BYTES = 2**63 - 1  # torch counts elements and bytes in int64
PICKLES = (".bin", ".pt", ".pth")
METADATA = "__metadata__"
_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}
_AGAIN = "fetch or write the file again"


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


class SafetensorsFile(MappedFile):
    """One safetensors file. Attributes beside those of MappedFile: `metadata`, the header's free texts."""

    what = _WHAT

    def read_header(self, file: BinaryIO) -> None:
        """Read and check the header, and set `metadata` and `entries`."""
        header, data_start = _read_header(self.path, file, self.size)
        self.metadata = _parse_metadata(self.path, header.pop(METADATA, {}))
        self.entries = {
            name: _parse_entry(f"{self.path}: tensor {shown(name)}", raw, data_start, self.size)
            for name, raw in header.items()
        }
        _check_coverage(self.path, self.entries, data_start, self.size)


class LoadedFile(SafetensorsFile):
    """A file whose content is read into memory when a tensor is first requested, and not mapped.

    A mapped file that another process truncates, or that the disk does not deliver, ends the process that reads it.
    """

    _content: bytearray | None = None

    def _mapping(self) -> bytearray:
        """Return the whole content."""
        if self._content is None:
            with reading(self.path, self.what) as file:
                self.check_unchanged(file)
                content = bytearray(self.size)
                if file.readinto(content) != self.size:
                    raise CheckpointError(f"{self.path}: file changed while in use; start again once it is written")
            self._content = content
        return self._content

    def release(self) -> None:
        """Do nothing: the content stays in memory as long as this object or one of its tensors."""

    def close(self) -> None:
        """Drop the reference to the content."""
        self._content = None


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
