"""Wall-clock time of a run by its parts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Clock:
    """Seconds of wall time by part. Each second counts once, for the innermost part that is active."""

    seconds: dict[str, float] = field(default_factory=dict)
    _inner: list[float] = field(default_factory=list)
    """For each active part, the seconds that its inner parts took."""

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Add the time inside `with` to a part, without the time of inner parts."""
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
        """Return each part's share of the measured time."""
        whole = sum(self.seconds.values())
        return {part: own / whole for part, own in self.seconds.items()}
