"""Progress bars: whoever calls gives one, and a library user who gives none gets none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

Progress = Callable[[Iterable[Any], str], Iterable[Any]]


def no_progress(iterable: Iterable[Any], description: str) -> Iterable[Any]:
    """For callers who want no progress bar."""
    return iterable


def note(bar: Iterable[Any], text: str) -> None:
    """Show a few words beside a progress bar, where it is one that can."""
    show = getattr(bar, "set_postfix_str", None)
    if show is not None:
        show(text, refresh=False)
