"""The source's mapped pages, released while a result is written from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from engine.checkpoint.checkpoint import Checkpoint
from engine.files.mapped_file import Releasing


class ReleasingSource:
    """Releases the source's mapped pages at intervals, counted over all tensors of a result."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._pages = Releasing(checkpoint.release)

    def after(self, pieces: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the pieces unchanged, and release pages between them."""
        for piece in pieces:
            yield piece
            size = piece.nbytes
            del piece
            self._pages.read(size)
