"""Work in a copy of the process: its result, its limit, and its end."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest

from engine.server.reading.limited import OverLimitError, limited


def endless() -> str:
    while True:
        pass


def fails() -> str:
    os.write(2, b"a message of a library")
    raise ValueError("a bug")


def ended() -> str:
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


def test_the_result_comes_back_and_nothing_else() -> None:
    changed: list[int] = []

    def work() -> str:
        changed.append(os.getpid())
        return "größer" * 100_000  # more than a pipe holds

    assert limited(work, 5) == "größer" * 100_000 and not changed


@pytest.mark.parametrize("work", [endless, fails, ended])
def test_work_without_a_result(work: object, capfd: pytest.CaptureFixture[str]) -> None:
    started, before = time.monotonic(), psutil.Process().children()
    with pytest.raises(OverLimitError):
        limited(work, 1)  # type: ignore[arg-type]
    assert time.monotonic() - started < 30 and not capfd.readouterr().err
    assert psutil.Process().children() == before, "a copy is left"


def test_waiting_is_no_work() -> None:
    assert limited(lambda: str(time.sleep(1.2)), 1) == "None"
