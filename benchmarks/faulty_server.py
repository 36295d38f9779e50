"""Runs the command line with faults injected in the engine's thread: python benchmarks/faulty_server.py EVERY serve MODEL …

Every so many calls of the model for decoding, one of three faults occurs, in turn: decoding raises an error, which ends all
running requests; reading the next prompt raises one; and the logits of one sequence are NaN, which ends that request alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torch import Tensor

from engine.batching.paged_runner import PagedRunner
from engine.batching.request_state import Piece, RequestState

INJECTED = "injected fault"


class FaultyRunner(PagedRunner):
    """A runner that fails every `every` calls of `decode`."""

    every = 0
    _calls = 0
    _reading_fails = False
    _faults = cycle(("decode", "read", "logits"))

    def decode(self, states: Sequence[RequestState]) -> Tensor:
        self._calls += 1
        fault = next(self._faults) if self._calls % self.every == 0 else ""
        self._reading_fails |= fault == "read"
        if fault == "decode":
            raise RuntimeError(INJECTED)
        logits_BV = super().decode(states)
        if fault == "logits":
            logits_BV[0] = float("nan")
        return logits_BV

    def read(self, pieces: Sequence[Piece]) -> Tensor:
        if self._reading_fails:
            self._reading_fails = False
            raise RuntimeError(INJECTED)
        return super().read(pieces)


def main() -> None:
    """Run the command line with the faulty runner."""
    import engine.batching.scheduler
    from cli import main as run

    FaultyRunner.every = int(sys.argv.pop(1))
    engine.batching.scheduler.PagedRunner = FaultyRunner  # type: ignore[attr-defined]
    run()


if __name__ == "__main__":
    main()
