"""Two ways of cutting documents into windows of equal length, on which perplexity is measured (WINDOWS).

A perplexity is as certain as its documents are many: tokens of one document resemble each other. Windows are therefore
spread over the documents, one from each document before a second one from any of them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from typing import NamedTuple


class Window(NamedTuple):
    """One window: its token ids, and the number of its document."""

    ids: list[int]
    document: int


Document = tuple[int, list[int]]
"""A document's number and token ids."""


class EndToEnd:
    """Cuts pieces of documents into windows, end to end, without a gap."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.ids: list[int] = []
        """Token ids since the last whole window."""
        self.documents: list[int] = []
        """Number of the document of each id."""

    def add(self, document: int, ids: list[int]) -> list[Window]:
        """Append a piece, and return the windows that are now whole."""
        self.ids += ids
        self.documents += [document] * len(ids)
        whole = len(self.ids) - len(self.ids) % self.length
        starts = range(0, whole, self.length)
        made = [Window(self.ids[at : at + self.length], _main(self.documents[at : at + self.length])) for at in starts]
        del self.ids[:whole], self.documents[:whole]
        return made


def _main(documents: list[int]) -> int:
    """Return the document of most of the tokens."""
    return Counter(documents).most_common(1)[0][0]


def packed(documents: Iterable[Document], samples: int, length: int, seed: int) -> Iterator[Window]:
    """Yield the documents end to end, so that few documents fill all windows, as calibration reads its text."""
    pack = EndToEnd(length)
    for number, ids in documents:
        yield from pack.add(number, ids)


def spread(documents: Iterable[Document], samples: int, length: int, seed: int) -> Iterator[Window]:
    """Yield a window from each document, then a second one from each that has more, and so on.

    Windows of one document do not overlap; the seed chooses their places and order. Documents that are shorter than a
    window are packed end to end, and such a window counts as a document. Tokens that lie between these windows are used
    last, so that no text is lost. Documents are read until there are as many as `samples`.
    """
    generator = random.Random(seed)
    sources: list[list[Window]] = []
    shorts, rest = EndToEnd(length), EndToEnd(length)
    between: list[Document] = []
    for number, ids in documents:
        if len(ids) < length:
            sources += ([window] for window in shorts.add(number, ids))
        else:
            first = generator.randrange(len(ids) % length + 1)
            starts = list(range(first, len(ids) - length + 1, length))
            between += [(number, ids[:first]), (number, ids[starts[-1] + length :])]
            generator.shuffle(starts)
            sources.append([Window(ids[start : start + length], number) for start in starts])
        if len(sources) >= samples:
            break
    for windows in zip_longest(*sources):
        yield from (window for window in windows if window is not None)
    for number, ids in [*zip(shorts.documents, ([each] for each in shorts.ids), strict=True), *between]:
        yield from rest.add(number, ids)


SPREAD = "spread"
WINDOWS: dict[str, Callable[[Iterable[Document], int, int, int], Iterator[Window]]] = {SPREAD: spread, "packed": packed}
