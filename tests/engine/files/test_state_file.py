"""The state that a run leaves for `--resume` is read back only if it is unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from compress.run.work_directory import WorkDirectory, read_value, write_value
from engine.errors import DataError
from engine.files.safetensors_file import SafetensorsFile
from engine.files.state_file import check_digest, write_state

TENSORS = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.tensor(7), "empty": torch.empty(0, 3)}


def test_every_byte_of_a_state_counts(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    write_state(path, TENSORS, {"step": "3"}, "the state")
    with SafetensorsFile(path) as file:
        check_digest(file)
    metadata = safe_open(path, "pt").metadata()
    others = (
        (TENSORS | {"b": TENSORS["b"].flip(0)}, metadata),
        (TENSORS | {"b": TENSORS["b"].reshape(3, 2)}, metadata),
        (TENSORS | {"b": TENSORS["b"].int()}, metadata),
        ({"c": TENSORS["b"], "a": TENSORS["a"], "empty": TENSORS["empty"]}, metadata),
        (TENSORS, metadata | {"step": "4"}),
        (TENSORS, {"step": "3"}),
    )
    for tensors, said in others:
        save_file(tensors, path, metadata=said)
        with SafetensorsFile(path) as file, pytest.raises(DataError, match="digest differs"):
            check_digest(file)
    with SafetensorsFile(path) as file:
        check_digest(file, may_lack=True)
    assert set(load_file(path)) == set(TENSORS)


@pytest.mark.parametrize("value", [{"1": [0.1, None]}, [1, 2], "x", None, 1e-300])
def test_a_value_is_read_back_or_refused(tmp_path: Path, value: object) -> None:
    path = tmp_path / "value.json"
    write_value(path, value)
    assert read_value(path, "value") == value
    written = json.loads(path.read_text())
    for other in (written | {"value": [value, 1]}, {"value": value}, {"sha256": written["sha256"]}, written | {"sha256": 1}):
        path.write_text(json.dumps(other))
        with pytest.raises(DataError, match="digest differs"):
            read_value(path, "value")


def test_a_changed_value_of_an_interrupted_run_is_refused(tmp_path: Path) -> None:
    work = WorkDirectory(tmp_path / "out")
    work.begin({}, resume=False)
    assert work.once("scores", lambda: {"0": [1.0, 2.0]}) == {"0": [1.0, 2.0]}
    path = work.path / "scores.json"
    path.write_text(path.read_text().replace("2.0", "3.0"))
    with pytest.raises(DataError, match="leave out --resume"):
        work.once("scores", lambda: {"0": [1.0, 2.0]})
