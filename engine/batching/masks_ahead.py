"""Token masks of grammars, computed in a thread while the model runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from engine.batching.request_state import RequestState
from engine.generation.grammar_matcher import Matcher


class MasksAhead:
    """One thread, which starts with the first request that has a grammar."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")

    @contextmanager
    def computed(self, states: Iterable[RequestState]) -> Iterator[None]:
        """Compute the masks of these requests' next tokens while the body runs. They are ready, or have failed, after it."""
        matchers = [state.matcher for state in states if state.matcher is not None]
        if not matchers:
            yield
            return
        future = self._thread.submit(_prepare, matchers)
        try:
            yield
        finally:
            if future.cancel():  # the processor had no time for the thread
                _prepare(matchers)
            else:
                future.result()


def _prepare(matchers: list[Matcher]) -> None:
    for matcher in matchers:
        matcher.prepare()
