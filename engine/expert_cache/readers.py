"""Threads that read parts of experts. Experts that a layer waits for go before those that are read ahead."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import count

from engine.expert_cache.places import Part
from engine.files.mapped_file import Extent

READERS = 4
"""Threads that read at the same time. One fills no disk: a read waits for the disk's answer before the next one begins."""
PIECE_BYTES = 4 << 20
"""Bytes that a thread reads at a time, so that all of them work on a large expert."""
NOW, AHEAD = 0, 1
"""Urgencies."""


class Loading:
    """One expert that is being read."""

    def __init__(self, parts: Iterable[Part], prepare: Callable[[], None] | None = None) -> None:
        """prepare: what the thread that reads the first piece does before."""
        self.prepare = prepare
        self.pieces = [piece for part in parts for piece in _pieces(part)]
        self.left = len(self.pieces)
        self.error: BaseException | None = None
        self.urgency = AHEAD

    @property
    def is_done(self) -> bool:
        """Whether every piece was read, or failed."""
        return self.left == 0


class Readers:
    """A few threads and one queue."""

    def __init__(self, threads: int = READERS) -> None:
        self._lock = threading.Lock()
        self._queued, self._done = threading.Condition(self._lock), threading.Condition(self._lock)
        """Notified for each new piece, and for each expert that is done. Every thread that wakes takes Python's lock."""
        self._queue: list[tuple[int, int, Loading, Part]] = []
        self._number = count()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"expert reader {number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, loading: Loading, urgency: int) -> None:
        """Put an expert's pieces into the queue: the first one alone, if it has to be prepared."""
        with self._lock:
            loading.urgency = urgency
            self._push(loading, loading.pieces if loading.prepare is None else loading.pieces[:1])

    def hurry(self, loading: Loading) -> None:
        """Let the pieces of an expert that was to be read ahead, and that wait in the queue, go first."""
        with self._lock:
            if loading.urgency == NOW:
                return
            loading.urgency = NOW
            waiting = [piece for _, _, own, piece in self._queue if own is loading]
            self._queue = [entry for entry in self._queue if entry[2] is not loading]
            self._queue.sort()
            self._push(loading, waiting)

    def wait(self, loadings: Iterable[Loading]) -> None:
        """Wait until all of them are done. Raises the error of a read that failed."""
        for loading in loadings:
            self.finish(loading)
            if loading.error is not None:
                raise loading.error

    def finish(self, loading: Loading) -> None:
        """Wait until an expert is done, or has failed."""
        with self._lock:
            self._done.wait_for(lambda: loading.is_done)

    def close(self) -> None:
        """End the threads once the reads that they have begun are done; those in the queue never begin."""
        with self._lock:
            self._is_closed = True
            self._queue.clear()
            self._queued.notify_all()
        for thread in self._threads:
            thread.join()

    def _push(self, loading: Loading, pieces: Sequence[Part]) -> None:
        for piece in pieces:
            heappush(self._queue, (loading.urgency, next(self._number), loading, piece))
        self._queued.notify(len(pieces))

    def _prepare(self, loading: Loading) -> None:
        prepare, loading.prepare = loading.prepare, None
        if prepare is not None:
            try:
                prepare()
            finally:
                with self._lock:
                    self._push(loading, loading.pieces[1:])

    def _work(self) -> None:
        while (taken := self._next()) is not None:
            loading, (memory, extent) = taken
            error: BaseException | None = None
            try:
                self._prepare(loading)
                memory.read(extent)
            except Exception as raised:  # handed to the thread that waits
                error = raised
            with self._lock:
                loading.left, loading.error = loading.left - 1, loading.error or error
                if loading.is_done:
                    self._done.notify_all()

    def _next(self) -> tuple[Loading, Part] | None:
        """Wait for a piece and take it out of the queue; None once the queue is closed."""
        with self._lock:
            self._queued.wait_for(lambda: self._queue or self._is_closed)
            if self._is_closed:
                return None
            _, _, loading, piece = heappop(self._queue)
            return loading, piece


def _pieces(part: Part) -> Iterable[Part]:
    begin, end = part.extent
    for place in range(begin, end, PIECE_BYTES):
        yield Part(part.memory, Extent(place, min(end, place + PIECE_BYTES)))
