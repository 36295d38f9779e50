"""A model written as a GGUF file, one expert after the other: no stack of experts is ever in memory.

The package `gguf` quantizes, except for K types (rounding.py). Names, shapes and metadata are those by which such files
are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.gguf.model import joined, paired, separated
from engine.checkpoint.gguf.rounding import K_TYPES, rounded_to_k
from engine.errors import CheckpointError, CompressError, UnsupportedError
from engine.families.gguf.description import Description
from engine.families.gguf.forms import Form
from engine.families.gguf.names import StoredTensor
from engine.files.gguf_file_writer import TYPE_NUMBERS, GgufFileWriter, metadata_entry
from engine.files.gguf_header import ALIGNMENT_KEY
from engine.files.gguf_types import BlockType
from engine.kernels.linear import plain

_VERSION_KEY, _QUANTIZATION_VERSION = "general.quantization_version", 2
_BY_PACKAGE = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4")
"""Quantized types that the package `gguf` writes."""
NO_WEIGHTS: Mapping[str, Tensor] = MappingProxyType({})
"""All columns count equally."""


def write_gguf(
    path: Path,
    checkpoint: Checkpoint,
    description: Description,
    types: Mapping[str, BlockType],
    metadata: Mapping[str, Any],
    progress: Callable[[Iterable[StoredTensor]], Iterable[StoredTensor]] = iter,
    weights: Mapping[str, Tensor] = NO_WEIGHTS,
) -> None:
    """Write a file. `metadata` is beside that of the description. Raises the errors of `encoded`.

    weights: how much the squared error of each column counts, [inputs], by the family's name of a matrix.
    """
    assert ALIGNMENT_KEY not in metadata
    said = dict(description.metadata) | dict(metadata) | {_VERSION_KEY: _QUANTIZATION_VERSION}
    layout = {tensor.name: (types[tensor.name], tensor.shape) for tensor in description.tensors}
    with GgufFileWriter(path, (metadata_entry(*each) for each in said.items()), layout) as file:
        for tensor in progress(description.tensors):
            kind = types[tensor.name]
            own = zip(pieces(checkpoint, tensor), column_weights(tensor, weights) or [None], strict=True)
            file.write(tensor.name, (encoded(piece, kind, tensor.name, w_I) for piece, w_I in own))
            checkpoint.release()


def pieces(checkpoint: Checkpoint, tensor: StoredTensor) -> Iterator[Tensor]:
    """Yield the parts of a tensor of a file in their order there: one expert of a stack after the other."""
    place, latent = tensor.place, checkpoint.config.latent
    if tensor.numbers is not None:
        yield torch.tensor(tensor.numbers, dtype=torch.float32)
    for source in tensor.sources:
        whole = checkpoint.tensor(source, torch.float32)
        if place.form is not None:
            whole = place.form.stored(whole)[tensor.part]
        if place.heads is not None:
            whole = paired(whole, place.heads)
        if place.keys is not None:
            assert latent is not None
            keys, values = separated(whole, checkpoint.config.attention_heads, latent.plain_dimension)
            whole = keys if tensor.has_keys else values
        yield whole.contiguous()


def column_weights(tensor: StoredTensor, weights: Mapping[str, Tensor]) -> list[Tensor | None]:
    """Return the weights of the columns of each of a tensor's pieces.

    The keys of absorbed latent attention are stored by columns, so that weights of the inputs are not weights of columns.
    """
    found = (None if tensor.has_keys else weights.get(source) for source in tensor.sources)
    return [None if own is None else tensor.by_column(own) for own in found]


def is_written(kind: BlockType) -> bool:
    """Return whether `encoded` writes a type."""
    return kind.element is not None or kind.name in (*_BY_PACKAGE, *K_TYPES)


def encoded(numbers: Tensor, kind: BlockType, name: str, weights_I: Tensor | None = None) -> np.ndarray:
    """Return a tensor in a type's bytes, by rows.

    Raises CheckpointError for NaN and infinity, and UnsupportedError for numbers that are too large for the type.

    weights_I: how much the squared error of each column counts; None for equally.
    """
    if kind.element is not None:
        converted = numbers.to(kind.element.torch)
        if not bool(converted.isfinite().all()):
            raise _does_not_fit(numbers, kind, name)
        return converted.view(torch.uint8).numpy()
    if kind.name in K_TYPES:
        try:
            return rounded_to_k(numbers.reshape(-1, numbers.shape[-1]), kind, weights_I).numpy()
        except UnsupportedError as error:
            raise _does_not_fit(numbers, kind, name) from error
    import gguf

    number = gguf.GGMLQuantizationType(TYPE_NUMBERS[kind.name])
    with np.errstate(over="ignore", invalid="ignore"):  # such numbers are refused
        found = gguf.quants.quantize(numbers.float().numpy(), number)
        is_finite = bool(np.isfinite(gguf.quants.dequantize(found, number)).all())
    if not is_finite:
        raise _does_not_fit(numbers, kind, name)
    return np.asarray(found)


def _does_not_fit(numbers: Tensor, kind: BlockType, name: str) -> CompressError:
    if not bool(numbers.isfinite().all()):
        return CheckpointError(f"tensor {name} holds NaN or infinity; the model is damaged")
    instead = "f32" if kind.name == "BF16" else "bf16 or f32"
    return UnsupportedError(f"tensor {name} has numbers that are too large for {kind.name}; write it as {instead}")


def rounded(numbers: Tensor, kind: BlockType, weights_I: Tensor | None = None) -> Tensor:
    """Return the float32 numbers that a type keeps of a tensor, as the package `gguf` reads them."""
    if kind.element is not None:
        return numbers.to(kind.element.torch).float()
    import gguf

    number = gguf.GGMLQuantizationType(TYPE_NUMBERS[kind.name])
    return torch.from_numpy(gguf.quants.dequantize(encoded(numbers, kind, "", weights_I), number)).view(numbers.shape)


class GgufRoundedCheckpoint(Checkpoint):
    """A checkpoint with the numbers that a GGUF file of it keeps, as weights in float32."""

    def __init__(
        self,
        directory: Path,
        description: Description,
        types: Mapping[str, BlockType],
        weights: Mapping[str, Tensor] = NO_WEIGHTS,
    ) -> None:
        """weights: those that the file was written with."""
        super().__init__(directory)
        self._rounding: dict[str, list[tuple[BlockType, Tensor | None]]] = {}
        self._forms: dict[str, Form | None] = {}
        for tensor in description.tensors:
            self._forms |= dict.fromkeys(tensor.sources, tensor.place.form)
            for source, w_I in zip(tensor.sources, column_weights(tensor, weights), strict=True):
                self._rounding.setdefault(source, []).append((types[tensor.name], w_I))

    def stored(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return the weight after rounding."""
        whole, rounding = plain(super().stored(name, torch.float32), torch.float32), self._rounding[name]
        if (form := self._forms[name]) is not None:
            stored = zip(form.stored(whole), rounding, strict=True)
            return form.own(*(rounded(part.contiguous(), *own) for part, own in stored)).reshape(whole.shape)
        if len(rounding) == 1:
            return rounded(whole.contiguous(), *rounding[0])
        assert self.config.latent is not None
        parts = separated(whole.float(), self.config.attention_heads, self.config.latent.plain_dimension)
        return joined(*(rounded(part.contiguous(), *own) for part, own in zip(parts, rounding, strict=True)))
