"""Drawing takes longer than everything else that a command does with a tiny model, so only tests of pictures draw them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from compress.report import canvas

_is_available = canvas.available


def hide() -> None:
    """Let commands find no matplotlib. They then make everything but pictures."""
    canvas.available = lambda: False


@contextmanager
def drawing() -> Iterator[None]:
    """Draw pictures in the body, if matplotlib is installed. For fixtures; tests ask for the fixture `pictures`."""
    hidden, canvas.available = canvas.available, _is_available
    yield
    canvas.available = hidden
