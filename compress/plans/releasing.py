"""The source's mapped pages, released while a result is written from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from engine.checkpoint.checkpoint import Checkpoint

RELEASE_EVERY_BYTES = 64 << 20


class Releasing:
    """Releases the source's mapped pages at intervals, counted over all tensors of a result."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint, self._read = checkpoint, 0

    def after(self, pieces: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the pieces unchanged, and release pages between them."""
        for piece in pieces:
            yield piece
            self._read += piece.nbytes
            if self._read >= RELEASE_EVERY_BYTES:
                del piece
                self._checkpoint.release()
                self._read = 0
