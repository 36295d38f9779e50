"""An interruption of a pass at a chosen call, in the place of a signal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Interruption(KeyboardInterrupt):
    """Raised by the tests themselves."""


def interrupting(function: Callable[..., Any], at: int) -> Callable[..., Any]:
    """Return the function, which raises an interruption at its call number `at`."""
    calls = iter(range(at))

    def called(*arguments: Any, **options: Any) -> Any:
        if next(calls, None) is None:
            raise Interruption
        return function(*arguments, **options)

    return called
