"""Forward passes over a checkpoint layer by layer: one layer's weights in memory, all sequences through it, then the next.

Hidden states between layers are kept in memory up to a limit and beyond it in a temporary file, so that neither the size
of the model nor that of the text decides whether a pass fits.

Shape suffixes: S sequences, B sequences of one batch, L positions, D hidden, V vocabulary.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from engine import heap
from engine.attention import Positions, Rotary
from engine.checkpoint import Checkpoint
from engine.model import DecoderLayer, Outer, embedded, positions_for

MEMORY_LIMIT_BYTES = 256 << 20
"""Hidden states above this size go to a temporary file."""
TOKENS_PER_BATCH = 4096

Visit = Callable[[int, DecoderLayer], Callable[[], None] | None]
"""Called with each layer before its forward; what it returns is called after it."""


class Activations:
    """Hidden states of S sequences, [S, L, D], read and replaced batch by batch."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        self._row_bytes = shape[1] * shape[2] * dtype.itemsize
        in_memory = shape[0] * self._row_bytes <= MEMORY_LIMIT_BYTES
        self._tensor = torch.empty(shape, dtype=dtype) if in_memory else None
        # A plain file and not a map: pages of a map count as resident, those of the page cache do not.
        self._file = None if in_memory else tempfile.TemporaryFile(prefix="moe-compress-")  # noqa: SIM115

    def __getitem__(self, rows: slice) -> Tensor:
        if self._tensor is not None:
            return self._tensor[rows]
        assert self._file is not None
        count = len(range(*rows.indices(self.shape[0])))
        data = torch.empty((count, *self.shape[1:]), dtype=self.dtype)
        self._file.seek(rows.start * self._row_bytes)
        self._file.readinto(_bytes(data))
        return data

    def __setitem__(self, rows: slice, values: Tensor) -> None:
        if self._tensor is not None:
            self._tensor[rows] = values
            return
        assert self._file is not None
        self._file.seek(rows.start * self._row_bytes)
        self._file.write(_bytes(values.cpu().contiguous()))

    def select(self, rows: Iterable[int]) -> Tensor:
        """Some sequences in any order, [rows, L, D]."""
        return torch.cat([self[slice(row, row + 1)] for row in rows])

    def close(self) -> None:
        """Let go of the memory or the file."""
        self._tensor = None
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _bytes(tensor: Tensor) -> memoryview:
    """A contiguous tensor's own memory."""
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array).cast("B")


def batches(sequences: int, length: int) -> Iterator[slice]:
    """Slices of about TOKENS_PER_BATCH tokens each."""
    size = max(1, TOKENS_PER_BATCH // length)
    for start in range(0, sequences, size):
        yield slice(start, min(start + size, sequences))


@torch.no_grad()
def stream_layers(
    checkpoint: Checkpoint,
    tokens_SL: Tensor,
    visit: Visit,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> Activations:
    """Run all sequences through all layers; return the last layer's output, before the final norm."""
    config, source = checkpoint.config, checkpoint.source(dtype, device)
    count, length = tokens_SL.shape
    states = Activations((count, length, config.hidden_size), dtype)
    embedding_VD = source("model.embed_tokens.weight")
    for rows in batches(count, length):
        states[rows] = embedded(config, tokens_SL[rows].to(device), embedding_VD)
    del embedding_VD
    positions = _positions(checkpoint, tokens_SL[:1].to(device), dtype)
    for index in progress(range(len(config.layers))):
        layer = DecoderLayer(config, index, checkpoint.weights(dtype, device))
        finish = visit(index, layer)
        for rows in batches(count, length):
            states[rows] = layer(states[rows].to(device), positions)
        if finish is not None:
            finish()
        del layer, finish  # before the next layer is read: what was to be done after this one may hold it too
        checkpoint.release()
        heap.give_back()
    return states


def _positions(checkpoint: Checkpoint, tokens_1L: Tensor, dtype: torch.dtype) -> Positions:
    return positions_for(checkpoint.config, Rotary(checkpoint.config), tokens_1L, None, 0, dtype)


@torch.no_grad()
def stream_negative_log_likelihood(
    checkpoint: Checkpoint,
    tokens_SL: Tensor,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    visit: Visit = lambda index, layer: None,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> tuple[float, int]:
    """Summed negative log-likelihood in nats of each sequence's tokens after its first, and their count.

    `visit` may change a layer before it runs, such as its routing.
    """
    total, count = 0.0, 0
    states = stream_layers(checkpoint, tokens_SL, visit, dtype=dtype, device=device, progress=progress)
    with states:
        outer = Outer(checkpoint.config, checkpoint.source(dtype, device))
        for row in range(tokens_SL.shape[0]):
            hidden_LD = outer.hidden_states(states[row : row + 1].to(device))[0, :-1]
            targets_L = tokens_SL[row, 1:].to(device)
            for part in torch.arange(targets_L.shape[0], device=device).split(512):
                logits = outer.logits(hidden_LD[part]).float()
                total += float(F.cross_entropy(logits, targets_L[part], reduction="sum"))
            count += targets_L.numel()
    checkpoint.release()
    return total, count
