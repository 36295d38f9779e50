"""The trial that decides between compiled kernels and torch: once for a processor, its versions and a number of threads."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kernels import trial


class Kernels:
    """As the trial sees them: `seconds` for a product."""

    PLAIN = FLOAT32 = FLOAT16 = (16, 1)

    def __init__(self, place: Path, seconds: float) -> None:
        self._place, self._seconds, self.products_made = place, seconds, 0

    def cache_directory(self) -> Path:
        return self._place

    def use_threads(self, count: int) -> None:
        assert count == torch.get_num_threads()

    def products(self, *given: Any, **options: Any) -> None:
        self.products_made += 1
        time.sleep(self._seconds)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "TRIAL_SHAPE", (8, 8))
    monkeypatch.setattr(trial, "MOST_TRIALS", 1)


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_verdict_is_kept(is_slow: bool, tmp_path: Path) -> None:
    first = Kernels(tmp_path, 0.05 if is_slow else 0.0)
    if not is_slow:
        first.products = lambda *given, **options: None  # type: ignore[method-assign]
    assert trial.pays(first, 1, many=False) != is_slow
    second = Kernels(tmp_path, 0.0)
    assert trial.pays(second, 1, many=False) != is_slow and second.products_made == 0
    assert trial.pays(second, 128, many=True) in (True, False) and second.products_made > 0, "of other rows it is another"
    assert trial.pays(Kernels(tmp_path, 0.0), 1, many=False, dtype=torch.float32) in (True, False)
    assert len(trial.read_verdicts(tmp_path / trial.FILE)) == 3, "and so it is of another dtype"
    assert [path.name for path in tmp_path.iterdir()] == [trial.FILE]


def test_a_verdict_against_the_kernels_holds_for_some_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not trial.pays(Kernels(tmp_path, 0.05), 1, many=False)
    now = time.time()
    for later, tries in ((trial.REFUSED_SECONDS - 60, False), (trial.REFUSED_SECONDS + 60, True), (-60, True)):
        with monkeypatch.context() as patched:
            patched.setattr(trial.time, "time", lambda later=later: now + later)
            kernels = Kernels(tmp_path, 0.05)
            assert not trial.pays(kernels, 1, many=False) and (kernels.products_made > 0) == tries
            verdicts = trial.read_verdicts(tmp_path / trial.FILE)
            (tmp_path / trial.FILE).write_text(json.dumps(dict.fromkeys(verdicts, now)))


@pytest.mark.parametrize("other", ["threads", "torch"])
def test_a_verdict_holds_for_one_version_and_number_of_threads(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial.pays(Kernels(tmp_path, 0.0), 1, many=False)
    if other == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    else:
        monkeypatch.setattr(torch, "__version__", "0.0")
    again = Kernels(tmp_path, 0.0)
    trial.pays(again, 1, many=False)
    assert again.products_made > 0 and len(trial.read_verdicts(tmp_path / trial.FILE)) == 2


@pytest.mark.parametrize("content", [b"", b"\xff", b"[true]", b'{"torch": 1}', b"[" * 100_000])
def test_damaged_and_foreign_files_are_ignored(content: bytes, tmp_path: Path) -> None:
    (tmp_path / trial.FILE).write_bytes(content)
    kernels = Kernels(tmp_path, 0.0)
    trial.pays(kernels, 1, many=False)
    assert kernels.products_made > 0 and len(json.loads((tmp_path / trial.FILE).read_bytes())) == 1


def test_where_nothing_can_be_written_it_is_tried_each_time(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for _ in range(2):
        kernels = Kernels(tmp_path / "file" / "under", 0.0)
        trial.pays(kernels, 1, many=False)
        assert kernels.products_made > 0
