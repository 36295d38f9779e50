"""The requests of one client between a server's event loop and the engine's thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from functools import partial

from engine.batching.loop import EngineLoop
from engine.batching.request import Request, Update
from engine.server.metrics import Metrics


class Exchange:
    """One client's requests in the engine, with a queue of their updates."""

    def __init__(self, engine_loop: EngineLoop, requests: Sequence[Request], metrics: Metrics) -> None:
        """Submits all requests or none. Raises BusyError and OptionError, as the engine does."""
        self._engine_loop, self._metrics = engine_loop, metrics
        self._event_loop = asyncio.get_running_loop()
        self._updates: asyncio.Queue[tuple[int, Update]] = asyncio.Queue()
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
        while self._going:
            async with asyncio.timeout_at(deadline):
                index, update = await self._updates.get()
            self._going -= bool(update.finish_reason)
            yield index, update

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
        with suppress(RuntimeError):  # the server has ended, and nothing receives the update
            self._event_loop.call_soon_threadsafe(self._updates.put_nowait, (index, update))

    def _count(self, index: int, update: Update, now: float) -> None:
        waited, self._last[index] = now - self._last[index], now
        if self._begun[index]:
            self._metrics.tokens(len(update.tokens), waited)
        else:
            self._begun[index] = True
            self._metrics.first_token(waited)
