"""Reading and writing safetensors checkpoints: the format's rules, hostile files, and memory."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

from engine.errors import CheckpointError, OutputError
from engine.files import json_file
from engine.files.json_file import load_json, write_json
from engine.files.safetensors_file import INDEX_NAME, SafetensorsFile, open_shards
from engine.files.safetensors_writer import DTYPES, Layout, ShardWriter
from engine.files.sha256 import file_sha256

ROOT = Path(__file__).resolve().parents[3]
Tensors = dict[str, torch.Tensor]


def file_bytes(header: object, data: bytes = b"") -> bytes:
    """Return a safetensors file of `header`, JSON text or an object to be encoded, and `data`."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def values(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Return reproducible values of any dtype."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=generator).to(dtype)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether both tensors have the same dtype, shape and bits."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.contiguous().reshape(-1).view(torch.uint8), right.contiguous().reshape(-1).view(torch.uint8))


def write_shards(directory: Path, tensors: Tensors, **options: Any) -> list[Path]:
    layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    writer = ShardWriter(directory, layout, **options)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    return writer.finish()


def write_as_context(directory: Path, layout: Layout, tensors: Tensors, **options: Any) -> None:
    with ShardWriter(directory, layout, **options) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)


PAIR = {"a": entry(), "b": entry(offsets=(8, 16))}
ATTACKS = [
    ("empty", b"", "too short"),
    ("seven bytes", b"\0" * 7, "too short"),
    ("huge header", (2**63).to_bytes(8, "little") + b"{}", "header length"),
    ("header over cap", (100_000_001).to_bytes(8, "little") + b"{}", "header length"),
    ("truncated header", file_bytes({"a": entry()})[:-5], "truncated"),
    ("no header", file_bytes(b""), "not valid JSON"),
    ("not UTF-8", file_bytes(b'{"\xff":1}'), "not UTF-8 at byte 2"),
    ("not JSON", file_bytes(b"{'a': 1}"), "not valid JSON"),
    ("byte order mark", file_bytes(b"\xef\xbb\xbf{}"), "not valid JSON"),
    ("list", file_bytes([]), "not an object"),
    ("null", file_bytes(b"null"), "not an object"),
    ("duplicate tensor", file_bytes(b'{"a":1,"a":1}'), "occurs twice"),
    ("duplicate inner key", file_bytes(b'{"a":{"dtype":"F32","dtype":"F32"}}'), "occurs twice"),
    ("NaN", file_bytes(b'{"a":NaN}'), "NaN is not a JSON number"),
    ("infinity", file_bytes(b'{"a":-Infinity}'), "-Infinity is not a JSON number"),
    ("float overflow", file_bytes(b'{"a":1e999}'), "too large"),
    ("long integer", file_bytes(b'{"a":' + b"9" * 5000 + b"}"), "too many digits"),
    ("deep lists", file_bytes(b'{"a":' + b"[" * 200_000), "nested too deeply"),
    ("deep objects", file_bytes(b'{"a":' * 200_000), "nested too deeply"),
    ("metadata list", file_bytes({"__metadata__": []}), "__metadata__"),
    ("metadata null", file_bytes({"__metadata__": None}), "__metadata__"),
    ("metadata number", file_bytes({"__metadata__": {"a": 1}}), "__metadata__"),
    ("entry list", file_bytes({"a": [1]}), "exactly dtype, shape and data_offsets"),
    ("entry short", file_bytes({"a": {"dtype": "F32", "shape": [0]}}), "exactly dtype, shape and data_offsets"),
    ("entry extra", file_bytes({"a": entry() | {"x": 1}}, b"\0" * 8), "exactly dtype, shape and data_offsets"),
    ("dtype unknown", file_bytes({"a": entry("Q4")}, b"\0" * 8), "unknown dtype 'Q4'"),
    ("dtype list", file_bytes({"a": entry(["F32"])}, b"\0" * 8), "unknown dtype"),
    ("dtype null", file_bytes({"a": entry(None)}, b"\0" * 8), "unknown dtype"),
    ("shape number", file_bytes({"a": entry(shape=2)}, b"\0" * 8), "shape 2 is not a list"),
    ("shape string", file_bytes({"a": entry(shape="2")}, b"\0" * 8), "is not a list"),
    ("shape bool", file_bytes({"a": entry(shape=[2, True])}, b"\0" * 8), "is not a list"),
    ("shape float", file_bytes({"a": entry(shape=[2.0])}, b"\0" * 8), "is not a list"),
    ("shape negative", file_bytes({"a": entry(shape=[-1, -2])}, b"\0" * 8), "is not a list"),
    (
        "shape nested",
        file_bytes(b'{"a":{"dtype":"F32","data_offsets":[0,8],"shape":' + b"[" * 500 + b"]" * 500 + b"}}"),
        "list",
    ),
    ("shape overflow", file_bytes({"a": entry(shape=[2**40, 2**40])}, b"\0" * 8), "too large"),
    ("shape wraps to fit", file_bytes({"a": entry("U8", [2**32, 2**32, 2], (0, 0))}), "too large"),
    ("empty shape overflow", file_bytes({"a": entry(shape=[0, 2**62, 4], offsets=(0, 0))}), "too large"),
    ("rank", file_bytes({"a": entry(shape=[1] * 65, offsets=(0, 4))}, b"\0" * 4), "dimensions"),
    ("offsets one", file_bytes({"a": entry(offsets=[8])}, b"\0" * 8), "data_offsets [8]"),
    ("offsets three", file_bytes({"a": entry(offsets=[0, 8, 8])}, b"\0" * 8), "data_offsets"),
    ("offsets object", file_bytes({"a": entry(offsets={"0": 8})}, b"\0" * 8), "data_offsets"),
    ("offsets bool", file_bytes({"a": entry(offsets=[False, 8])}, b"\0" * 8), "data_offsets"),
    ("offsets negative", file_bytes({"a": entry(offsets=[-8, 0])}, b"\0" * 8), "data_offsets"),
    ("offsets float", file_bytes({"a": entry(offsets=[0, 8.0])}, b"\0" * 8), "data_offsets"),
    ("offsets backwards", file_bytes({"a": entry(offsets=[8, 0])}, b"\0" * 8), "data_offsets"),
    ("span short", file_bytes({"a": entry(offsets=[0, 4])}, b"\0" * 4), "span 4 bytes, dtype and shape 8"),
    ("span long", file_bytes({"a": entry(shape=[0])}, b"\0" * 8), "span 8 bytes, dtype and shape 0"),
    ("past the end", file_bytes(PAIR, b"\0" * 15), "tensor 'b': data runs 1 bytes past the end"),
    ("far past the end", file_bytes({"a": entry(offsets=[2**70, 2**70 + 8])}), "past the end"),
    ("same range", file_bytes({"a": entry(), "b": entry()}, b"\0" * 8), "overlaps"),
    ("partial overlap", file_bytes({"a": entry(), "b": entry(offsets=(4, 12))}, b"\0" * 12), "overlaps"),
    ("empty inside", file_bytes({"a": entry(), "b": entry("F32", [0], (4, 4))}, b"\0" * 8), "overlaps"),
    ("hole at start", file_bytes({"a": entry(offsets=(4, 12))}, b"\0" * 12), "hole of 4"),
    ("hole between", file_bytes({"a": entry(), "b": entry(offsets=(9, 17))}, b"\0" * 17), "hole of 1"),
    ("trailing", file_bytes(PAIR, b"\0" * 17), "1 trailing bytes"),
    ("trailing, no tensors", file_bytes({}, b"\0"), "1 trailing bytes"),
    ("lines in a name", file_bytes({"a\nb\ud800": entry("?")}, b"\0" * 8), r"'a\nb\ud800'"),
    ("long name", file_bytes({"a" * 100_000: entry("?")}, b"\0" * 8), "aaa...aaa"),
]


@pytest.mark.parametrize(("content", "fragment"), [case[1:] for case in ATTACKS], ids=[case[0] for case in ATTACKS])
def test_damaged_file_is_refused_in_one_line(tmp_path: Path, content: bytes, fragment: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFile(path)
    message = str(caught.value)
    assert fragment in message
    assert message.startswith(str(path))
    assert "; " in message
    assert "\n" not in message
    assert len(message) < 700
    message.encode()


def test_missing_file_directory_and_pipe_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for name, fragment in [("none", "missing"), (".", "regular"), ("pipe", "regular"), ("loop", "cannot be read")]:
        with pytest.raises(CheckpointError, match=fragment):
            SafetensorsFile(tmp_path / name)


def test_fuzzed_file_raises_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors = {"a": values(torch.float32, (3, 2)), "b": values(torch.uint8, (5,)), "c": torch.empty(0, 4)}
    original = safetensors.torch.save(tensors, {"format": "pt"})
    draw = random.Random(1)
    opened = 0
    for _ in range(300):
        content = bytearray(original)
        for _ in range(draw.randint(0, 3)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        if draw.random() < 0.3:
            del content[draw.randrange(len(content)) :]
        path.write_bytes(content)
        try:
            file = SafetensorsFile(path)
            for name in file.entries:
                file.tensor(name).clone()
            opened += 1
        except CheckpointError:
            continue
    assert 0 < opened < 300


SHAPES: list[tuple[int, ...]] = [(), (1,), (3, 5), (0,), (2, 0, 3)]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_round_trip_with_the_reference_library(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {f"t{number}": values(dtype, shape, number) for number, shape in enumerate(SHAPES)}
    safetensors.torch.save_file(tensors, tmp_path / "theirs.safetensors", {"key": "é"})
    file = SafetensorsFile(tmp_path / "theirs.safetensors")
    assert file.metadata == {"key": "é"}
    assert file.entries.keys() == tensors.keys()
    assert all(same(file.tensor(name), tensor) for name, tensor in tensors.items())

    path, _ = write_shards(tmp_path / "ours", tensors)
    assert path.name == "model.safetensors"
    loaded = safetensors.torch.load_file(path)
    assert loaded.keys() == tensors.keys()
    assert all(same(loaded[name], tensor) for name, tensor in tensors.items())
    with safetensors.safe_open(path, "pt") as reference:
        assert reference.metadata() == {"format": "pt"}


def test_every_dtype_in_one_file_is_aligned(tmp_path: Path) -> None:
    tensors = {f"é{name}": values(dtype, (3,)) for name, dtype in reversed(DTYPES.items())}
    path, _ = write_shards(tmp_path, tensors, metadata={})
    file = SafetensorsFile(path)
    assert file.metadata == {}
    assert all(entry.begin % entry.dtype.itemsize == 0 for entry in file.entries.values())
    loaded = safetensors.torch.load_file(path)
    assert all(same(file.tensor(name), tensor) for name, tensor in tensors.items())
    assert all(same(loaded[name], tensor) for name, tensor in tensors.items())


def test_data_and_tensors_of_whole_pages_begin_on_a_page(tmp_path: Path) -> None:
    sizes = {
        "odd": (torch.bfloat16, 5),
        "one": (torch.bfloat16, 2048),
        "wide": (torch.float64, 3),
        "two": (torch.uint8, 8192),
    }
    path, _ = write_shards(tmp_path, {name: values(dtype, (size,)) for name, (dtype, size) in sizes.items()})
    begins = {name: entry.begin for name, entry in SafetensorsFile(path).entries.items()}
    assert begins == {"one": 4096, "two": 8192, "wide": 16384, "odd": 16408}


def test_shards_in_a_given_order(tmp_path: Path) -> None:
    tensors = {name: values(torch.bfloat16, (3,), number) for number, name in enumerate("abcd")}
    *paths, _ = write_shards(tmp_path, tensors, shards=[["d", "b"], ["a", "c"]], shard_bytes=1)
    assert [list(SafetensorsFile(path).entries) for path in paths] == [["d", "b"], ["a", "c"]]
    assert all(same(open_shards(tmp_path)[0][name].tensor(name), tensor) for name, tensor in tensors.items())
    with pytest.raises(ValueError, match="do not hold each tensor"):
        write_shards(tmp_path / "other", tensors, shards=[["d", "b"], ["a", "b"]])


def test_unaligned_data_and_empty_file_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    expected = values(torch.float32, (2,))
    header = json.dumps({"f": entry(offsets=(1, 9)), "u": entry("U8", [], (0, 1))}).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(file_bytes(header, b"\7" + bytes(expected.view(torch.uint8).tolist())))
    file = SafetensorsFile(path)
    assert file.entries["f"].begin % 4 == 1
    assert same(file.tensor("f"), expected)
    assert same(file.tensor("u"), torch.tensor(7, dtype=torch.uint8))
    path.write_bytes(file_bytes({}))
    assert SafetensorsFile(path).entries == {}


def mapped_file(directory: Path) -> tuple[SafetensorsFile, Tensors]:
    tensors = {"a": values(torch.float32, (300_000,)), "b": values(torch.bfloat16, (7, 9))}
    path, _ = write_shards(directory, tensors)
    return SafetensorsFile(path), tensors


@pytest.mark.filterwarnings("error")
def test_tensors_are_views_and_outlive_release_and_close(tmp_path: Path) -> None:
    file, expected = mapped_file(tmp_path)
    file.release()  # nothing is mapped yet
    with file:
        first, second = file.tensor("a"), file.tensor("b")
        assert file.tensor("a").data_ptr() == first.data_ptr()
        for _ in range(2):
            assert same(first, expected["a"])
            assert same(second, expected["b"])
            file.release()
    assert same(first, expected["a"])
    assert same(file.tensor("b"), expected["b"])
    with pytest.raises(CheckpointError, match="no tensor 'c'"):
        file.tensor("c")


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="resident pages are read from /proc")
def test_release_gives_pages_back(tmp_path: Path) -> None:
    file, _ = mapped_file(tmp_path)

    def resident() -> int:
        lines = iter(Path("/proc/self/smaps").read_text().splitlines())
        for line in lines:
            if line.endswith(str(file.path)):
                return int(next(line for line in lines if line.startswith("Rss:")).split()[1])
        raise AssertionError("the file is not mapped")

    file.tensor("a").sum()
    assert resident() > 1000
    file.release()
    assert resident() < 100


def test_sha256_is_that_of_the_file(tmp_path: Path) -> None:
    file, _ = mapped_file(tmp_path)
    assert file_sha256(file.path) == hashlib.sha256(file.path.read_bytes()).hexdigest()


def test_file_that_changed_is_refused(tmp_path: Path) -> None:
    file, _ = mapped_file(tmp_path)
    file.path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="changed while in use"):
        file.tensor("a")
    file.path.unlink()
    with pytest.raises(CheckpointError, match="missing"):
        file_sha256(file.path)


def read_index(directory: Path) -> dict[str, Path]:
    """Return the file that holds each tensor."""
    return {name: file.path for name, file in open_shards(directory)[0].items()}


def some_tensors(count: int = 5) -> Tensors:
    return {f"layer.{number}": values(torch.float32, (10,), number) for number in range(count)}


def test_shards_are_filled_in_order_and_indexed(tmp_path: Path) -> None:
    tensors = some_tensors() | {"large": values(torch.bfloat16, (100,))}
    paths = write_shards(tmp_path, tensors, shard_bytes=80)
    assert [path.name for path in paths] == [f"model-0000{n}-of-00004.safetensors" for n in (1, 2, 3, 4)] + [INDEX_NAME]
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    assert index["metadata"] == {"total_size": 5 * 40 + 200}
    assert list(index["weight_map"]) == list(tensors)
    assert [int(name[6:11]) for name in index["weight_map"].values()] == [1, 1, 2, 2, 3, 4]
    assert read_index(tmp_path) == {name: tmp_path / shard for name, shard in index["weight_map"].items()}
    by_tensor, files = open_shards(tmp_path)
    assert [file.path for file in files] == paths[:-1]
    for name, tensor in tensors.items():
        assert same(by_tensor[name].tensor(name), tensor)
        assert same(safetensors.torch.load_file(by_tensor[name].path)[name], tensor)


def test_tensors_may_come_in_any_order_and_memory_format(tmp_path: Path) -> None:
    base = values(torch.float32, (4, 6))
    tensors = {
        "t": base.t(),
        "slice": base[:, 1:3],
        "grad": base.clone().requires_grad_(),
        "expand": base[0].expand(3, 6),
    }
    layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with ShardWriter(tmp_path, layout, shard_bytes=100) as writer:
        for name in reversed(tensors):
            writer.add(name, tensors[name])
    by_tensor, _ = open_shards(tmp_path)
    assert all(same(by_tensor[name].tensor(name), tensor.detach()) for name, tensor in tensors.items())


def test_one_shard_has_an_index_that_says_which_file_is_the_checkpoint(tmp_path: Path) -> None:
    path, index = write_shards(tmp_path, {"a": torch.ones(2)})
    assert json.loads(index.read_text()) == {"metadata": {"total_size": 8}, "weight_map": {"a": "model.safetensors"}}
    safetensors.torch.save_file({"tables": torch.ones(1)}, tmp_path / "tables.safetensors")
    assert read_index(tmp_path) == {"a": path}


def test_writer_without_tensors_writes_an_empty_file(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "deep" / "er", {}):
        pass
    assert safetensors.torch.load_file(tmp_path / "deep" / "er" / "model.safetensors") == {}


def test_writer_refuses_what_breaks_its_layout(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "out", {"a": (torch.float32, (2,)), "b": (torch.int8, ())})
    with pytest.raises(ValueError, match="not in the layout"):
        writer.add("c", torch.zeros(2))
    for wrong in (torch.zeros(3), torch.zeros(2, 1), torch.zeros(2, dtype=torch.float64)):
        with pytest.raises(ValueError, match="the layout says"):
            writer.add("a", wrong)
    writer.add("a", torch.zeros(2))
    with pytest.raises(ValueError, match="added before"):
        writer.add("a", torch.zeros(2))
    with pytest.raises(ValueError, match="1 tensors were not added, first 'b'"):
        writer.finish()
    for layout in ({"__metadata__": (torch.int8, ())}, {"a": (torch.complex64, ())}, {"a": (torch.int8, (2, -2))}):
        with pytest.raises(ValueError, match="no safetensors file can hold"):
            ShardWriter(tmp_path / "bad", layout)
    with pytest.raises(ValueError, match="not positive"):
        ShardWriter(tmp_path / "bad", {}, shard_bytes=0)
    assert not (tmp_path / "bad").exists()


def test_interrupted_checkpoint_is_refused_or_removed(tmp_path: Path) -> None:
    layout = dict.fromkeys(("a", "b"), (torch.float32, (10,)))
    writer = ShardWriter(tmp_path, layout)
    writer.add("b", torch.zeros(10))
    with pytest.raises(CheckpointError):
        open_shards(tmp_path)
    writer.discard()
    with pytest.raises(ValueError, match="not in the layout"):
        write_as_context(tmp_path, layout, {"a": torch.zeros(10), "c": torch.zeros(10)}, shard_bytes=40)
    with pytest.raises(ValueError, match="not added"):
        write_as_context(tmp_path, layout, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", INDEX_NAME])
def test_writer_refuses_a_directory_with_weights(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("kept")
    with pytest.raises(OutputError, match="already holds weights"):
        ShardWriter(tmp_path, {})
    assert (tmp_path / name).read_text() == "kept"


def test_writer_refuses_a_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot write a checkpoint"):
        ShardWriter(tmp_path / "file", {})


@pytest.mark.parametrize("function", ["pwrite", "fsync"])
def test_full_disk_is_reported_and_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, function, full)
    with (
        pytest.raises(OutputError, match=r"model\.safetensors: cannot write .*No space left.*make space") as caught,
        ShardWriter(tmp_path, {"a": (torch.int8, (1,))}) as writer,
    ):
        writer.add("a", torch.ones(1, dtype=torch.int8))
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_index_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.fsync, 0

    def full_at_third(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full_at_third)
    ones = dict.fromkeys("ab", torch.ones(1, dtype=torch.int8))
    with pytest.raises(OutputError, match=INDEX_NAME):
        write_as_context(tmp_path, dict.fromkeys("ab", (torch.int8, (1,))), ones, shard_bytes=1)
    assert list(tmp_path.iterdir()) == []


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:7], offset))
    tensors = some_tensors(2)
    path, _ = write_shards(tmp_path, tensors)
    assert all(same(SafetensorsFile(path).tensor(name), tensor) for name, tensor in tensors.items())


WRITE_200_MB = """
import sys, torch
from pathlib import Path
from engine.generation.report import peak_memory_bytes
from engine.files.safetensors_writer import ShardWriter
shape = (1024, 2048)
writer = ShardWriter(Path(sys.argv[1]), {str(n): (torch.bfloat16, shape) for n in range(50)}, shard_bytes=10**8)
before = peak_memory_bytes()
for n in range(50):
    writer.add(str(n), torch.full(shape, n, dtype=torch.bfloat16))
writer.finish()
print(peak_memory_bytes() - before)
"""


def test_writer_keeps_no_tensors_in_memory(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITE_200_MB, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) < 60 * 2**20
    by_tensor, files = open_shards(tmp_path)
    assert len(files) == 3
    assert all(bool((by_tensor[str(n)].tensor(str(n)) == n).all()) for n in (0, 23, 49))


def two_shards(directory: Path) -> dict[str, Any]:
    """Write a checkpoint of tensors a and b in a shard each, at `one` and `two`, and return its index."""
    for tensor, shard in (("a", "one"), ("b", "two")):
        safetensors.torch.save_file({tensor: torch.ones(1)}, directory / f"{shard}.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    write_json(directory / INDEX_NAME, index)
    return index


def weight_map(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Return a damage to a checkpoint that applies `change` to its index's weight_map."""

    def damage(directory: Path) -> None:
        index = load_json(directory / INDEX_NAME, "index")
        change(index["weight_map"])
        write_json(directory / INDEX_NAME, index)

    return damage


def index_text(text: str) -> Callable[[Path], None]:
    """Return a damage to a checkpoint that replaces the whole index."""

    def damage(directory: Path) -> None:
        (directory / INDEX_NAME).write_text(text)

    return damage


def add_unlisted(directory: Path) -> None:
    tensors = {"b": torch.ones(1), "c": torch.ones(1)}
    safetensors.torch.save_file(tensors, directory / "two.safetensors")


def rename_in_weight_map(name: object) -> Callable[[Path], None]:
    """Return a damage to a checkpoint that assigns tensor b to file `name`."""
    return weight_map(lambda names: names.update(b=name))


def link_outside(directory: Path) -> None:
    target = directory.parent / "elsewhere.safetensors"
    (directory / "two.safetensors").rename(target)
    (directory / "two.safetensors").symlink_to(target)


def link_index_outside(directory: Path) -> None:
    target = directory.parent / "elsewhere.json"
    (directory / INDEX_NAME).rename(target)
    (directory / INDEX_NAME).symlink_to(target)


BAD_SHARD_NAMES = [
    "/etc/two.safetensors",
    "../model/two.safetensors",
    "..",
    "sub/two.safetensors",
    "sub\\two.safetensors",
    "c:two.safetensors",
    "two\0.safetensors",
    "two\n.safetensors",
    "\ud800.safetensors",
    "two.bin",
    "",
    7,
    None,
    ["two.safetensors"],
]
INDEX_ATTACKS: list[tuple[str, Callable[[Path], None], str]] = [
    ("not JSON", index_text("{"), "not valid JSON"),
    ("list", index_text("[]"), "not an object"),
    ("no weight_map", index_text("{}"), "weight_map is missing"),
    ("weight_map list", index_text('{"weight_map": []}'), "weight_map is missing or not an object"),
    ("tensor twice", index_text('{"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}}'), "occurs twice"),
    ("missing shard", lambda path: (path / "two.safetensors").unlink(), "two.safetensors: safetensors file is missing"),
    ("long name", weight_map(lambda names: names.update(b="x" * 5000 + ".safetensors")), "cannot be read"),
    ("unknown tensor", weight_map(lambda names: names.update(c="two.safetensors")), "no tensor 'c'"),
    ("unlisted tensor", add_unlisted, "tensor 'c' is not listed"),
    ("swapped", weight_map(lambda names: names.update(a=names["b"], b=names["a"])), "no tensor 'a'"),
    ("link outside", link_outside, "link leads out"),
    ("index outside", link_index_outside, "link leads out"),
]
INDEX_ATTACKS += [(f"shard {name!a}", rename_in_weight_map(name), "not a plain") for name in BAD_SHARD_NAMES]


@pytest.mark.parametrize(
    ("damage", "fragment"), [case[1:] for case in INDEX_ATTACKS], ids=[case[0] for case in INDEX_ATTACKS]
)
def test_damaged_index_is_refused(tmp_path: Path, damage: Callable[[Path], None], fragment: str) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    two_shards(directory)
    assert read_index(directory) == {"a": directory / "one.safetensors", "b": directory / "two.safetensors"}
    damage(directory)
    with pytest.raises(CheckpointError) as caught:
        read_index(directory)
    assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("names", "fragment"),
    [
        ([], "no model.safetensors"),
        (["README.md"], "no model.safetensors"),
        (["pytorch_model.bin"], "pickled weights"),
        (["pytorch_model-00001-of-00002.bin", "config.json"], "convert them to safetensors"),
        (["x.safetensors", "y.safetensors", "pytorch_model.bin"], "holds 2 safetensors files, first 'x.safetensors'"),
    ],
)
def test_directory_without_weights_is_refused(tmp_path: Path, names: list[str], fragment: str) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=fragment):
        open_shards(tmp_path)


def test_path_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("none", "file", "x" * 5000):
        with pytest.raises(CheckpointError, match="cannot be listed"):
            open_shards(tmp_path / name)


def test_index_has_precedence_over_other_files(tmp_path: Path) -> None:
    two_shards(tmp_path)
    safetensors.torch.save_file({"c": torch.ones(1)}, tmp_path / "model.safetensors")
    assert read_index(tmp_path).keys() == {"a", "b"}
    (tmp_path / INDEX_NAME).unlink()
    assert read_index(tmp_path) == {"c": tmp_path / "model.safetensors"}


def test_links_of_a_hugging_face_cache_are_followed(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    two_shards(snapshot)
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(Path("../../blobs") / str(number))
    (tmp_path / "alias").symlink_to(snapshot)
    for directory in (snapshot, tmp_path / "alias"):
        assert read_index(directory).keys() == {"a", "b"}


def test_link_of_a_single_file_stays_inside(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    safetensors.torch.save_file({"a": torch.ones(1)}, directory / "real.safetensors")
    (directory / "model.safetensors").symlink_to("real.safetensors")
    assert read_index(directory).keys() == {"a"}
    (directory / "real.safetensors").rename(tmp_path / "real.safetensors")
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").symlink_to("../real.safetensors")
    with pytest.raises(CheckpointError, match="link leads out"):
        read_index(directory)


def test_json_reads_back_as_written(tmp_path: Path) -> None:
    content = {"z": 1, "a": [1.5, None, "é"], "nested": {"b": True}}
    write_json(tmp_path / "x.json", content)
    assert load_json(tmp_path / "x.json", "test") == content
    text = (tmp_path / "x.json").read_text()
    assert text.startswith('{\n  "z": 1,')
    assert text.endswith("}\n")
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "nan.json", {"a": float("nan")})
    with pytest.raises(OutputError, match=r"none/x\.json: cannot write JSON"):
        write_json(tmp_path / "none" / "x.json", content)


def test_json_over_the_size_cap_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.json").write_text("{}" + " " * 20)
    assert load_json(tmp_path / "x.json", "test") == {}
    monkeypatch.setattr(json_file, "MAX_JSON_BYTES", 20)
    with pytest.raises(CheckpointError, match="longer than 20 bytes"):
        load_json(tmp_path / "x.json", "test")
    with pytest.raises(CheckpointError, match="test is missing"):
        load_json(tmp_path / "none.json", "test")
