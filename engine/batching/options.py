"""Options of answering many requests at once. Without torch."""

from __future__ import annotations

from dataclasses import dataclass

from engine.options import check, option

LOAD = "Load"


@dataclass(frozen=True, kw_only=True)
class QueueOptions:
    """How many requests are answered and wait."""

    max_queue: int = option(256, group=LOAD, minimum=1, help="Requests that may wait; further ones get 429.")
    max_batch_size: int = option(16, group=LOAD, minimum=1, help="Requests answered at the same time.")

    def __post_init__(self) -> None:
        check(self)
