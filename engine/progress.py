"""Progress bars: the caller provides one; a library user who provides none gets no bar."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

Progress = Callable[[Iterable[Any], str], Iterable[Any]]


def no_progress(iterable: Iterable[Any], description: str) -> Iterable[Any]:
    """Return `iterable` unchanged: the progress bar of callers who want none."""
    return iterable


def note(bar: Iterable[Any], text: str) -> None:
    """Show a short text beside a progress bar, if the bar supports this."""
    show = getattr(bar, "set_postfix_str", None)
    if show is not None:
        show(text, refresh=False)
