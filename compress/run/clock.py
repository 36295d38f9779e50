"""Where the time of a run goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Clock:
    """Seconds of wall time by what they went into; each second counts once, for the innermost part that it is in."""

    seconds: dict[str, float] = field(default_factory=dict)
    _inner: list[float] = field(default_factory=list)
    """Of each part that is under way, what parts inside it have taken."""

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Add what the `with` takes, without what parts inside it take."""
        started = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            taken = time.perf_counter() - started
            self.seconds[part] = self.seconds.get(part, 0.0) + taken - self._inner.pop()
            if self._inner:
                self._inner[-1] += taken

    @property
    def shares(self) -> dict[str, float]:
        """Of all that was counted."""
        whole = sum(self.seconds.values())
        return {part: own / whole for part, own in self.seconds.items()}
