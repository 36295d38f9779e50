"""Pairs of texts as padded token ids, on which encoder-decoders are calibrated, trained and evaluated.

A source is
- a .jsonl or .json file with rows of any form of rows.py; the source is the prompt's contents, one below the other, and
  the target is the first response;
- `stdlib`: a task made from the Python standard library on this machine: restore case and punctuation of a line of
  code.

Each pair belongs to one split, which a hash of its source text decides. No pair is in two splits, and pairs with equal
source texts are in the same split. The order of the pairs depends on the source and the seed alone.

Shape suffixes: P pairs, S tokens of the longest source, M tokens of the longest target.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from calibrate.rows import has_rows, read_objects, read_row
from calibrate.text import load_documents
from engine.errors import DataError, OptionError

SPLITS = ("held-out", "validation", "calibration", "training")
"""The splits. Each of the first three gets a tenth of the pairs; training gets the rest."""
STDLIB = "stdlib"
PADDING = -1
"""Fill value behind the end of a sequence; no token has this id."""
DEFAULT_LENGTH = 512

STDLIB_BYTES = 8_000_000
"""Bytes of source code that are read, which give about 60,000 different lines."""
_LINE = re.compile(r"[ -~]{12,40}")

TextPair = tuple[str, str]
Each = TypeVar("Each", bound=Hashable)


@dataclass(frozen=True)
class Pairs:
    """Token ids of sources and targets, filled with PADDING behind the end of each."""

    source_PS: Tensor
    target_PM: Tensor
    cut: int = 0
    """Number of sequences that were truncated to the maximum length."""

    def __len__(self) -> int:
        return len(self.source_PS)

    def take(self, rows: Tensor | slice) -> Pairs:
        """Return some of the pairs, padded to the longest of them."""
        return Pairs(_trimmed(self.source_PS[rows]), _trimmed(self.target_PM[rows]))

    def split(self, size: int) -> Iterator[Pairs]:
        """Yield all pairs, `size` at a time."""
        return (self.take(slice(start, start + size)) for start in range(0, len(self), size))

    @property
    def tokens(self) -> int:
        """Number of tokens of sources and targets together, without padding."""
        return int((self.source_PS != PADDING).sum()) + int((self.target_PM != PADDING).sum())


def _trimmed(ids: Tensor) -> Tensor:
    lengths = (ids != PADDING).sum(1)
    return ids[:, : int(lengths.max())] if len(ids) else ids


def text_pairs(source: str, seed: int = 0) -> dict[str, list[TextPair]]:
    """Return the pairs of a source by split. Raises DataError for an unreadable source or a malformed line."""
    made = _stdlib_pairs() if source == STDLIB else _file_pairs(Path(os.path.expanduser(source)))
    return by_split(made, source, seed, lambda pair: pair[0])


def by_split(made: Iterable[Each], source: str, seed: int, question: Callable[[Each], str]) -> dict[str, list[Each]]:
    """Return what differs by split, in the order of the seed. Raises DataError where there is nothing.

    question: returns the text that decides the split.
    """
    distinct = list(dict.fromkeys(made))
    if not distinct:
        raise DataError(f"{source}: holds no pair; give a file with more of them")
    random.Random(seed).shuffle(distinct)
    splits: dict[str, list[Each]] = {name: [] for name in SPLITS}
    for each in distinct:
        splits[split_of(question(each))].append(each)
    return splits


def split_of(question: str) -> str:
    """Return the split of a pair by its source text. It is the same on every machine and in every run."""
    return SPLITS[min(_number(question) % 10, len(SPLITS) - 1)]


def half_of(question: str) -> str:
    """Return the half of a held-out pair, by its source text: selection or report."""
    return ("report", "selection")[_number(question) // 10 % 2]


def _number(question: str) -> int:
    return int.from_bytes(hashlib.sha256(question.encode()).digest()[:8], "big")


def tokenised(
    splits: dict[str, list[TextPair]], split: str, count: int, tokenizer: Any, length: int, end: int | None, name: str
) -> Pairs:
    """Tokenize up to `count` pairs of a split, each text to at most `length` tokens, including the end token.

    Raises DataError where the split is empty, and OptionError for an invalid count or length.
    """
    if count < 1 or length < 2:
        raise OptionError(
            f"{count} pairs of at most {length} tokens cannot be taken; ask for at least 1, of at least 2 tokens"
        )
    chosen = splits[split][:count]
    if not chosen:
        raise DataError(f"{name}: its {split} part has no pair; give more pairs (about a tenth of them is for each part)")
    cut = 0
    texts: tuple[list[list[int]], list[list[int]]] = ([], [])
    for pair in chosen:
        for side, text in zip(texts, pair, strict=True):
            ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            room = length - (end is not None)
            cut += len(ids) > room
            side.append(ids[:room] + ([] if end is None else [end]))
    return Pairs(_padded(texts[0]), _padded(texts[1]), cut)


def _padded(sequences: list[list[int]]) -> Tensor:
    longest = max(map(len, sequences))
    return torch.tensor([ids + [PADDING] * (longest - len(ids)) for ids in sequences], dtype=torch.long)


# Sources


def _file_pairs(path: Path) -> Iterator[TextPair]:
    if not has_rows(path):
        raise DataError(
            f"{path}: is no file of pairs; give a .jsonl or .json with `source` and `target` in each row, or {STDLIB!r}"
        )
    for found, where in read_objects(path):
        row = read_row(found, where)
        if row.missing:
            raise DataError(f"{where}: has no {row.missing}; give rows with both")
        yield row.contents, row.response


def _stdlib_pairs() -> Iterator[TextPair]:
    """Yield pairs from lines of 12 to 40 ASCII characters.

    The source is the line's letters and digits in lower case, as words.
    """
    for text in load_documents("stdlib", limit_bytes=STDLIB_BYTES):
        for line in map(str.strip, text.splitlines()):
            words = re.findall(r"[a-z0-9]+", line.lower())
            if _LINE.fullmatch(line) and len(words) > 1:
                yield " ".join(words), line
