"""The requests of one client between a server's event loop and the engine's thread."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from threading import Lock
from weakref import WeakKeyDictionary, ref

from engine.batching.loop import EngineLoop
from engine.batching.request import Request, Update
from engine.server.metrics import Metrics

MOST_HELD = 256
"""Updates of a whole answer that the engine's thread holds back before it wakes the event loop."""


class Exchange:
    """One client's requests in the engine, with their updates."""

    def __init__(
        self, engine_loop: EngineLoop, requests: Sequence[Request], metrics: Metrics, *, streams: bool = True
    ) -> None:
        """Submits all requests or none. `streams`: whether each update is wanted at once, and not only the whole answer.

        Raises BusyError and OptionError, as the engine does.
        """
        self._engine_loop, self._metrics = engine_loop, metrics
        self._wakes = wakes_of(asyncio.get_running_loop())
        self._updates: deque[tuple[int, Update]] = deque()
        self._arrived, self._is_late = asyncio.Event(), False
        self._most_held = 0 if streams else MOST_HELD
        self._last = [time.monotonic()] * len(requests)
        self._begun = [False] * len(requests)
        self._going = len(requests)
        self._ids: list[int] = []
        try:
            for index, request in enumerate(requests):
                self._ids.append(engine_loop.submit(request, partial(self._hear, index)))
        except BaseException:
            self.cancel()
            raise

    async def updates(self, deadline: float | None) -> AsyncIterator[tuple[int, Update]]:
        """Yield each update with the index of its request, until all have ended.

        deadline: time of the event loop's clock; TimeoutError is raised at this time.
        """
        timer = None if deadline is None else asyncio.get_running_loop().call_at(deadline, self._expire)
        try:
            while self._going:
                while not self._updates and not self._is_late:
                    self._arrived.clear()
                    await self._arrived.wait()
                if self._is_late:
                    raise TimeoutError
                index, update = self._updates.popleft()
                self._going -= bool(update.finish_reason)
                yield index, update
        finally:
            if timer is not None:
                timer.cancel()

    def _expire(self) -> None:
        self._is_late = True
        self._arrived.set()

    def cancel(self) -> None:
        """End the requests that have not ended; the engine ignores the others."""
        for request_id in self._ids:
            self._engine_loop.cancel(request_id)

    def _hear(self, index: int, update: Update) -> None:
        """Receive an update. Called in the engine's thread."""
        now = time.monotonic()
        if update.tokens:
            self._count(index, update, now)
        if update.finish_reason:
            self._metrics.ended(update.finish_reason, update.timings)
        self._updates.append((index, update))
        if update.finish_reason or len(self._updates) > self._most_held:
            self._wakes.call(self._arrived.set)

    def _count(self, index: int, update: Update, now: float) -> None:
        waited, self._last[index] = now - self._last[index], now
        if self._begun[index]:
            self._metrics.tokens(len(update.tokens), waited)
        else:
            self._begun[index] = True
            self._metrics.first_token(waited)


class Wakes:
    """Calls from the engine's thread to an event loop, which wakes once for all that wait.

    Each waking takes the interpreter from the engine's thread for a moment.
    """

    def __init__(self, event_loop: asyncio.AbstractEventLoop) -> None:
        self._event_loop, self._lock = ref(event_loop), Lock()
        self._waiting: list[Callable[[], object]] = []

    def call(self, function: Callable[[], object]) -> None:
        """Call a function soon in the event loop. Any thread may ask for it."""
        with self._lock:
            self._waiting.append(function)
            is_first = len(self._waiting) == 1
        event_loop = self._event_loop()
        if is_first and event_loop is not None:
            with suppress(RuntimeError):  # the server has ended, and nothing receives the update
                event_loop.call_soon_threadsafe(self._call_all)

    def _call_all(self) -> None:
        with self._lock:
            functions, self._waiting = self._waiting, []
        for function in functions:
            function()


_wakes: WeakKeyDictionary[asyncio.AbstractEventLoop, Wakes] = WeakKeyDictionary()


def wakes_of(event_loop: asyncio.AbstractEventLoop) -> Wakes:
    """Return the calls to an event loop, which all its exchanges share."""
    if event_loop not in _wakes:
        _wakes[event_loop] = Wakes(event_loop)
    return _wakes[event_loop]
