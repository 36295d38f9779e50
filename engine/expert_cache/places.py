"""Where each routed expert of a checkpoint lies in its files, and everything else that must be in memory before it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from engine.checkpoint.checkpoint import Checkpoint
from engine.errors import UnsupportedError
from engine.expert_cache.file_memory import Extent, FileMemory
from engine.expert_cache.policies import Key
from engine.families.tensor_names import expert_parts, expert_tensor
from engine.kernels.quantized_weight import Weight

SMALL_BYTES = 16_384
"""Tensors of experts up to this size are always in memory: shapes, biases and short scales."""


class Part(NamedTuple):
    """Some consecutive bytes of one of the files."""

    memory: FileMemory
    extent: Extent


Places = dict[Key, tuple[Part, ...]]
"""The parts of each routed expert, by decoder layer and number."""


class FileMemories:
    """The memories that stand for a checkpoint's files. Attributes: `places`, and `fixed_bytes` of all other weights."""

    def __init__(self, checkpoint: Checkpoint, weights: Callable[[str], Weight]) -> None:
        """Read everything but the routed experts, and find these.

        weights: as the decoder will read them. Raises UnsupportedError for experts that are converted or rearranged when
        they are read, and CheckpointError for files that cannot be read.
        """
        self._all = [FileMemory(file) for file in checkpoint.files]
        row, config = checkpoint.config.architecture, checkpoint.config
        names = {
            (layer, expert): [expert_tensor(row, layer, expert, part) for part in expert_parts(row)]
            for layer, count in config.experts_by_layer.items()
            for expert in range(count)
        }
        routed = {stored for own in names.values() for name in own for stored in checkpoint.stored_names(name)}
        used = {stored for name in checkpoint.shapes for stored in checkpoint.stored_names(name)}
        self.fixed_bytes = 0
        for memory, file in zip(self._all, checkpoint.files, strict=True):
            for name in sorted(used & file.entries.keys()):
                entry = file.entries[name]
                if entry.nbytes and (name not in routed or entry.nbytes <= SMALL_BYTES):
                    self.fixed_bytes += memory.hold(Extent(entry.begin, entry.end))
                    memory.read(Extent(entry.begin, entry.end))
        self.places: Places = {}
        for key, own in names.items():
            parts = self._parts([tensor for name in own for tensor in _tensors(weights(name))])
            if parts is None:
                raise UnsupportedError(
                    f"{checkpoint.directory}: experts are converted or rearranged when they are read, and --memory-limit "
                    "reads them again and again; write them as they are computed (compress layout), or leave out the limit"
                )
            self.places[key] = parts
        _check_apart(self.places.values())

    def _parts(self, tensors: Sequence[Tensor]) -> tuple[Part, ...] | None:
        """Return the parts that these tensors cover, without small ones; None if a tensor lies elsewhere."""
        found: dict[int, list[Extent]] = {}
        for tensor in tensors:
            if tensor.nbytes <= SMALL_BYTES:
                continue
            place = next((n for n, memory in enumerate(self._all) if memory.holds(tensor.data_ptr())), None)
            if place is None:
                return None
            found.setdefault(place, []).append(self._all[place].extent_of(tensor))
        return tuple(Part(self._all[place], extent) for place, own in found.items() for extent in _merged(own))

    def close(self) -> None:
        """Close the files."""
        for memory in self._all:
            memory.close()


def bytes_of(parts: Iterable[Part]) -> int:
    """Return the size of an expert in the files."""
    return sum(part.extent.size for part in parts)


def largest_layer_bytes(places: Mapping[Key, Iterable[Part]]) -> int:
    """Return the size of the experts of the layer whose experts are largest together."""
    layers: dict[int, int] = {}
    for (layer, _), parts in places.items():
        layers[layer] = layers.get(layer, 0) + bytes_of(parts)
    return max(layers.values(), default=0)


def _tensors(weight: Weight) -> list[Tensor]:
    return [weight] if isinstance(weight, Tensor) else list(weight.buffers())


def _merged(extents: Iterable[Extent]) -> list[Extent]:
    """Return the same bytes in as few extents as possible, in order."""
    merged: list[Extent] = []
    for extent in sorted(extents):
        if merged and extent.begin <= merged[-1].end:
            merged[-1] = Extent(merged[-1].begin, max(extent.end, merged[-1].end))
        else:
            merged.append(extent)
    return merged


def _check_apart(experts: Iterable[tuple[Part, ...]]) -> None:
    """Raise UnsupportedError if two experts share bytes: giving back one would destroy the other."""
    every = sorted((id(memory), extent) for parts in experts for memory, extent in parts)
    for (one, before), (other, after) in pairwise(every):
        if one == other and after.begin < before.end:
            raise UnsupportedError(
                f"experts are stored interleaved (bytes {after.begin} to {before.end} belong to two), so that none can be "
                "read alone; write the model anew with `compress layout`, or leave out --memory-limit"
            )
