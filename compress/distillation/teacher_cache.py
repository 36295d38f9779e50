"""Cache of a teacher's predictions on disk, computed once for all training sequences.

The cache serves recipes whose teacher repeats itself (recipes.py). For each prediction it stores one of:

- exact: the hidden state after the last norm, in the dtype of the computation. The head stays in memory and computes the
  logits, which would take many times the space. The rounding of a hidden state depends on the sequences of its batch, so it
  is bit-identical to that without a cache where groups have one sequence.
- the K most probable tokens at the temperature of the run, and all other tokens as one outcome (divergences.py). The
  teacher is then released from memory, and the divergence is a lower bound of the full one.

Each file holds whole groups of sequences and is written completely or not at all, so an interrupted pass continues at the
first missing file. Several processes share the files, and each reads all of them.

Shape suffixes: T response tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, islice
from pathlib import Path

import torch
from torch import Tensor

from calibrate.instructions import Example
from compress.distillation.response_distillation import predictions
from compress.distillation.responses import ResponseBatch, batch_of
from compress.run.clock import Clock
from compress.training.divergences import LargestPredictions, Predictions, largest_predictions
from compress.training.layer_distillation import Taught
from compress.training.training import Batch
from engine.decoder.model import Decoder, HeadParts, head_of
from engine.errors import DataError, OutputError
from engine.files.safetensors_file import SafetensorsFile
from engine.files.safetensors_writer import write_tensors
from engine.passes import processes

SHARD_BYTES = 256_000_000
"""Bytes of one file, slightly exceeded where a group is larger; a file is in memory while it is written."""
WHAT = "the teacher's predictions"


class CachedTeacher:
    """A teacher whose predictions are read from disk."""

    def __init__(self, files: TokenFiles, head: HeadParts | None, device: torch.device, clock: Clock) -> None:
        """Create the teacher. head: given where the files hold hidden states."""
        self.files, self.head, self.device, self.clock = files, head, device, clock

    def teach(self, batch: Batch, side: ResponseBatch) -> Taught:
        """Return predictions at positions before response tokens."""
        with self.clock.of("teacher"):
            kept = {name: tensor.to(self.device) for name, tensor in self.files.read(batch.group_G.tolist()).items()}
        return Taught({}, LargestPredictions(**kept) if self.head is None else Predictions(kept["hidden_TD"], *self.head))


def cached_teacher(
    decoder: Decoder,
    examples: Sequence[Example],
    directory: Path,
    clock: Clock,
    *,
    group_size: int,
    count: int | None = None,
    temperature: float = 1.0,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> CachedTeacher:
    """Write the missing files and return the cached teacher, which needs at most the decoder's head.

    group_size: sequences per forward pass. count: number of tokens to store of each prediction, fewer than the vocabulary;
    None for exact. Raises OutputError for a full disk, and DataError for a file of another training.
    """
    head_VD = decoder.head_VD
    token_bytes = head_VD.shape[1] * head_VD.itemsize if count is None else 8 * count + 4
    files = TokenFiles(directory, [len(example.response) for example in examples], group_size, token_bytes)

    def kept_of(rows: Iterator[int]) -> Iterator[dict[str, Tensor]]:
        while group := list(islice(rows, group_size)):
            yield _kept(predictions(decoder, batch_of([examples[row] for row in group])), count, temperature)

    with clock.of("teacher"), torch.no_grad():
        files.fill(kept_of, progress)
    head = head_of(decoder) if count is None else None
    return CachedTeacher(files, head, head_VD.device, clock)


def _kept(made: Predictions, count: int | None, temperature: float) -> dict[str, Tensor]:
    """Return the stored tensors by name, with one row per prediction."""
    if count is None:
        return {"hidden_TD": made.hidden_TD}
    largest = largest_predictions(made, count, temperature)
    return {"tokens_TK": largest.tokens_TK.int(), "logs_TC": largest.logs_TC.float()}


class TokenFiles:
    """Tensors with a row for each token of each sequence, in files of whole groups of sequences."""

    def __init__(self, directory: Path, tokens: Sequence[int], group_size: int, token_bytes: int) -> None:
        """Create the object.

        tokens: number of each sequence's tokens; token_bytes: bytes of one token in all tensors together.
        """
        self.directory, self.token_bytes = directory, token_bytes
        self.parts = _parts(tokens, group_size, token_bytes)
        """The sequences of each file."""
        ends = list(accumulate(tokens, initial=0))
        self._starts = [ends[part.start] for part in self.parts] + ends[-1:]
        self._places = [
            (number, slice(ends[row] - start, ends[row + 1] - start))
            for number, (part, start) in enumerate(zip(self.parts, self._starts, strict=False))
            for row in part
        ]
        self._files: list[SafetensorsFile] = []

    def fill(
        self,
        made: Callable[[Iterator[int]], Iterator[dict[str, Tensor]]],
        progress: Callable[[Iterable[int]], Iterable[int]] = iter,
    ) -> None:
        """Write the missing files, and open all files.

        made: yields, for given sequences, tensors by name in pieces. Raises OutputError for a full disk, and DataError for
        a file with other rows.
        """
        missing = [number for number in range(len(self.parts)) if not self._path(number).exists()]
        self._check_space(missing)
        own = [number for number in missing if number % processes.count() == processes.rank()]
        rows = iter(progress([row for number in own for row in self.parts[number]]))
        for number in own:
            self._write(number, made(islice(rows, len(self.parts[number]))))
        processes.added_up([0.0])  # waits until every process has written
        self._files = [self._open(number) for number in range(len(self.parts))]

    def read(self, sequences: Sequence[int]) -> dict[str, Tensor]:
        """Return all rows of some sequences, concatenated, as copies, so that the files' pages do not stay in memory."""
        places = [self._places[sequence] for sequence in sequences]
        tensors = {
            name: torch.cat([self._files[number].tensor(name)[rows] for number, rows in places])
            for name in self._files[0].entries
        }
        for number in {number for number, _ in places}:
            self._files[number].release()
        return tensors

    def _check_space(self, missing: Sequence[int]) -> None:
        needed, free = sum(map(self._rows, missing)) * self.token_bytes, shutil.disk_usage(self.directory).free
        if needed > free:
            raise OutputError(
                f"{self.directory}: {WHAT} take {needed / 1e9:,.1f} GB and {free / 1e9:,.1f} GB are free; make space, keep "
                "fewer tokens of each with --teacher-cache K, or leave it out"
            )

    def _path(self, number: int) -> Path:
        return self.directory / f"teacher-{number:05d}.safetensors"

    def _rows(self, number: int) -> int:
        return self._starts[number + 1] - self._starts[number]

    def _write(self, number: int, pieces: Iterator[dict[str, Tensor]]) -> None:
        whole: dict[str, Tensor] = {}
        done = 0
        for piece in pieces:
            rows = len(next(iter(piece.values())))
            for name, tensor in piece.items():
                if name not in whole:
                    whole[name] = torch.empty(self._rows(number), *tensor.shape[1:], dtype=tensor.dtype)
                whole[name][done : done + rows] = tensor
            done += rows
        write_tensors(self._path(number), whole, {}, WHAT)

    def _open(self, number: int) -> SafetensorsFile:
        file = SafetensorsFile(self._path(number))
        if any(entry.shape[:1] != (self._rows(number),) for entry in file.entries.values()):
            raise DataError(f"{file.path}: is not {WHAT} of this training; leave out --resume")
        return file


def _parts(tokens: Sequence[int], group_size: int, token_bytes: int) -> list[range]:
    """Divide the sequences into files: whole groups, as many as SHARD_BYTES hold and at least one."""
    parts, begin, filled = [], 0, 0
    for start in range(0, len(tokens), group_size):
        nbytes = sum(tokens[start : start + group_size]) * token_bytes
        if filled and filled + nbytes > SHARD_BYTES:
            parts.append(range(begin, start))
            begin, filled = start, 0
        filled += nbytes
    return [*parts, range(begin, len(tokens))]
