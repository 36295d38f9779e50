"""Work with a limit on its processor time, in a copy of this process: code of libraries cannot be interrupted otherwise."""

from __future__ import annotations

import faulthandler
import os
import resource
import warnings
from collections.abc import Callable

STACK_BYTES = 2 << 20
"""Limit on the stack of the work, a quarter of what threads usually have: what ends within it does so in any thread."""


class OverLimitError(Exception):
    """The work took too much time or memory, or crashed."""


def limited(work: Callable[[], str], seconds: int) -> str:
    """Return the text that `work` returns, from a copy of this process. The copy ends with it, and nothing else is kept.

    seconds: limit on processor time, which other processes do not use up. The limits of this process on memory hold too.
    Raises OverLimitError if the copy was ended, or ended without a result. Linux and macOS only.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Python warns where other threads may hold locks. The copy runs none of their code, and ends without cleanup.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        _work(work, seconds, writer)
    os.close(writer)
    with open(reader, "rb") as found:
        text = found.read()
    _, status = os.waitpid(child, 0)
    if status:
        raise OverLimitError
    return text.decode()


def _work(work: Callable[[], str], seconds: int, writer: int) -> None:
    """Run in the copy, and end it in any case."""
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a library that fails writes there; the log belongs to the server
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        with open(writer, "wb") as answer:
            answer.write(work().encode())
        status = 0
    finally:
        os._exit(status)
