"""A cache directory: its size, its order of removal, its owner, and files that are not its own."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.errors import CompressError, OptionError, OutputError
from engine.files import kept_files
from engine.files.kept_files import HEADER_BYTES, KeptFiles
from engine.files.safetensors_file import LoadedFile

BYTES = 1000
SIZE = BYTES + HEADER_BYTES


def key(number: int) -> str:
    return f"{number:064x}"


def content(number: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((BYTES - 8,), number, dtype=torch.uint8), "b": torch.tensor([number, -1], dtype=torch.int32)}


def limit_for(directory: Path, count: int) -> int:
    """Return a limit within which so many files stay when the last one is written."""
    one = KeptFiles(directory / "one", SIZE)
    one.write(key(0), content(0))
    one.close()
    return (count - 1) * one.bytes + SIZE


def reopened(kept: KeptFiles, limit: int) -> KeptFiles:
    kept.close()
    return KeptFiles(kept.directory, limit)


def held(kept: KeptFiles) -> list[int]:
    """Return the numbers of all files, which are those of the index."""
    names = sorted(path.stem for path in kept.directory.glob("*.safetensors"))
    assert names == sorted(kept._sizes)
    assert kept.bytes == sum(path.stat().st_size for path in kept.directory.glob("*.safetensors")) <= kept.limit
    return [int(name, 16) for name in names]


def test_a_file_may_be_used_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another request that needs the same file sets the time of its last use between header and content."""
    kept, compare = KeptFiles(tmp_path / "kept", 10 * SIZE), kept_files.check_digest
    kept.write(key(1), content(1))

    def used_meanwhile(file: LoadedFile) -> None:
        kept.touch([key(1)])
        compare(file)

    monkeypatch.setattr(kept_files, "check_digest", used_meanwhile)
    assert torch.equal(kept.read(key(1))["a"], content(1)["a"])


def test_files_are_read_back_and_are_private(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        kept = KeptFiles(tmp_path / "a" / "b", 10 * SIZE)
        assert kept.write(key(1), content(1))
    finally:
        os.umask(before)
    assert key(1) in kept and key(2) not in kept
    for tensors in (kept.read(key(1)), load_file(kept._path(key(1)))):
        assert tensors.keys() == content(1).keys()
        assert all(torch.equal(tensors[name], each) for name, each in content(1).items())
    assert kept.directory.stat().st_mode & 0o777 == 0o700
    assert {path.name for path in kept.directory.iterdir()} == {"lock", "secret", f"{key(1)}.safetensors"}
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in kept.directory.iterdir())
    again = reopened(kept, 10 * SIZE)
    assert again.secret == kept.secret and len(kept.secret) == 32
    assert again.read(key(1)).keys() == content(1).keys()


def test_the_least_recently_used_go_first_also_after_a_restart(tmp_path: Path) -> None:
    kept = KeptFiles(tmp_path / "kept", limit_for(tmp_path, 4))
    for number in range(4):
        kept.write(key(number), content(number))
    kept.touch([key(1), key(9), key(0)])
    kept.write(key(4), content(4))
    kept.write(key(5), content(5))
    assert held(kept) == [0, 1, 4, 5]
    kept = reopened(kept, limit_for(tmp_path, 3))
    assert held(kept) == [0, 4, 5]
    kept.write(key(5), content(6))
    assert held(kept) == [4, 5] and kept.read(key(5))["b"][0] == 6, "both exist until the new file replaces the old one"
    assert not kept.write(key(7), {"a": torch.zeros(3 * SIZE, dtype=torch.uint8)}) and held(kept) == [4, 5]
    kept.forget(key(4))
    assert key(4) not in kept
    kept.remove(key(4))
    kept.remove(key(8))
    assert held(kept) == [5]


def test_other_files_are_left_alone_and_unfinished_ones_are_removed(tmp_path: Path) -> None:
    kept = KeptFiles(tmp_path, 4 * SIZE)
    kept.write(key(1), content(1))
    (tmp_path / f".{key(2)}.safetensors.partial").write_bytes(b"x")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / f"{key(3)[1:]}.safetensors").write_text("mine")
    (tmp_path / f"{key(4)}.safetensors").symlink_to(tmp_path / "notes.txt")
    kept = reopened(kept, 4 * SIZE)
    assert list(kept._sizes) == [key(1)] and kept.bytes == kept._path(key(1)).stat().st_size
    assert not (tmp_path / f".{key(2)}.safetensors.partial").exists()
    kept = reopened(kept, 1)
    assert not kept._sizes and (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("damage", ["changed", "cut", "longer", "empty", "gone", "other key", "pipe"])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: str) -> None:
    kept = KeptFiles(tmp_path, 10 * SIZE)
    kept.write(key(1), content(1))
    kept.write(key(2), content(2))
    path = kept._path(key(1))
    whole = path.read_bytes()
    if damage in ("gone", "pipe"):
        path.unlink()
        if damage == "pipe":
            os.mkfifo(path)
    elif damage == "other key":
        kept._path(key(2)).rename(path)
    else:
        damaged = {"changed": whole[:-1] + b"\0", "cut": whole[:-9], "longer": whole + b"\0", "empty": b""}
        path.write_bytes(damaged[damage])
    with pytest.raises(CompressError) as caught:
        kept.read(key(1))
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_a_file_that_is_cut_while_it_is_used_ends_nothing(tmp_path: Path) -> None:
    """Reading beyond the end of a mapped file would end the process."""
    kept = KeptFiles(tmp_path, 10 * SIZE)
    kept.write(key(1), content(1))
    read, unread = LoadedFile(kept._path(key(1))), LoadedFile(kept._path(key(1)))
    tensor = read.tensor("a")
    os.truncate(kept._path(key(1)), 4)
    assert int(tensor.long().sum()) == BYTES - 8
    with pytest.raises(CompressError, match="changed while in use"):
        unread.tensor("a")


def test_directories_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    kept = KeptFiles(tmp_path / "used", SIZE)
    with pytest.raises(OptionError, match="another process uses this cache"):
        KeptFiles(tmp_path / "used", SIZE)
    kept.close()
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OptionError, match="cannot be used as a cache"):
            KeptFiles(path, SIZE)
    (tmp_path / "used").chmod(0o770)
    with pytest.raises(OptionError, match="other users can write there"):
        KeptFiles(tmp_path / "used", SIZE)


def test_a_damaged_secret_is_replaced(tmp_path: Path) -> None:
    kept = KeptFiles(tmp_path, SIZE)
    (tmp_path / "secret").write_bytes(b"short")
    again = reopened(kept, SIZE)
    assert len(again.secret) == 32 and again.secret != kept.secret
    assert (tmp_path / "secret").read_bytes() == again.secret


def test_a_disk_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptFiles(tmp_path, 10 * SIZE)
    kept.write(key(1), content(1))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("engine.files.safetensors_writer._write_at", full)
        with pytest.raises(OutputError, match="No space left on device"):
            kept.write(key(2), content(2))
    assert held(kept) == [1] and not list(tmp_path.glob(".*"))


def test_threads_that_write_and_remove_keep_the_limit(tmp_path: Path) -> None:
    kept = KeptFiles(tmp_path, 8 * SIZE)

    def work(first: int) -> None:
        for number in range(first, first + 40):
            kept.write(key(number), content(number % 250))
            kept.touch([key(number - 1)])
            if number % 7 == 0:
                kept.remove(key(number - 2))

    threads = [threading.Thread(target=work, args=(100 * n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kept.bytes == sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert kept.bytes <= 11 * SIZE, "each thread makes room for its own file only"
