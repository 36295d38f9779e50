"""Reading GGUF files: the format's rules, hostile files, and split models."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path

import pytest
import torch
from gguf_for_tests import described, encoded, entries, gguf_bytes, start, text, write_gguf

from engine.errors import CheckpointError, CompressError, UnsupportedError
from engine.files.gguf_file import GgufFile, open_gguf

ONE = {"a": torch.arange(8.0)}
TWO = {"a": torch.arange(8.0), "b": torch.arange(16.0)}


def file_bytes(*descriptions: bytes, metadata: bytes = b"", count: int = 0, data: bytes = bytes(32)) -> bytes:
    """Return a file of these descriptions of tensors, and of `count` metadata entries."""
    header = start(len(descriptions), count) + metadata + b"".join(descriptions)
    return header + bytes(-len(header) % 32) + data


GOOD = described("a", 0, [8], 0)
HUGE = 2**62
ATTACKS: list[tuple[str, bytes, str]] = [
    ("empty", b"", "too short"),
    ("only magic", b"GGUF", "too short"),
    ("other magic", start(0, 0, magic=b"GGML"), "not a GGUF file"),
    ("version 1", start(0, 0, 1), "version 1"),
    ("version 4", start(0, 0, 4), "version 4"),
    ("version 0", start(0, 0, 0), "version 0"),
    ("other byte order", struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "byte order"),
    ("huge tensor count", start(HUGE, 0), f"{HUGE} tensors"),
    ("tensor count of all bits", start(2**64 - 1, 0), "do not fit"),
    ("huge metadata count", start(0, HUGE), "metadata entries"),
    ("count over content", start(3, 0) + GOOD + bytes(64), "truncated|tensor"),
    ("huge key", file_bytes(metadata=struct.pack("<Q", HUGE) + bytes(64), count=1), "a metadata key has"),
    ("key past the end", file_bytes(metadata=struct.pack("<Q", 60_000) + bytes(64), count=1), "truncated"),
    ("huge text", file_bytes(metadata=text("k") + struct.pack("<IQ", 8, HUGE), count=1), "truncated"),
    ("huge array", file_bytes(metadata=text("k") + struct.pack("<IIQ", 9, 4, HUGE), count=1), "truncated"),
    ("array of all bits", file_bytes(metadata=text("k") + struct.pack("<IIQ", 9, 12, 2**64 - 1), count=1), "truncated"),
    ("huge array of texts", file_bytes(metadata=text("k") + struct.pack("<IIQ", 9, 8, HUGE), count=1), "texts"),
    ("array of arrays", file_bytes(metadata=text("k") + struct.pack("<IIQ", 9, 9, 1) + bytes(32), count=1), "type 9"),
    ("unknown metadata type", file_bytes(metadata=text("k") + struct.pack("<I", 13) + bytes(32), count=1), "type 13"),
    ("bool of two", file_bytes(metadata=text("k") + struct.pack("<IB", 7, 2), count=1), "neither true nor false"),
    ("key is not UTF-8", file_bytes(metadata=text(b"\xff") + encoded(1), count=1), "UTF-8"),
    ("text is not UTF-8", file_bytes(metadata=text("k") + encoded(b"\xff"), count=1), "UTF-8"),
    ("key twice", file_bytes(metadata=b"".join(entries({"k": 1}) * 2), count=2), "occurs twice"),
    ("alignment 0", gguf_bytes({"general.alignment": 0}, ONE), "power of two"),
    ("alignment 48", gguf_bytes({"general.alignment": 48}, ONE), "power of two"),
    ("alignment 4", gguf_bytes({"general.alignment": 4}, ONE), "power of two"),
    ("alignment is huge", gguf_bytes({"general.alignment": 2**31}, ONE), "power of two"),
    ("alignment is a text", gguf_bytes({"general.alignment": "32"}, ONE), "power of two"),
    ("name twice", file_bytes(GOOD, described("a", 0, [8], 32), data=bytes(64)), "occurs twice"),
    ("name is not UTF-8", file_bytes(described(b"\xff", 0, [8], 0)), "UTF-8"),
    ("name of 200 bytes", file_bytes(described("a" * 200, 0, [8], 0)), "at most"),
    ("no dimensions", file_bytes(described("a", 0, [], 0)), "0 dimensions"),
    ("five dimensions", file_bytes(described("a", 0, [1, 1, 1, 1, 8], 0)), "5 dimensions"),
    ("rank of all bits", file_bytes(text("a") + struct.pack("<I", 2**32 - 1)), "dimensions"),
    ("empty tensor", file_bytes(described("a", 0, [0], 0)), "empty"),
    ("size wraps around", file_bytes(described("a", 0, [2**32, 2**32, 8], 0)), "too large"),
    ("dimension of all bits", file_bytes(described("a", 0, [2**64 - 1], 0)), "too large"),
    ("unknown type", file_bytes(described("a", 99, [8], 0)), "type 99"),
    ("type that is not read", file_bytes(described("a", 16, [256], 0)), "IQ2_XXS"),
    ("block does not divide", file_bytes(described("a", 8, [40], 0), data=bytes(64)), "do not divide"),
    ("offset is not aligned", file_bytes(described("a", 0, [8], 8), data=bytes(64)), "multiple of 32"),
    ("hole", file_bytes(described("a", 0, [8], 32), data=bytes(64)), "hole"),
    ("overlap", file_bytes(GOOD, described("b", 0, [8], 0)), "overlaps"),
    ("overlap of blocks", file_bytes(described("a", 0, [16], 0), described("b", 0, [8], 32), data=bytes(64)), "overlaps"),
    ("past the end", file_bytes(described("a", 0, [9], 0)), "past the end"),
    ("offset past the end", file_bytes(GOOD, described("b", 0, [8], 2**40)), "hole"),
    ("offset of all bits", file_bytes(GOOD, described("b", 0, [8], 2**64 - 32)), "hole"),
    ("trailing bytes", file_bytes(GOOD, data=bytes(100)), "trailing"),
    ("no data", file_bytes(GOOD, data=b""), "past the end"),
]


@pytest.mark.parametrize(("content", "says"), [attack[1:] for attack in ATTACKS], ids=[attack[0] for attack in ATTACKS])
def test_hostile_files_are_refused_by_name_and_without_memory(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises((CheckpointError, UnsupportedError), match=says) as caught:
        GgufFile(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert peak < 2_000_000


def test_values_of_every_kind_are_read(tmp_path: Path) -> None:
    metadata = {"u8": (0, 255), "i8": (1, -1), "u16": (2, 65_535), "i16": (3, -2), "u32": (4, 2**32 - 1), "i32": (5, -3)}
    metadata |= {
        "f32": (6, 0.5),
        "bool": (7, True),
        "text": (8, "é"),
        "u64": (10, 2**64 - 1),
        "i64": (11, -4),
        "f64": (12, 0.1),
    }
    lists = {"texts": ["a", ""], "numbers": [1, -1], "floats": [0.5], "flags": [True, False], "none": list[str]()}
    file = GgufFile(write_gguf(tmp_path / "m.gguf", metadata | lists, {}))
    assert file.metadata == {name: value for name, (_, value) in metadata.items()} | lists
    assert type(file.metadata["bool"]) is bool and not file.entries


def test_tensors_are_mapped_with_their_types(tmp_path: Path) -> None:
    plain = {"a": torch.randn(3, 5), "b": torch.randn(2, 3, 4).half(), "c": torch.randn(7).bfloat16()}
    blocks = bytes(range(68))
    file = GgufFile(write_gguf(tmp_path / "m.gguf", {}, plain | {"d": (8, (2, 32), blocks)}))
    for name, tensor in plain.items():
        assert torch.equal(file.tensor(name), tensor) and file.tensor(name).dtype == tensor.dtype
    assert file.tensors["d"].type.name == "Q8_0" and file.tensors["d"].shape == (2, 32)
    assert file.tensor("d").shape == (2, 34) and bytes(file.raw("d")) == blocks


def test_version_2_and_other_alignments_are_read(tmp_path: Path) -> None:
    data = gguf_bytes({"general.alignment": 256}, TWO, alignment=256)
    (tmp_path / "m.gguf").write_bytes(data[:4] + struct.pack("<I", 2) + data[8:])
    assert torch.equal(GgufFile(tmp_path / "m.gguf").tensor("b"), TWO["b"])


def test_the_last_tensor_needs_no_padding(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(3.0)}
    (tmp_path / "m.gguf").write_bytes(gguf_bytes({}, tensors)[:-20])
    assert torch.equal(GgufFile(tmp_path / "m.gguf").tensor("a"), tensors["a"])


@pytest.mark.parametrize("count", [200, pytest.param(2_000, marks=pytest.mark.slow)])
def test_damaged_files_raise_nothing_else(count: int, tmp_path: Path) -> None:
    """Changed and cut files are read or refused; none of them raises another exception."""
    good = gguf_bytes({"general.architecture": "x", "k": [1, 2], "t": ["a", "b"], "f": 0.5}, TWO)
    path, messages = tmp_path / "m.gguf", list[str]()
    for number in range(count):
        chosen = random.Random(number)
        place = chosen.randrange(len(good))
        bits = bytes([good[place] ^ chosen.randrange(1, 256)])
        path.write_bytes(good[:place] if number % 4 == 0 else good[:place] + bits + good[place + 1 :])
        try:
            file = GgufFile(path)
            _ = [file.tensor(name) for name in file.entries]
        except CompressError as error:
            messages.append(str(error))
    assert len(messages) > count / 4 and not any("\n" in message for message in messages)


def split(tmp_path: Path, *, count: int = 2, tensors: int = 2, names: tuple[str, str] = ("a", "b")) -> Path:
    """Write a model in two parts, and return the first."""
    for number, name in enumerate(names):
        metadata = {"split.no": (2, number), "split.count": (2, count), "split.tensors.count": (5, tensors)}
        write_gguf(tmp_path / f"m-{number + 1:05}-of-00002.gguf", metadata, {name: torch.full((4,), float(number))})
    return tmp_path / "m-00001-of-00002.gguf"


def test_split_models_are_opened_together(tmp_path: Path) -> None:
    files = open_gguf(split(tmp_path))
    assert [file.path.name for file in files] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    assert [list(file.entries) for file in files] == [["a"], ["b"]]


def test_split_models_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"give m-00001-of-00002\.gguf"):
        open_gguf(split(tmp_path).with_name("m-00002-of-00002.gguf"))
    with pytest.raises(CheckpointError, match=r"is in m-00001-of-00002\.gguf too"):
        open_gguf(split(tmp_path, names=("a", "a")))
    with pytest.raises(CheckpointError, match=r"split\.tensors\.count is 3"):
        open_gguf(split(tmp_path, tensors=3))
    with pytest.raises(CheckpointError, match="one of 3 parts"):
        open_gguf(split(tmp_path, count=3))
    first = split(tmp_path)
    renamed = first.rename(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match="does not end in"):
        open_gguf(renamed)
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match="missing"):
        open_gguf(renamed.rename(first))


def test_a_name_of_a_part_without_metadata_of_parts_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m-00001-of-00003.gguf", {}, ONE)
    with pytest.raises(CheckpointError, match=r"name says that it is one of 3 parts, and its metadata has no split\.count"):
        open_gguf(path)


def test_a_part_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    first = split(tmp_path / "model")
    other = first.with_name("m-00002-of-00002.gguf").rename(tmp_path / "elsewhere.gguf")
    first.with_name("m-00002-of-00002.gguf").symlink_to(other)
    with pytest.raises(CheckpointError, match="leads out"):
        open_gguf(first)
