"""A model written as a GGUF file, one expert after the other: no stack of experts is ever in memory.

The package `gguf` quantizes, except for K types (gguf_rounding.py). Names, shapes and metadata are those by which such files
are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.gguf import joined, paired, separated
from engine.checkpoint.gguf_rounding import K_TYPES, rounded_to_k
from engine.errors import UnsupportedError
from engine.families.gguf_description import Description
from engine.families.gguf_names import StoredTensor
from engine.files.gguf_file_writer import TYPE_NUMBERS, GgufFileWriter, metadata_entry
from engine.files.gguf_header import ALIGNMENT_KEY
from engine.files.gguf_types import BlockType
from engine.kernels.linear import plain

_VERSION_KEY, _QUANTIZATION_VERSION = "general.quantization_version", 2
_BY_PACKAGE = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4")
"""Quantized types that the package `gguf` writes."""


def write_gguf(
    path: Path,
    checkpoint: Checkpoint,
    description: Description,
    types: Mapping[str, BlockType],
    metadata: Mapping[str, Any],
    progress: Callable[[Iterable[StoredTensor]], Iterable[StoredTensor]] = iter,
) -> None:
    """Write a file. `metadata` is beside that of the description. Raises UnsupportedError for numbers that do not fit."""
    assert ALIGNMENT_KEY not in metadata
    said = dict(description.metadata) | dict(metadata) | {_VERSION_KEY: _QUANTIZATION_VERSION}
    layout = {tensor.name: (types[tensor.name], tensor.shape) for tensor in description.tensors}
    with GgufFileWriter(path, (metadata_entry(*each) for each in said.items()), layout) as file:
        for tensor in progress(description.tensors):
            kind = types[tensor.name]
            file.write(tensor.name, (encoded(piece, kind, tensor.name) for piece in pieces(checkpoint, tensor)))
            checkpoint.release()


def pieces(checkpoint: Checkpoint, tensor: StoredTensor) -> Iterator[Tensor]:
    """Yield the parts of a tensor of a file in their order there: one expert of a stack after the other."""
    place, latent = tensor.place, checkpoint.config.latent
    for source in tensor.sources:
        whole = checkpoint.tensor(source, torch.float32)
        if place.heads is not None:
            whole = paired(whole, place.heads)
        if place.keys is not None:
            assert latent is not None
            keys, values = separated(whole, checkpoint.config.attention_heads, latent.plain_dimension)
            whole = keys if tensor.has_keys else values
        yield whole.contiguous()


def is_written(kind: BlockType) -> bool:
    """Return whether `encoded` writes a type."""
    return kind.element is not None or kind.name in (*_BY_PACKAGE, *K_TYPES)


def encoded(numbers: Tensor, kind: BlockType, name: str) -> np.ndarray:
    """Return a tensor in a type's bytes, by rows. Raises UnsupportedError for numbers that are too large for the type."""
    if kind.element is not None:
        converted = numbers.to(kind.element.torch)
        if not bool(converted.isfinite().all()):
            raise UnsupportedError(f"{name} has numbers that are too large for {kind.name}; write it as bf16 or f32")
        return converted.view(torch.uint8).numpy()
    if kind.name in K_TYPES:
        try:
            return rounded_to_k(numbers.reshape(-1, numbers.shape[-1]), kind).numpy()
        except UnsupportedError as error:
            raise UnsupportedError(f"{name} {error}") from error
    import gguf

    number = gguf.GGMLQuantizationType(TYPE_NUMBERS[kind.name])
    with np.errstate(over="ignore", invalid="ignore"):  # such numbers are refused
        found = gguf.quants.quantize(numbers.float().numpy(), number)
        is_finite = bool(np.isfinite(gguf.quants.dequantize(found, number)).all())
    if not is_finite:
        raise UnsupportedError(f"{name} has numbers that are too large for {kind.name}; write it as bf16 or f32")
    return np.asarray(found)


def rounded(numbers: Tensor, kind: BlockType) -> Tensor:
    """Return the float32 numbers that a type keeps of a tensor, as the package `gguf` reads them."""
    if kind.element is not None:
        return numbers.to(kind.element.torch).float()
    import gguf

    number = gguf.GGMLQuantizationType(TYPE_NUMBERS[kind.name])
    return torch.from_numpy(gguf.quants.dequantize(encoded(numbers, kind, ""), number)).view(numbers.shape)


class GgufRoundedCheckpoint(Checkpoint):
    """A checkpoint with the numbers that a GGUF file of it keeps, as weights in float32."""

    def __init__(self, directory: Path, description: Description, types: Mapping[str, BlockType]) -> None:
        super().__init__(directory)
        self._rounding: dict[str, list[BlockType]] = {}
        for tensor in description.tensors:
            for source in tensor.sources:
                self._rounding.setdefault(source, []).append(types[tensor.name])

    def stored(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return the weight after rounding."""
        whole, kinds = plain(super().stored(name, torch.float32), torch.float32), self._rounding[name]
        if len(kinds) == 1:
            return rounded(whole.contiguous(), kinds[0])
        assert self.config.latent is not None
        parts = separated(whole.float(), self.config.attention_heads, self.config.latent.plain_dimension)
        return joined(*(rounded(part.contiguous(), kind) for part, kind in zip(parts, kinds, strict=True)))
