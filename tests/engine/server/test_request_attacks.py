"""Every body of tests/attacks/requests gets its expected answer, while another client continues to read its stream."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from attacks_for_tests import attack_files, load_attack
from server_for_tests import scripted_state, served

from engine.generation.generate import Engine
from engine.server.reading.reading_pool import ReadingPool

ATTACKS = attack_files("requests")
SLOW = {
    "schema_of_many_properties",
    "schema_with_a_large_remainder",
    "regular_expression_that_explodes",
    "half_of_a_surrogate_pair_in_a_role",
    "deep_schema_of_a_tool",
}
"""Attacks that take seconds, beside others of their kind."""
HUNG_SECONDS = 30
"""Limit for any answer, and for the time between two tokens of the other client, with a margin for busy machines."""


class Watching:
    """A client that reads a stream as long as the server writes it, and records when tokens arrive."""

    def __init__(self, url: str) -> None:
        self.times: list[float] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(url,))
        self._thread.start()

    def _read(self, url: str) -> None:
        body = {"prompt": "ab", "max_tokens": 40, "stream": True}
        while not self._end.is_set():
            with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=HUNG_SECONDS) as answer:
                assert answer.status_code == 200
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        self.times.append(time.monotonic())

    def longest_gap(self) -> float:
        self._end.set()
        self._thread.join()
        return max(later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False))


@pytest.fixture(scope="module")
def url(tiny_engine: Engine, reading_pool: ReadingPool) -> Iterator[str]:
    with served(scripted_state(tiny_engine, reading_pool, "answer" * 20, seconds=0.005)) as address:
        yield address


def attack(path: Path) -> Any:
    """Return a case of the tests: of several attacks that take seconds, one is in the fast set."""
    return pytest.param(path, marks=[pytest.mark.slow] if path.stem in SLOW else [], id=path.stem)


def test_there_are_attacks() -> None:
    assert len(ATTACKS) >= 20


@pytest.mark.parametrize("path", [attack(path) for path in ATTACKS])
def test_the_attack_is_answered_and_nobody_waits(path: Path, url: str) -> None:
    own: Any = load_attack(path)
    watching = Watching(url)
    try:
        headers = {"content-type": "application/json"}
        answer = httpx2.post(url + own.PATH, content=own.body(), headers=headers, timeout=HUNG_SECONDS)
    finally:
        gap = watching.longest_gap()
    allowed = own.STATUS if isinstance(own.STATUS, tuple) else (own.STATUS,)
    assert answer.status_code in allowed, answer.text[:500]
    assert own.SAYS in answer.text and len(answer.text) < 2_000
    assert answer.status_code == 200 or set(json.loads(answer.text)) - {"type"} == {"error"}
    assert gap < HUNG_SECONDS
