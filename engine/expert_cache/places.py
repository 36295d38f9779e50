"""Where each routed expert of a checkpoint lies in its files, and everything else that must be in memory before it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from engine.checkpoint.checkpoint import Checkpoint
from engine.errors import UnsupportedError
from engine.expert_cache.file_memory import FileMemory
from engine.expert_cache.policies import Key
from engine.families.tensor_names import expert_parts, expert_tensor
from engine.files.mapped_file import Extent
from engine.kernels.stored.quantized_weight import Weight

SMALL_BYTES = 16_384
"""Tensors with at most so many bytes for each expert are always in memory: shapes, biases and short scales."""
_MOST_WIDENING = 4
"""Times that a scale may grow when it is converted: from one byte to float32."""


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
        stored_of = checkpoint.stored_names
        users = Counter(stored for own in names.values() for stored in {each for name in own for each in stored_of(name)})
        used = {stored for name in checkpoint.shapes for stored in stored_of(name)}
        self.fixed_bytes = 0
        self._fixed: dict[str, Part] = {}
        """Stored tensors that stay in memory, by name."""
        for memory, file in zip(self._all, checkpoint.files, strict=True):
            for name in sorted(used & file.entries.keys()):
                entry = file.entries[name]
                if entry.nbytes and (name not in users or entry.nbytes // users[name] <= SMALL_BYTES):
                    self._fixed[name] = Part(memory, Extent(entry.begin, entry.end))
                    self.fixed_bytes += memory.hold(self._fixed[name].extent)
                    memory.read(self._fixed[name].extent)
        self.places: Places = {}
        for key, own in names.items():
            parts = [self._parts(weights(name), stored_of(name)) for name in own]
            if None in parts:
                raise UnsupportedError(
                    f"{checkpoint.directory}: experts are converted or rearranged when they are read, and --memory-limit "
                    "reads them again and again; take the stored dtype, quantize the model, or leave out the limit"
                )
            self.places[key] = tuple(_merged(part for each in parts if each is not None for part in each))
        _check_apart(self.places.values())

    def _parts(self, weight: Weight, stored: Iterable[str]) -> list[Part] | None:
        """Return the parts that a weight covers, without those that stay in memory; None if the weight is a copy.

        stored: the names of the tensors that it is made of. Copies of tensors that
        stay in memory do not make the weight a copy.
        """
        fixed = [self._fixed[name] for name in stored if name in self._fixed]
        if len(fixed) == len(tuple(stored)):
            return []
        found = []
        for tensor in _tensors(weight):
            memory = next((memory for memory in self._all if memory.holds(tensor.data_ptr())), None)
            if memory is not None:
                part = Part(memory, memory.extent_of(tensor))
                found += [] if any(_covers(own, part) for own in fixed) else [part]
            elif tensor.nbytes > max((own.extent.size * _MOST_WIDENING for own in fixed), default=0):
                return None
        return found

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


def _covers(whole: Part, part: Part) -> bool:
    """Whether one part contains another."""
    is_inside = whole.extent.begin <= part.extent.begin and part.extent.end <= whole.extent.end
    return whole.memory is part.memory and is_inside


def _merged(parts: Iterable[Part]) -> Iterator[Part]:
    """Yield the same bytes in as few parts as possible, in order."""
    memory, extent = None, Extent(0, 0)
    for part in sorted(parts, key=lambda part: (id(part.memory), part.extent)):
        if part.memory is memory and part.extent.begin <= extent.end:
            extent = Extent(extent.begin, max(part.extent.end, extent.end))
            continue
        if memory is not None:
            yield Part(memory, extent)
        memory, extent = part
    if memory is not None:
        yield Part(memory, extent)


def _check_apart(experts: Iterable[tuple[Part, ...]]) -> None:
    """Raise UnsupportedError if two experts share bytes: giving back one would destroy the other."""
    every = sorted((id(memory), extent) for parts in experts for memory, extent in parts)
    for (one, before), (other, after) in pairwise(every):
        if one == other and after.begin < before.end:
            raise UnsupportedError(
                f"experts are stored interleaved (bytes {after.begin} to {before.end} belong to two), so that none can be "
                "read alone; write the model anew with `compress quantize`, or leave out --memory-limit"
            )
