"""Progress bars: the caller provides one; a library user who provides none gets no bar."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

Progress = Callable[[Iterable[Any], str], Iterable[Any]]


def no_progress(iterable: Iterable[Any], description: str) -> Iterable[Any]:
    """Return `iterable` unchanged: the progress bar of callers who want none."""
    return iterable


def announced(iterable: Iterable[Any], description: str, progress: Progress) -> Iterable[Any]:
    """Return the iterable with a progress bar; where none is shown, first write the description as one line on stderr.

    This is for work that nobody asked for and that takes long, which would otherwise look like a hang.
    """
    bar = progress(iterable, description)
    if bar is iterable or getattr(bar, "disable", False):  # tqdm's bar is disabled where stderr is no terminal
        print(description, file=sys.stderr, flush=True)
    return bar


def note(bar: Iterable[Any], text: str) -> None:
    """Show a short text beside a progress bar, if the bar supports this."""
    show = getattr(bar, "set_postfix_str", None)
    if show is not None:
        show(text, refresh=False)
