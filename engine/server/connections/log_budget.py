"""A rate limit for log lines: the log of a process grows by a bounded amount per minute."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

LINES_A_MINUTE = 120
MOST_CHARACTERS = 8_000
"""Maximum length of one message with its traceback; the middle of a longer message is left out."""


class LogBudget(logging.Handler):
    """Writes messages to a stream until the minute's lines are used up, and then reports how many were left out."""

    def __init__(
        self, stream: TextIO, lines_a_minute: int = LINES_A_MINUTE, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        self._stream, self._most, self._clock = stream, lines_a_minute, clock
        self._minute, self._used, self._left_out = -1, 0, 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write one message, or count it as left out. Never raises, like all handlers of logging."""
        try:
            self._begin_minute()
            if self._used >= self._most:
                self._left_out += 1
                return
            text = self.format(record)
            if len(text) > MOST_CHARACTERS:
                text = f"{text[: MOST_CHARACTERS // 2]}\n…\n{text[-MOST_CHARACTERS // 2 :]}"
            self._used += text.count("\n") + 1
            self._write(text)
            if self._used >= self._most:
                self._write(f"The log has {self._most} lines of this minute; messages are left out until it is over.")
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        """Report the messages left out last, and close the handler."""
        if self._left_out:
            self._tell()
        super().close()

    def _begin_minute(self) -> None:
        minute = int(self._clock() // 60)
        if minute == self._minute:
            return
        if self._left_out:
            self._tell()
        self._minute, self._used = minute, 0

    def _tell(self) -> None:
        self._write(f"{self._left_out} messages were left out of the log, which takes {self._most} lines a minute.")
        self._left_out = 0

    def _write(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


@contextmanager
def limited_logging() -> Iterator[None]:
    """Make all loggers that propagate to the root write warnings and errors to stderr, within the limit, during the body."""
    root, handler = logging.getLogger(), LogBudget(sys.stderr)
    handler.setLevel(logging.WARNING)
    before = root.handlers[:]
    root.handlers[:] = [handler]
    try:
        yield
    finally:
        root.handlers[:] = before
        handler.close()
