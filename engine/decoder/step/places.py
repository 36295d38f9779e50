"""The positions that a step reads: their angles, and where they lie in a cache, as the records of attention need them.

The arrays stay where they are from step to step. Records are written again only for another cache, or for another number of
sequences or blocks.

Shape suffixes: B sequences, L new positions, T tokens (B·L), M blocks of the longest sequence, P positions, R rotated
dimensions of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.decoder.attention import Attention, Positions
from engine.decoder.kv_cache import KeyValueCache
from engine.decoder.latent_attention import LatentAttention
from engine.decoder.paged_cache import PagedBatch
from engine.decoder.step.tables import Tables
from engine.families.rotary_embedding import Rotary
from engine.kernels.kernel_choice import COMPILED_MAX_ROWS
from engine.kernels.linear import as_bfloat16

ROWS_ADDED = 1024
"""Number of positions by which tables of angles grow."""


class _Angles:
    """Cosines and sines of one kind of layer: a table for all positions so far, and the rows of a step."""

    def __init__(self, rotary: Rotary) -> None:
        self._rotary = rotary
        self.cosines_PR, self.sines_PR = (rows_PR[:0] for rows_PR in self._rows(0, 1))
        size = self.cosines_PR.shape[1]
        self.cosine_TR, self.sine_TR = (np.zeros((COMPILED_MAX_ROWS, size), np.uint16) for _ in range(2))

    def _rows(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        cosine, sine = self._rotary(torch.arange(first, last)[None], torch.bfloat16)
        return cosine[0, 0], sine[0, 0]

    def grow(self, last: int) -> tuple[Tensor, Tensor]:
        """Let the table have so many positions. Returns the former table."""
        before = self.cosines_PR, self.sines_PR
        starts = range(len(self.cosines_PR), last, ROWS_ADDED)
        pieces = [before, *(self._rows(start, min(start + ROWS_ADDED, last)) for start in starts)]
        self.cosines_PR, self.sines_PR = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        return before

    def take(self, angles: tuple[Tensor, Tensor], shape: tuple[int, int]) -> None:
        """Copy given angles, [B or 1, 1, L, R], to the step's rows. shape: B and L."""
        for angle, row_TR in zip(angles, (self.cosine_TR, self.sine_TR), strict=True):
            whole_TR = angle.expand(shape[0], 1, shape[1], -1).reshape(shape[0] * shape[1], -1)
            as_bfloat16(row_TR)[: len(whole_TR)] = whole_TR


@dataclass
class _Alike:
    """Layers whose positions have the same angles and lie in the same places of a cache."""

    layers: Any
    """Their numbers, int64."""
    attention: Attention | LatentAttention
    """The attention of the first one."""
    records: Any
    """The records of all layers with such attention."""


class Places:
    """The positions of one decoder's steps."""

    def __init__(self, kernels: Any, tables: Tables, layers: Any, rotary: Rotary) -> None:
        mixes = tables.layers["mixes"]
        self._alike = _placed_alike(tables, layers, (mixes == kernels.ATTENDS) | (mixes == kernels.LATENT))
        rotaries = {kind: rotary.of_kind(kind) for kind in {_kind(each.attention) for each in self._alike}}
        self.needs_positions = any(own.varies for own in rotaries.values())
        """Whether angles depend on more than their positions, so that `fill` must be given them."""
        self._angles = {kind: _Angles(own) for kind, own in rotaries.items()}
        self.angles = np.zeros(0 if self.needs_positions else len(self._angles), kernels.ANGLES)
        """Records with which a step copies the angles of its positions; there are none where `fill` is given them."""
        self.positions_T = np.zeros(COMPILED_MAX_ROWS, np.int64)
        self._blocks: list[Any] = []
        self._key: tuple[Any, ...] | None = None
        self._reached = 0
        """Number of positions that the tables of angles have."""

    def fill(self, cache: KeyValueCache | PagedBatch, shape: tuple[int, int], positions: Positions | None) -> None:
        """Write the places of new positions. shape: B and L."""
        batch, length = shape
        if isinstance(cache, PagedBatch):
            blocks_BM, past_B, _, repeats = cache.places(0)
            self.positions_T[:batch] = past_B
            last = max(cache.past) + 1
            key: tuple[Any, ...] = (cache.placement, batch, length, blocks_BM.shape[1], repeats)
            if key == self._key:
                for own_BM in self._blocks:
                    own_BM[:] = blocks_BM
        else:
            last = cache.length + length
            assert last <= cache.capacity, f"cache of {cache.capacity} positions is full"
            self.positions_T[:batch] = cache.length
            key = cache.placement, batch, length
        if length > 1:
            self.positions_T[:length] = np.arange(self.positions_T[0], self.positions_T[0] + length)
        if key != self._key:
            self._place(cache, shape)
            self._key = key
        if self.needs_positions:
            assert positions is not None, "angles that depend on more than their positions must be given"
            for kind, own in self._angles.items():
                own.take(positions.turns(kind), shape)
        elif last > self._reached:
            self._reach(last + -last % ROWS_ADDED)

    def _reach(self, last: int) -> None:
        """Let the tables of angles have so many positions."""
        self._reached = 0  # until all records name tables that exist
        before = [own.grow(last) for own in self._angles.values()]
        for record, own in zip(self.angles, self._angles.values(), strict=True):
            record["cosines"], record["sines"] = own.cosines_PR.data_ptr(), own.sines_PR.data_ptr()
            record["cosine"], record["sine"] = own.cosine_TR.ctypes.data, own.sine_TR.ctypes.data
            record["size"] = own.cosines_PR.shape[1]
        self._reached = last
        del before  # the tables that the records named until now

    def _place(self, cache: KeyValueCache | PagedBatch, shape: tuple[int, int]) -> None:
        """Write the records of all layers that attend."""
        self._key, self._blocks = None, []
        for own in self._alike:
            first, angles = int(own.layers[0]), self._angles[_kind(own.attention)]
            blocks_BM, _, block_size, repeats = cache.places(first)
            if not self._blocks or isinstance(cache, KeyValueCache):
                self._blocks.append(np.array(blocks_BM))
            values = {
                "cosine": angles.cosine_TR.ctypes.data,
                "sine": angles.sine_TR.ctypes.data,
                "sequences": shape[0],
                "blocks": self._blocks[-1].ctypes.data,
                "blocks_of_one": blocks_BM.shape[1],
                "past": self.positions_T.ctypes.data,
                "block_size": block_size,
            }
            if isinstance(own.attention, Attention):
                values["rotated"] = angles.cosine_TR.shape[1] if own.attention.rotates else 0
                values["group_stride"], values["repeats"] = cache.group_stride(first), int(repeats)
            stored = zip(*(cache.addresses(int(layer)) for layer in own.layers), strict=True)
            values |= zip(("keys", "values", "key_scales", "value_scales"), map(list, stored), strict=True)
            for name, value in values.items():
                own.records[name][own.layers] = value


def _kind(attention: Attention | LatentAttention) -> str | None:
    """Return the kind of layers whose angles an attention has."""
    return None if isinstance(attention, LatentAttention) else attention.kind


def _placed_alike(tables: Tables, layers: Any, attends_L: Any) -> list[_Alike]:
    """Return the layers whose attention the kernels compute, together where angles and places are the same."""
    alike: dict[Any, list[int]] = {}
    for number in np.flatnonzero(attends_L).tolist():
        attention = layers[number].attention
        kind: Any = None  # latent attention, which is the same in all layers
        if isinstance(attention, Attention):
            kind = attention.rotates, attention.kind, attention.key_heads, attention.head_dimension
        alike.setdefault(kind, []).append(number)
    return [
        _Alike(np.array(numbers), layers[numbers[0]].attention, tables.latent if kind is None else tables.attention)
        for kind, numbers in alike.items()
    ]
