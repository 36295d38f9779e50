"""Raw text as token batches, which calibration, training and evaluation read.

A source is
- a text file, split at line ends into documents of about 32 kB (less for a small file, so that each split gets some);
- a folder: every text file in it, recursively, each split in the same way, and every .jsonl file;
- a .jsonl file with one document per line, or a .json file with a list of them, from `text` or any other form of
  rows.py; other .json files are plain text;
- `stdlib`: the source of the Python standard library on this machine, one document per file;
- a dataset id on the hub, `owner/name` or `owner/name:configuration`, streamed.

The order of the documents depends only on the source and the seed. Each document belongs to one split, which a hash of
its text decides, so that perplexity is measured on text that calibration never read.
"""

import hashlib
import os
import random
import re
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from tqdm import tqdm

from calibrate.rows import parse_line, row_text, text_rows
from engine.errors import DataError, OptionError

Split = Literal["calibration", "training", "validation", "held-out", "selection", "report", "all"]
"""Names of splits. Training and validation are the two parts of calibration, so that the best state of a training is
chosen on documents that the training did not read. Selection and report are the halves of held-out, so that a method that
was chosen on one half is reported on the other.
"""

DOCUMENT_BYTES = 32 * 1024
SMALLEST_DOCUMENT_BYTES = 256
DOCUMENTS_PER_FILE = 64  # at least about this many documents in a single text file, as far as its lines allow
HELD_OUT_ONE_IN = 10
VALIDATION_ONE_IN = 10  # of the documents that are not held out

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(:[\w.-]+)?")
HUB_CONFIGURATIONS = {"allenai/c4": "en"}  # configurations of datasets that have no default
HUB_SHUFFLE_BUFFER = 1000


class Tokenizer(Protocol):
    """The part of the interface of a transformers tokenizer that is used here."""

    @property
    def eos_token_id(self) -> Any: ...

    def __call__(self, text: str, *, add_special_tokens: bool, verbose: bool) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class _Piece:
    """Location of one document: a range of bytes in a file, read on demand."""

    path: Path
    offset: int
    size: int
    line: int  # number of the first line, from 1
    is_row: bool  # whether the piece is one line of a .jsonl file


@dataclass(frozen=True, slots=True)
class _Parsed:
    """One row of a .json file, which is read as a whole."""

    row: object
    where: str


_Document = _Piece | _Parsed


def load_documents(source: str, seed: int = 0, limit_bytes: int | None = None, split: Split = "all") -> Iterator[str]:
    """Yield the documents of a source in the order of the seed, until `limit_bytes` bytes of UTF-8 have been yielded.

    An unreadable path raises an error at once. A malformed line, an empty split or an unreachable hub raises one during
    iteration.
    """
    return _of_split(_documents(source, seed), source, split, limit_bytes)


def token_batches(
    source: str,
    tokenizer: Tokenizer,
    *,
    samples: int,
    sequence_length: int,
    seed: int,
    split: Split = "calibration",
) -> torch.Tensor:
    """Return token ids [samples, sequence_length]: documents packed end to end, each followed by the end token, if any.

    Only as much of the source is read and tokenized as the batch needs.
    """
    ids = _packed(source, tokenizer, samples, sequence_length, seed, split)
    if len(ids) < samples * sequence_length:
        raise DataError(
            f"{source}: too short: {named(split)} has {len(ids)} tokens, and {samples} sequences of {sequence_length} "
            f"need {samples * sequence_length}; give more text, or ask for fewer samples or a shorter sequence length"
        )
    return torch.tensor(ids, dtype=torch.long).view(samples, sequence_length)


def up_to(
    source: str, tokenizer: Tokenizer, *, samples: int, sequence_length: int, seed: int, split: Split = "calibration"
) -> torch.Tensor:
    """Return what `token_batches` returns, with fewer sequences (or none) where the source ends early."""
    ids = _packed(source, tokenizer, samples, sequence_length, seed, split)
    whole = len(ids) // sequence_length
    return torch.tensor(ids[: whole * sequence_length], dtype=torch.long).view(whole, sequence_length)


def _packed(source: str, tokenizer: Tokenizer, samples: int, length: int, seed: int, split: Split) -> list[int]:
    """Return as many tokens as the sequences need, or all tokens of the source."""
    if samples < 1 or length < 1:
        raise OptionError(f"{samples} samples of {length} tokens cannot be taken: both must be at least 1")
    needed = samples * length
    ids: list[int] = []
    with tqdm(total=needed, unit=" tokens", desc="reading text", delay=2, leave=False, disable=None) as progress:
        for own in tokenized_documents(source, tokenizer, seed, split):
            before = len(ids)
            ids.extend(own)
            progress.update(min(len(ids), needed) - before)
            if len(ids) >= needed:
                break
    return ids[:needed]


def tokenized_documents(source: str, tokenizer: Tokenizer, seed: int, split: Split) -> Iterator[list[int]]:
    """Yield the token ids of each document of a split, in the order of the seed, followed by the end token, if any."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for text in load_documents(source, seed, split=split):
        yield [*tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], *end]


def split_of(document: str) -> Split:
    """Return the split of a document, calibration or held-out. It is the same on every machine and in every run."""
    return "held-out" if _number(document) % HELD_OUT_ONE_IN == 0 else "calibration"


def belongs(document: str, split: Split) -> bool:
    """Whether a document belongs to a split."""
    if split in ("selection", "report"):
        is_reported = _number(document) // HELD_OUT_ONE_IN % 2 == 0
        return split_of(document) == "held-out" and is_reported == (split == "report")
    if split not in ("training", "validation"):
        return split in ("all", split_of(document))
    validates = _number(document) // HELD_OUT_ONE_IN % VALIDATION_ONE_IN == 0
    return split_of(document) == "calibration" and validates == (split == "validation")


def _number(document: str) -> int:
    return int.from_bytes(hashlib.sha256(document.encode()).digest()[:8], "big")


def _of_split(texts: Iterator[str], source: str, split: Split, limit_bytes: int | None) -> Iterator[str]:
    given_bytes = 0
    found = False
    for text in texts:
        if not text.strip() or not belongs(text, split):
            continue
        if limit_bytes is not None and given_bytes >= limit_bytes:
            return
        found = True
        given_bytes += len(text.encode())
        yield text
    if not found:
        raise DataError(f"{source}: {named(split)} has no text; give a source with more of it")


def named(split: Split) -> str:
    """Return a split in words, for messages about a source."""
    return "the source" if split == "all" else f"its {split} part"


# Sources


def _documents(source: str, seed: int) -> Iterator[str]:
    if not source:
        raise DataError("no source of text was named; give a text file, a folder, a .jsonl, `stdlib`, or a dataset id")
    path = Path(os.path.expanduser(source))
    if source == "stdlib":
        return _stdlib_texts(seed)
    if os.path.exists(path):
        pieces = _pieces(path)
        random.Random(seed).shuffle(pieces)
        return map(_read, pieces)
    if HUB_ID.fullmatch(source) and path.suffix not in {".txt", ".jsonl"}:
        return _hub_texts(source, seed)
    raise DataError(
        f"{source}: there is no such file or folder; give a text file, a folder, a .jsonl, `stdlib`, or a dataset id "
        "(owner/name)"
    )


def _stdlib_texts(seed: int) -> Iterator[str]:
    """Yield the sources of the standard library. Files that are not UTF-8 test Python's own decoding and are skipped."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in _files(root, skip={"site-packages", "dist-packages"}) if path.suffix == ".py"]
    if not paths:
        raise DataError(f"stdlib: {root} has no Python source; give --data a file or folder of text")
    random.Random(seed).shuffle(paths)
    for path in paths:
        try:
            yield _bytes(path).decode("utf-8")
        except UnicodeDecodeError:
            continue


def _files(root: Path, skip: set[str]) -> list[Path]:
    """Return every file under a folder in a fixed order, without hidden files and caches."""
    found = []
    for folder, subfolders, names in os.walk(root, onerror=_raise_unreadable):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in skip | {"__pycache__"}]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _pieces(path: Path) -> list[_Document]:
    if path.is_dir():
        texts = [file for file in _files(path, skip=set()) if not _is_binary(file)]
        return [piece for file in texts for piece in _file_pieces(file, DOCUMENT_BYTES, is_named=False)]
    if not path.is_file():
        raise DataError(f"{path}: neither a regular file nor a folder; save the text to a file first")
    even_share = path.stat().st_size // DOCUMENTS_PER_FILE
    return _file_pieces(path, min(DOCUMENT_BYTES, max(SMALLEST_DOCUMENT_BYTES, even_share)), is_named=True)


def _file_pieces(path: Path, document_bytes: int, is_named: bool) -> list[_Document]:
    """Split a file at line ends. A .jsonl file is split at every line end; a line longer than a document stays whole."""
    if path.suffix == ".json" and (rows := text_rows(path, is_named)) is not None:
        return [_Parsed(row, where) for row, where in rows]
    is_rows = path.suffix == ".jsonl"
    pieces: list[_Document] = []
    offset = size = 0
    first_line = 1
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                size += len(line)
                if is_rows or size >= document_bytes:
                    pieces.append(_Piece(path, offset, size, first_line, is_rows))
                    offset, size, first_line = offset + size, 0, number + 1
    except OSError as error:
        raise _unreadable(path, error) from error
    if size:
        pieces.append(_Piece(path, offset, size, first_line, is_rows))
    return pieces


def _read(piece: _Document) -> str:
    if isinstance(piece, _Parsed):
        return row_text(piece.row, piece.where)
    data = _bytes(piece.path, piece.offset, piece.size)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = piece.line + data.count(b"\n", 0, error.start)
        raise DataError(
            f"{piece.path}, line {line}: byte 0x{data[error.start]:02x} is not UTF-8; convert the file to UTF-8"
        ) from error
    if piece.offset == 0:
        text = text.removeprefix("\ufeff")
    if not piece.is_row or not text.strip():
        return text
    where = f"{piece.path}, line {piece.line}"
    return row_text(parse_line(text, where), where)


# Files. An error of the operating system becomes a DataError that names the file.


def _bytes(path: Path, offset: int = 0, size: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(size)
    except OSError as error:
        raise _unreadable(path, error) from error


def _is_binary(path: Path) -> bool:
    """Whether a file in a folder is skipped: it is not a regular file, or it has a zero byte near its start."""
    return not path.is_file() or b"\0" in _bytes(path, size=8192)


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path}: cannot be read ({error.strerror or error}); check the path and its permissions")


def _raise_unreadable(error: OSError) -> None:
    raise _unreadable(Path(error.filename), error) from error


# The hub


def _hub_texts(source: str, seed: int) -> Iterator[str]:
    """Yield the texts of the `train` split, streamed.

    Every error of `datasets` or of the network becomes one class of error.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError(
            f"{source}: not a path on this machine, and a dataset of the hub needs the package `datasets`: "
            "pip install 'moe-compress[hub-data]', or give --data a file, a folder or `stdlib`"
        ) from error
    name, _, configuration = source.partition(":")
    try:
        rows = load_dataset(name, configuration or HUB_CONFIGURATIONS.get(name), split="train", streaming=True)
        for number, row in enumerate(rows.shuffle(seed=seed, buffer_size=HUB_SHUFFLE_BUFFER), start=1):
            yield row_text(row, f"{source}, row {number}")
    except DataError:
        raise
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise DataError(
            f"{source}: not a path on this machine, and cannot be read from the hub ({reason}); check the id and the "
            "network, or give --data a file, a folder or `stdlib`"
        ) from error
