"""GGUF files: validated completely before use, and read by memory mapping. A model may be split into several files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, BinaryIO

from engine.errors import CheckpointError, OutputError
from engine.files.element_type import UINT8
from engine.files.gguf_header import WHAT, GgufTensor, read_header
from engine.files.json_file import shown
from engine.files.mapped_file import MappedFile, TensorEntry
from engine.files.model_files import check_inside

SUFFIX = ".gguf"
SPLIT_NUMBER, SPLIT_COUNT, SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_MAX_PARTS = 10_000


class GgufFile(MappedFile):
    """One GGUF file.

    Attributes beside those of MappedFile: `metadata`, values by key; `tensors`, the types and shapes of the tensors;
    `alignment` of the data. The entry of a quantized tensor is that of its blocks as bytes, with rows of bytes in the place
    of rows of numbers.
    """

    what = WHAT

    def read_header(self, file: BinaryIO) -> None:
        """Read and check the header, and set `metadata`, `tensors` and `entries`."""
        header = read_header(str(self.path), file, self.size)
        self.metadata: dict[str, Any] = header.metadata
        self.tensors: dict[str, GgufTensor] = header.tensors
        self.alignment, self._spans = header.alignment, header.spans
        self.entries = {}
        for name, tensor in header.tensors.items():
            element, begin = tensor.type.element, header.data_start + tensor.offset
            shape = tensor.bytes_shape if element is None else tensor.shape
            self.entries[name] = TensorEntry(element or UINT8, shape, begin, begin + tensor.nbytes)

    def metadata_entry(self, key: str) -> bytes:
        """Return an entry of the metadata as it is stored: key, type and value."""
        return bytes(self._mapping()[self._spans[key]])


def is_gguf(path: Path) -> bool:
    """Return whether a path names a GGUF file."""
    return path.suffix.lower() == SUFFIX and not path.is_dir()


def check_name(path: Path) -> None:
    """Raise OutputError for a name by which one whole file would be taken for a part of a split model."""
    named = _PART.fullmatch(path.name)
    if named is not None and (int(named[2]), int(named[3])) != (1, 1):
        raise OutputError(f"{path}: is the name of a part of a split model, and the result is one file; give another name")


def open_gguf(path: Path) -> list[GgufFile]:
    """Open a model's GGUF file, and the other parts of a split model, which are beside the first one.

    Raises CheckpointError for damaged or missing parts, and for parts that are not of one model.
    """
    first = GgufFile(path)
    parts = first.metadata.get(SPLIT_COUNT, 0)
    if type(parts) is not int or not 0 <= parts <= _MAX_PARTS:
        raise CheckpointError(f"{path}: {SPLIT_COUNT} is {shown(parts)}, and must be a number of files; fetch it again")
    named = _PART.fullmatch(path.name)
    if parts <= 1 and named is None:
        return [first]
    if named is not None and parts == 0 and int(named[3]) != 1:
        raise CheckpointError(
            f"{path}: its name says that it is one of {int(named[3])} parts, and its metadata has no {SPLIT_COUNT}; rename "
            "it if it is a whole model, or fetch all parts again"
        )
    if named is None or int(named[3]) != max(parts, 1):
        raise CheckpointError(
            f"{path}: is one of {parts} parts, and its name does not end in -00001-of-{parts:05}.gguf, by which the other "
            "parts are found; give it the name that it was published with"
        )
    if int(named[2]) != 1:
        raise CheckpointError(f"{path}: is a later part of a split model; give {named[1]}-00001-of-{named[3]}.gguf")
    others = [path.with_name(f"{named[1]}-{number:05}-of-{named[3]}.gguf") for number in range(2, parts + 1)]
    for other in others:
        check_inside(path.parent, other)
    files = [first, *map(GgufFile, others)]
    for number, file in enumerate(files):
        found = file.metadata.get(SPLIT_NUMBER), file.metadata.get(SPLIT_COUNT)
        if parts > 1 and found != (number, parts):
            raise CheckpointError(
                f"{file.path}: says that it is part {shown(found[0])} of {shown(found[1])}; fetch it again"
            )
    _check_parts(files)
    return files


def _check_parts(files: list[GgufFile]) -> None:
    """Raise CheckpointError for a tensor in two parts, and for another number of tensors than the first part says."""
    seen: dict[str, GgufFile] = {}
    for file in files:
        for name in file.entries:
            if name in seen:
                raise CheckpointError(
                    f"{file.path}: tensor {shown(name)} is in {seen[name].path.name} too; fetch all parts again"
                )
            seen[name] = file
    total = files[0].metadata.get(SPLIT_TENSORS, len(seen))
    if total != len(seen):
        raise CheckpointError(
            f"{files[0].path}: {SPLIT_TENSORS} is {shown(total)}, and the parts hold {len(seen)}; fetch all parts again"
        )
