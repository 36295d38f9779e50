"""The writer of GGUF files, compared with that of the package `gguf`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_for_tests import entries as all_entries
from gguf_for_tests import write_gguf

from engine.files.gguf_file import GgufFile
from engine.files.gguf_file_writer import GgufFileWriter, metadata_entry
from engine.files.gguf_types import BLOCK_TYPES

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "number": 7,
    "share": 0.1,
    "flag": True,
    "text": "héllo\n",
    "texts": ["a", "", "é"],
    "numbers": [1, -2],
    "shares": [0.5, 0.1],
    "flags": [True, False],
}


def test_files_are_those_of_the_package(tmp_path: Path) -> None:
    """The package writes the same values of the same types, and two tensors with padding after each."""
    tensors = {"a": np.arange(5, dtype=np.float32), "b": np.arange(3 * 68, dtype=np.uint8).reshape(3, 68)}
    theirs = gguf.GGUFWriter(tmp_path / "theirs.gguf", "llama")
    adders = {int: theirs.add_uint32, float: theirs.add_float32, bool: theirs.add_bool, str: theirs.add_string}
    for key, value in list(METADATA.items())[1:]:
        adders.get(type(value), theirs.add_array)(key, value)
    theirs.add_tensor("a", tensors["a"])
    theirs.add_tensor("b", tensors["b"], raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    theirs.write_header_to_file()
    theirs.write_kv_data_to_file()
    theirs.write_tensors_to_file()
    theirs.close()
    layout = {"a": (BLOCK_TYPES[0], (5,)), "b": (BLOCK_TYPES[8], (3, 64))}
    with GgufFileWriter(tmp_path / "ours.gguf", (metadata_entry(*each) for each in METADATA.items()), layout) as file:
        for name, tensor in tensors.items():
            file.write(name, [tensor])
    assert (tmp_path / "ours.gguf").read_bytes() == (tmp_path / "theirs.gguf").read_bytes()


def test_entries_that_the_package_does_not_write_are_copied(tmp_path: Path) -> None:
    """This is why the header is written here: an empty list is part of the format, and the package refuses it."""
    metadata = {"before": 1, "general.tags": [], "general.architecture": "llama"}
    file = GgufFile(write_gguf(tmp_path / "m.gguf", metadata, {}))
    copied = [file.metadata_entry(key) for key in file.metadata]
    assert copied == all_entries(metadata)
    with GgufFileWriter(tmp_path / "copy.gguf", copied, {}):
        pass
    assert (tmp_path / "copy.gguf").read_bytes() == (tmp_path / "m.gguf").read_bytes()
    theirs = gguf.GGUFWriter(tmp_path / "theirs.gguf", "llama")
    theirs.add_key_value("general.tags", [], gguf.GGUFValueType.ARRAY, sub_type=gguf.GGUFValueType.STRING)
    theirs.write_header_to_file()
    with pytest.raises(ValueError, match="Empty array"):
        theirs.write_kv_data_to_file()
    theirs.close()
