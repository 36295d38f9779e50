"""Tensors that a refit wrote are read from its files, whose pages do not stay in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import save_reference

from compress.refit.stored import mapped_tensors
from engine.checkpoint.checkpoint import Checkpoint
from engine.errors import DataError
from engine.files.mapped_file import MappedFile
from engine.files.state_file import write_state


def test_pages_are_released_after_the_check_and_with_those_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_reference("mixtral", tmp_path / "model")
    checkpoint, path = Checkpoint(tmp_path / "model"), tmp_path / "state.safetensors"
    write_state(path, {"down": torch.arange(4.0)}, {}, "a test")
    released, release = list[Path](), MappedFile.release

    def counted(self: MappedFile) -> None:
        released.append(self.path)
        assert self._map is not None or self in checkpoint.files, "a file without its mapping would release nothing"
        release(self)

    monkeypatch.setattr(MappedFile, "release", counted)
    found = mapped_tensors(checkpoint, path)
    assert released == [path]
    checkpoint.release()
    assert released.count(path) == 2 and found["down"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    save_reference("mixtral", tmp_path / "model")
    path = tmp_path / "state.safetensors"
    write_state(path, {"down": torch.arange(4.0)}, {}, "a test")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match="damaged"):
        mapped_tensors(Checkpoint(tmp_path / "model"), path)
