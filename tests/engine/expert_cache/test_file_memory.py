"""Parts of a file are read at their own offsets and given back page by page, whatever they share pages with."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import CheckpointError
from engine.expert_cache.file_memory import PAGE, FileMemory
from engine.expert_cache.places import Part
from engine.expert_cache.readers import AHEAD, NOW, PIECE_BYTES, Loading, Readers
from engine.files.mapped_file import Extent
from engine.files.safetensors_file import SafetensorsFile
from engine.files.safetensors_writer import write_tensors

SIZES = (3, 5000, 1, 40_000, PAGE, 9000)


@pytest.fixture(name="file")
def some_file(tmp_path: Path) -> SafetensorsFile:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"t{n}": torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for n, size in enumerate(SIZES)
    }
    write_tensors(tmp_path / "file.safetensors", tensors, {}, "a file")
    return SafetensorsFile(tmp_path / "file.safetensors")


def extents_of(file: SafetensorsFile) -> list[Extent]:
    return [Extent(entry.begin, entry.end) for entry in file.entries.values()]


def test_a_part_is_read_to_where_its_tensor_is(file: SafetensorsFile) -> None:
    stored = SafetensorsFile(file.path)
    memory = FileMemory(file)
    for name, extent in zip(file.entries, extents_of(file), strict=True):
        memory.hold(extent)
        memory.read(extent)
        tensor = file.tensor(name)
        assert torch.equal(tensor, stored.tensor(name))
        assert memory.holds(tensor.data_ptr()) and memory.extent_of(tensor) == extent
    file.release()  # does nothing: nobody would read the parts again
    assert torch.equal(file.tensor("t3"), stored.tensor("t3"))
    memory.close()


def test_a_part_that_is_given_back_leaves_its_neighbors_alone(file: SafetensorsFile) -> None:
    stored = SafetensorsFile(file.path)
    memory = FileMemory(file)
    for extent in extents_of(file):
        memory.hold(extent)
        memory.read(extent)
    memory.drop(extents_of(file)[list(file.entries).index("t3")])
    assert not file.tensor("t3")[PAGE:-PAGE].any(), "whole pages of it are empty"
    for name in file.entries:
        if name != "t3":
            assert torch.equal(file.tensor(name), stored.tensor(name)), name
    memory.close()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(SIZES) - 1), st.booleans()), max_size=30))
def test_bytes_are_counted_as_a_set_of_pages_would(changes: list[tuple[int, bool]]) -> None:
    file = SafetensorsFile(Path(os.environ["SOME_FILE"]))
    memory, extents = FileMemory(file), extents_of(file)
    held: set[int] = set()

    def pages() -> int:
        return len({page for n in held for page in range(extents[n].begin // PAGE, (extents[n].end - 1) // PAGE + 1)})

    for number, is_held in changes:
        before = pages()
        if is_held and number not in held:
            held.add(number)
            assert memory.hold(extents[number]) == (pages() - before) * PAGE
        elif not is_held and number in held:
            held.remove(number)
            assert memory.drop(extents[number]) == (before - pages()) * PAGE
    memory.close()


@pytest.fixture(autouse=True)
def _name_of_the_file(file: SafetensorsFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypothesis runs a test many times with one fixture, and takes no fixture that changes: it reads the name here."""
    monkeypatch.setenv("SOME_FILE", str(file.path))


def test_pages_move_from_a_part_that_leaves_to_one_that_comes(file: SafetensorsFile) -> None:
    """Whether or not the system can move pages: what was read last is right, and neighbors keep their bytes."""
    stored = SafetensorsFile(file.path)
    memory, extents = FileMemory(file), dict(zip(file.entries, extents_of(file), strict=True))
    for name in ("t0", "t1", "t3"):
        memory.hold(extents[name])
        memory.read(extents[name])
    memory.drop(extents["t3"], lends=True)
    memory.hold(extents["t5"])
    memory.take_pages(extents["t5"], memory, extents["t3"])
    memory.read(extents["t5"])
    for name in ("t0", "t1", "t5"):
        assert torch.equal(file.tensor(name), stored.tensor(name)), name
    assert not file.tensor("t3")[PAGE:-PAGE].any()
    memory.close()


@pytest.mark.parametrize("moves", [True, False])
def test_pages_that_were_lent_are_gone_in_the_end(
    file: SafetensorsFile, monkeypatch: pytest.MonkeyPatch, moves: bool
) -> None:
    """Taken or not, and where the system cannot move pages: what left takes no memory."""
    if not moves:
        monkeypatch.setattr("engine.expert_cache.file_memory._mremap", lambda: None)
    memory, extents = FileMemory(file), dict(zip(file.entries, extents_of(file), strict=True))
    for name in ("t3", "t4"):
        assert memory.hold(extents[name])
        memory.read(extents[name])
        memory.drop(extents[name], lends=True)
    memory.take_pages(extents["t5"], memory, extents["t3"])
    memory.give_back(extents["t4"])
    for name in ("t3", "t4"):
        assert not any(memory.map[extents[name].begin : extents[name].end])
    memory.close()


def test_a_file_that_became_shorter_is_an_error_of_its_readers(file: SafetensorsFile) -> None:
    memory, last = FileMemory(file), max(extents_of(file))
    os.truncate(file.path, last.begin // PAGE * PAGE)
    loading, readers = Loading([Part(memory, last)]), Readers(1)
    readers.start(loading, NOW)
    with pytest.raises(CheckpointError, match="became shorter while in use"):
        readers.wait([loading])
    readers.close()
    memory.close()


def test_a_file_that_changed_before_it_is_opened_is_refused(file: SafetensorsFile) -> None:
    os.truncate(file.path, file.size - 1)
    with pytest.raises(CheckpointError, match="changed while in use"):
        FileMemory(file)


class RecordingMemory:
    """Notes what is read, in order. The first read waits until the test lets it go."""

    def __init__(self) -> None:
        self.read_extents: list[Extent] = []
        self.gate = threading.Event()

    def read(self, extent: Extent) -> None:
        if not self.read_extents:
            self.read_extents.append(extent)
            self.gate.wait(10)
        else:
            self.read_extents.append(extent)


def test_what_is_needed_now_goes_before_what_was_read_ahead() -> None:
    memory = RecordingMemory()
    first, ahead, hurried, now = (Loading([Part(memory, Extent(n, n + 1))]) for n in range(4))  # type: ignore[arg-type]
    readers = Readers(1)
    readers.start(first, AHEAD)
    while not memory.read_extents:
        pass
    for loading, urgency in ((ahead, AHEAD), (hurried, AHEAD), (now, NOW)):
        readers.start(loading, urgency)
    readers.hurry(hurried)
    memory.gate.set()
    readers.wait([first, ahead, hurried, now])
    assert [extent.begin for extent in memory.read_extents] == [0, 3, 2, 1]
    readers.close()


def test_an_expert_is_prepared_before_any_of_its_pieces_is_read() -> None:
    memory, before = RecordingMemory(), list[int]()
    memory.gate.set()

    def prepare() -> None:
        time.sleep(0.05)  # the other threads have time for the other pieces
        before.append(len(memory.read_extents))

    loading, readers = Loading([Part(memory, Extent(0, 3 * PIECE_BYTES))], prepare), Readers(4)  # type: ignore[arg-type]
    readers.start(loading, NOW)
    readers.wait([loading])
    assert before == [0] and len(memory.read_extents) == 3
    readers.close()


def test_what_fails_to_be_prepared_is_an_error_of_those_that_wait() -> None:
    def fail() -> None:
        raise OSError("no memory")

    memory = RecordingMemory()
    memory.gate.set()
    loading, readers = Loading([Part(memory, Extent(0, 2 * PIECE_BYTES))], fail), Readers(2)  # type: ignore[arg-type]
    readers.start(loading, NOW)
    with pytest.raises(OSError, match="no memory"):
        readers.wait([loading])
    readers.finish(loading)
    readers.close()


def test_a_large_part_is_read_in_pieces_that_cover_it() -> None:
    size = 2 * PIECE_BYTES + random.Random(0).randrange(PIECE_BYTES)
    pieces = Loading([Part(None, Extent(7, 7 + size))]).pieces  # type: ignore[arg-type]
    assert [piece.extent.begin for piece in pieces] == [7, 7 + PIECE_BYTES, 7 + 2 * PIECE_BYTES]
    assert pieces[-1].extent.end == 7 + size
