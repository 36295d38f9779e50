"""Signal handling: the first signal ends the process in order, and a second one ends it in any case.

The first SIGTERM requests the end. The second one, or SIGINT, gives the process a few seconds to end by itself; then a
thread ends it, whatever the event loop and all other threads do.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

GRACE_SECONDS = 3.0
FLUSH_SECONDS = 1.0
INTERRUPTED = 130
"""Exit status of a process that a signal has ended at once."""


class Signals:
    """Counts SIGTERM and SIGINT in the main thread, even while an event loop is busy."""

    def __init__(self, tell: Callable[[], None], grace: float = GRACE_SECONDS) -> None:
        """`tell` is called in the signal handler after each signal; it must not raise and must not wait."""
        self._tell, self._grace = tell, grace
        self.count = 0
        self.at_once = False
        """Whether the process ends at once, after a second signal or SIGINT."""

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle signals during the body, and restore the previous handlers; a deadline that has begun stays in force."""
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if not self.at_once and (number == signal.SIGINT or self.count > 1):
            self.at_once = True
            threading.Thread(target=self._end_soon, name="last seconds", daemon=True).start()
        self._tell()

    def _end_soon(self) -> None:
        time.sleep(self._grace)
        flushing = threading.Thread(target=_flush, daemon=True)  # a thread, because writing to a full pipe would block
        flushing.start()
        flushing.join(FLUSH_SECONDS)
        os._exit(INTERRUPTED)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
