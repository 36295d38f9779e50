"""Where the experts of a model that transformers runs lie in its files, under the names there.

A tensor of the files belongs to one expert, whose number is in its name, or to all experts of a layer, with one entry for
each along one axis. All other tensors do not depend on the number of experts. A smaller model therefore has copies of the
stored tensors, whatever transformers makes of them in memory.

Shape suffixes: N experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import UnsupportedError
from engine.transformers_models.adapted_checkpoint import AdaptedCheckpoint
from engine.transformers_models.expert_layers import ExpertAxis

_PIECE_BYTES = 64 << 20


@dataclass(frozen=True)
class OneExpert:
    """A tensor of one expert."""

    layer: int
    expert: int
    prefix: str
    suffix: str
    """The name around the expert's number."""


@dataclass(frozen=True)
class EveryExpert:
    """A tensor of all experts of a layer."""

    layer: int
    axis: int
    """The axis that has an entry for each expert, and possibly more after those."""


Place = OneExpert | EveryExpert


def expert_places(checkpoint: AdaptedCheckpoint) -> dict[str, Place]:
    """Return the place of every stored tensor that depends on the number of experts, by its name in the files.

    Raises UnsupportedError for tensors from which single experts cannot be taken.
    """
    axes = checkpoint.count_key.axes
    places: dict[str, Place] = {}
    by_target: dict[str, list[str]] = {}
    for name, target in checkpoint.targets.items():
        if target in axes:
            by_target.setdefault(target, []).append(name)
    for layer in checkpoint.found.experts:
        own = f"{checkpoint.found.layers}.{layer.index}."
        for target, names in by_target.items():
            if target.startswith(own):
                places |= _places(checkpoint, names, layer.index, layer.count, axes[target])
        _check_router(checkpoint, layer.router)
    return places


def _check_router(checkpoint: AdaptedCheckpoint, router: str) -> None:
    """Raise UnsupportedError for a router with a table of expert numbers, which would name experts that are gone."""
    for name, tensor in checkpoint.model.get_submodule(router).state_dict().items():
        if not tensor.is_floating_point():
            raise UnsupportedError(
                f"{checkpoint.directory}: {router}.{name} is a table of expert numbers, and a model "
                f"of the family {checkpoint.model_type} needs "
                "all experts in it; no expert can be removed"
            )


def _places(
    checkpoint: AdaptedCheckpoint, names: Sequence[str], layer: int, count: int, axis: ExpertAxis
) -> Iterable[tuple[str, Place]]:
    """Yield the places of the stored tensors that become one tensor of the model."""
    numbers = _numbers(names, count)
    if numbers is not None:
        for name, (expert, prefix, suffix) in zip(names, numbers, strict=True):
            yield name, OneExpert(layer, expert, prefix, suffix)
        return
    for name in names:
        shape, size = checkpoint.stored_shapes[name][1], count + axis.further
        fitting = [each for each, found in enumerate(shape) if found == size]
        if axis.axis not in fitting and len(fitting) != 1:
            raise UnsupportedError(
                f"{checkpoint.directory}: {name} has shape {list(shape)}, in which the {count} experts of a model "
                f"of the family {checkpoint.model_type} are not found"
            )
        yield name, EveryExpert(layer, axis.axis if axis.axis in fitting else fitting[0])


def _numbers(names: Sequence[str], count: int) -> list[tuple[int, str, str]] | None:
    """Return the expert's number in each name, with what is before and after it; None if names do not have such numbers."""
    split = [name.split(".") for name in names]
    if len({len(parts) for parts in split}) == 1:
        for place in range(len(split[0])):
            found = [parts[place] for parts in split]
            if (
                all(each.isdecimal() for each in found)
                and sorted({int(each) for each in found}) == list(range(count))
                and count > 1
            ):
                return [
                    (int(parts[place]), ".".join([*parts[:place], ""]), ".".join(["", *parts[place + 1 :]]))
                    for parts in split
                ]
    return None


Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]


class StoredResult:
    """The tensors of the files that a model with fewer experts has: copies of the source's, some with another name."""

    def __init__(self, checkpoint: AdaptedCheckpoint, kept: Mapping[int, Sequence[int]]) -> None:
        """kept: numbers of the kept experts by decoder layer index. Raises the errors of `expert_places`."""
        self._checkpoint = checkpoint
        self._entries: dict[str, tuple[str, int, tuple[int, ...]]] = {}
        """The source's name of each tensor, the axis of experts and the kept entries; no entries for a whole copy."""
        self.layout: Layout = {}
        places, counts = expert_places(checkpoint), {layer.index: layer.count for layer in checkpoint.found.experts}
        for name, (dtype, shape) in checkpoint.stored_shapes.items():
            place = places.get(name)
            if isinstance(place, OneExpert):
                if place.expert not in kept[place.layer]:
                    continue
                number = list(kept[place.layer]).index(place.expert)
                self._add(f"{place.prefix}{number}{place.suffix}", name, dtype, shape)
            elif place is None:
                self._add(name, name, dtype, shape)
            else:
                rows = (*kept[place.layer], *range(counts[place.layer], shape[place.axis]))
                self._add(name, name, dtype, shape, place.axis, rows)

    def _add(
        self, name: str, origin: str, dtype: torch.dtype, shape: tuple[int, ...], axis: int = 0, rows: tuple[int, ...] = ()
    ) -> None:
        self._entries[name] = origin, axis, rows
        self.layout[name] = dtype, (*shape[:axis], len(rows), *shape[axis + 1 :]) if rows else shape

    def pieces(self, name: str) -> Iterator[Tensor]:
        """Yield a tensor of the result in pieces along its first axis."""
        origin, axis, rows = self._entries[name]
        stored = self._checkpoint.stored_tensor(origin)
        if not rows:
            size = max(1, _PIECE_BYTES // max(1, stored[:1].nbytes)) if stored.dim() else 1
            yield from stored.split(size) if stored.dim() else (stored,)
        elif axis:
            yield stored.index_select(axis, torch.tensor(rows))
        else:
            for row in rows:
                yield stored[row : row + 1]
