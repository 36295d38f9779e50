"""Processes that read request bodies, and the queues in front of them."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from engine.errors import BusyError
from engine.server.errors import ApiError
from engine.server.reading.reading_process import EndedError, Frame, ReadingProcess

READING_SECONDS = 10.0
"""Time limit for reading one body, including its chat template and its tokens."""
SMALL_BYTES = 65_536
"""Bodies up to this size do not wait for larger ones."""
MOST_WAITING_BYTES = 64_000_000
"""Limit on the total size of all bodies that are being read or are waiting."""
_LOG = logging.getLogger(__name__)


class ReadingPool:
    """Two processes, each with a thread that waits for it: one for small bodies, one for large ones.

    A process starts when it is first needed, and again after it was ended.
    """

    def __init__(self, settings: Callable[[], bytes], seconds: float = READING_SECONDS) -> None:
        """settings: returns the ReadingSettings of engine/server/reading/body_reader.py as JSON."""
        self._seconds = seconds
        self._small, self._large = _Lane(settings), _Lane(settings)
        self._bytes = 0
        self._counting = threading.Lock()

    def start(self) -> None:
        """Start the process for small bodies, so that the first request does not wait for it. Returns at once."""
        self._small.put(lambda process: process.start())

    async def read(self, path: str, body: bytes, deadline: float | None = None) -> Frame:
        """Return the reply to a body: its tokens and options, or a complete answer (`reading_process.py`).

        `deadline`: of the request, by time.monotonic(). Raises ApiError for a body that is refused or takes too much
        time or memory, BusyError if too many bytes are waiting, and TimeoutError at the deadline.
        """
        lane = self._small if len(body) <= SMALL_BYTES else self._large
        with self._counting:
            if self._bytes + len(body) > MOST_WAITING_BYTES:
                raise BusyError("too many large bodies are being read; try again later")
            self._bytes += len(body)
        future = lane.put(lambda process: self._ask(process, path, body, deadline))
        future.add_done_callback(lambda _: self._done(len(body)))
        async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic())):
            header, data = await asyncio.wrap_future(future)
        if "refused" in header:
            raise ApiError(**header["refused"])
        if "failed" in header:
            _LOG.error("reading a body failed:\n%s", header["failed"])
            raise ApiError(500, "the server failed on this request; its log has the reason")
        return header, data

    def close(self) -> None:
        """End the processes. Bodies that are being read fail."""
        self._small.close()
        self._large.close()

    def _ask(self, process: ReadingProcess, path: str, body: bytes, deadline: float | None) -> Frame:
        """Read one body, in the lane's thread."""
        left = self._seconds if deadline is None else min(self._seconds, deadline - time.monotonic())
        try:
            return process.ask(path, body, left)
        except TimeoutError as error:
            if deadline is not None and time.monotonic() >= deadline:
                raise
            message = f"the body takes longer than {self._seconds:g} seconds to read; send less text"
            raise ApiError(400, message, code="reading_timeout") from error
        except EndedError as error:
            message = "reading the body exceeds the memory limit, or crashes the tokenizer; send less text at once"
            raise ApiError(400, message, code="reading_failed") from error

    def _done(self, size: int) -> None:
        with self._counting:
            self._bytes -= size


Job = Callable[[ReadingProcess], Any]


class _Lane:
    """One process and its thread. The thread must outlive the process, because Linux ends a child with its parent thread."""

    def __init__(self, settings: Callable[[], bytes]) -> None:
        self._process = ReadingProcess(settings)
        self._jobs: SimpleQueue[tuple[Job, Future[Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def put(self, job: Job) -> Future[Any]:
        """Queue a job and return a future for its result."""
        future: Future[Any] = Future()
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="reading", daemon=True)
                self._thread.start()
        self._jobs.put((job, future))
        return future

    def _work(self) -> None:
        while (entry := self._jobs.get()) is not None:
            job, future = entry
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(job(self._process))
            except BaseException as error:
                future.set_exception(error)
        self._process.close()

    def close(self) -> None:
        with self._starting:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            self._process.kill()
            thread.join()
