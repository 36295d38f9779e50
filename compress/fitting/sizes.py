"""Bytes of the options of `compress fit`: of an expert with some of its hidden units and bits, and of the other weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from compress.options.quantize import EMBEDDING
from compress.rounding.mixed_widths import kinds_of_others
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.pack_quantized import layout_of
from engine.families.experts import DOWN
from engine.families.tensor_names import expert_tensor, ffn_parts
from engine.families.tensor_shapes import expected_tensors, expert_rows, expert_shapes, routed_tensors
from engine.files.safetensors_writer import DEFAULT_SHARD_BYTES, PAGE_BYTES
from engine.kernels.stored.scheme import PLAIN_BITS, Scheme

START_BYTES = 64 + PAGE_BYTES
"""Bytes of the length, the metadata and the padding of a file's header, at most."""


@dataclass(frozen=True)
class Sizes:
    """Bytes of the tensors of a model's result, with their entries in the headers of safetensors files.

    Entries are counted as long as they can be, so that a result is never larger. Layers for multi-token prediction do not
    count: no result but the unchanged model has them.
    """

    checkpoint: Checkpoint
    group_size: int
    counts_headers: bool = True
    """Whether headers count, which are in files and which no token reads."""

    @cached_property
    def read(self) -> Sizes:
        """Return the sizes without headers."""
        return replace(self, counts_headers=False)

    def tensor(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
        """Return the bytes of one tensor."""
        entry = f'"{name}":{{"dtype":"BF16","shape":{list(shape)},"data_offsets":[{self._offset},{self._offset}]}},'
        return math.prod(shape) * dtype.itemsize + self.counts_headers * len(entry)

    def matrix(self, name: str, shape: tuple[int, ...], bits: int) -> int:
        """Return the bytes of a matrix of so many bits."""
        dtype = self._dtype(name)
        if bits == PLAIN_BITS:
            return self.tensor(name, dtype, shape)
        parts = layout_of(name, shape, Scheme(bits, self.group_size), dtype)
        return sum(self.tensor(part, *own) for part, own in parts.items())

    def expert(self, layer: int, number: int, units: int, readers: int, down: int) -> int:
        """Return the bytes of an expert with so many hidden units, without its rows of the router; 0 without units.

        readers, down: bits of the matrices that read the layer's input, and of the down projection.
        """
        config = self.checkpoint.config
        if not units:
            return 0
        found = 0
        for part, shape in expert_shapes(config, layer, number).items():
            name = expert_tensor(config.architecture, layer, number, part)
            if part not in ffn_parts(config.architecture):  # a bias, which is never rounded
                found += self.matrix(name, (units if shape != (config.hidden_size,) else shape[0],), PLAIN_BITS)
            elif part == DOWN:
                found += self.matrix(name, (shape[0], units), down)
            else:
                found += self.matrix(name, (units, shape[1]), readers)
        return found

    def rows(self, layer: int) -> int:
        """Return the bytes of the rows of the router that one expert of a layer has. Every token reads them."""
        every = expert_rows(self.checkpoint.config, layer)
        return sum(math.prod(shape) * self._dtype(name).itemsize // shape[0] for name, shape in every.items())

    def others(self, kind: str, bits: int) -> int:
        """Return the bytes of the other matrices of a kind, with so many bits."""
        shapes = expected_tensors(self.checkpoint.config)
        return sum(self.matrix(name, shapes[name], bits) for name in self._kinds[kind])

    def read_of_others(self, kind: str, bits: int) -> float:
        """Return the bytes of these that a token reads: of an embedding that is not the head too, one row."""
        config = self.checkpoint.config
        is_by_row = kind == EMBEDDING and not config.tied_embeddings
        return self.others(kind, bits) / (config.vocabulary_size if is_by_row else 1)

    def never_rounded(self) -> int:
        """Return the bytes of the files' headers and of all tensors outside of the routed experts that are no matrices of
        a kind.
        """
        config, shapes = self.checkpoint.config, expected_tensors(self.checkpoint.config)
        rows = {name for layer in config.moe_layers for name in expert_rows(config, layer)}
        elsewhere = routed_tensors(config) | rows | {name for own in self._kinds.values() for name in own}
        found = self.counts_headers * START_BYTES * (1 + self.checkpoint.bytes // DEFAULT_SHARD_BYTES)
        found += sum(self.tensor(name, *own) for name, own in self.checkpoint.derived.items())
        found += sum(self.tensor(name, self._dtype(name), (0, *shapes[name][1:])) for name in rows)  # experts count them
        return found + sum(self.matrix(name, shapes[name], PLAIN_BITS) for name in shapes.keys() - elsewhere)

    @cached_property
    def _offset(self) -> str:
        """The longest offset of an entry, from a sum over all tensors of the model."""
        return "9" * len(str(self.checkpoint.bytes))

    @cached_property
    def _kinds(self) -> dict[str, list[str]]:
        return kinds_of_others(self.checkpoint.config)

    def _dtype(self, name: str) -> torch.dtype:
        return self.checkpoint.dtype(name) if name in self.checkpoint.shapes else self.checkpoint.model_dtype


def kept_levels(width: int, multiple: int, most: int) -> list[int]:
    """Return the numbers of hidden units that an expert may keep, descending: all, and multiples below, at most `most`."""
    multiples = list(range((width - 1) // multiple * multiple, 0, -multiple))
    step = -(-len(multiples) // max(most - 1, 1)) or 1
    return [width, *multiples[step - 1 :: step]]
