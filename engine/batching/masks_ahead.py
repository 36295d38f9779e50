"""Token masks of grammars, computed in a thread while the model runs, where that is worth a thread."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from engine.batching.request_state import RequestState
from engine.generation.grammar_matcher import Matcher

THREAD_SECONDS = 6e-4
"""Processor time of a step's masks from which on a thread computes them: waking it, and sharing Python's
lock with it, costs about as much."""
NEWEST = 0.1
"""Weight of the last step in the mean time of a mask."""


class MasksAhead:
    """One thread, which starts with the first step whose masks take long."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._mask_seconds = 0.0
        """Mean processor time of one mask."""

    @contextmanager
    def computed(self, states: Iterable[RequestState]) -> Iterator[None]:
        """Compute the masks of these requests' next tokens while the body runs. They are ready, or have failed, after it."""
        matchers = [state.matcher for state in states if state.matcher is not None]
        if len(matchers) * self._mask_seconds < THREAD_SECONDS:
            self._prepare(matchers)
            yield
            return
        future = self._thread.submit(self._prepare, matchers)
        try:
            yield
        finally:
            if future.cancel():  # the processor had no time for the thread
                self._prepare(matchers)
            else:
                future.result()

    def _prepare(self, matchers: list[Matcher]) -> None:
        if not matchers:
            return
        began = time.thread_time()
        for matcher in matchers:
            matcher.prepare()
        each = (time.thread_time() - began) / len(matchers)
        self._mask_seconds += NEWEST * (each - self._mask_seconds)
