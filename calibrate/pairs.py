"""Pairs of texts as padded token ids, on which encoder-decoders are calibrated, trained and evaluated.

A source is
- a .jsonl file with one pair per line, from `source` and `target`, or from `instruction`, `input` (left out where
  empty) and `output`;
- `stdlib`: a task made from the Python standard library on this machine: restore case and punctuation of a line of
  code.

Each pair belongs to one split, which a hash of its source text decides. No pair is in two splits, and pairs with equal
source texts are in the same split. The order of the pairs depends on the source and the seed alone.

Shape suffixes: P pairs, S tokens of the longest source, M tokens of the longest target.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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


Layout = Callable[[dict[str, Any], str], TextPair]
"""A function from a row of a .jsonl file and its place, for messages, to the source and target texts."""


def text_pairs(source: str, seed: int = 0, layout: Layout | None = None) -> dict[str, list[TextPair]]:
    """Return the pairs of a source by split. Raises DataError for an unreadable source or a malformed line."""
    made = _stdlib_pairs() if source == STDLIB else _file_pairs(Path(os.path.expanduser(source)), layout or _plain)
    distinct = list(dict.fromkeys(made))
    if not distinct:
        raise DataError(f"{source}: holds no pair; give a file with more of them")
    random.Random(seed).shuffle(distinct)
    splits: dict[str, list[TextPair]] = {name: [] for name in SPLITS}
    for pair in distinct:
        splits[split_of(pair)].append(pair)
    return splits


def split_of(pair: TextPair) -> str:
    """Return the split of a pair, which is the same on every machine and in every run."""
    tenth = int.from_bytes(hashlib.sha256(pair[0].encode()).digest()[:8], "big") % 10
    return SPLITS[min(tenth, len(SPLITS) - 1)]


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


def _file_pairs(path: Path, layout: Layout) -> Iterator[TextPair]:
    if path.suffix != ".jsonl" or not path.is_file():
        raise DataError(f"{path}: is no file of pairs; give a .jsonl with `source` and `target` on each line, or {STDLIB!r}")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}); check the path and its permissions") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not UTF-8; convert the file to UTF-8") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            yield layout(_row(line, where), where)


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not a line of JSON ({error}); each line must be one JSON object") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: a row must be a JSON object, and this is a {type(row).__name__}")
    return row


def _plain(row: dict[str, Any], where: str) -> TextPair:
    """Return source and target unchanged, for encoder-decoders."""
    if "source" in row and "target" in row:
        return _text(row, "source", where), _text(row, "target", where)
    if "instruction" in row and "output" in row:
        asked = [_text(row, "instruction", where)]
        if row.get("input"):
            asked.append(_text(row, "input", where))
        return "\n".join(asked), _text(row, "output", where)
    raise DataError(f"{where}: a pair needs `source` and `target`, or `instruction` and `output`")


def _text(row: dict[str, Any], key: str, where: str) -> str:
    value = row[key]
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where}: `{key}` must be a string with some text in it")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise DataError(f"{where}: `{key}` has half of a surrogate pair, which is not a character; write it as UTF-8")
    return value


def _stdlib_pairs() -> Iterator[TextPair]:
    """Yield pairs from lines of 12 to 40 ASCII characters.

    The source is the line's letters and digits in lower case, as words.
    """
    for text in load_documents("stdlib", limit_bytes=STDLIB_BYTES):
        for line in map(str.strip, text.splitlines()):
            words = re.findall(r"[a-z0-9]+", line.lower())
            if _LINE.fullmatch(line) and len(words) > 1:
                yield " ".join(words), line
