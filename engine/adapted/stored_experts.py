"""Where the experts of a model that transformers runs lie in its files, under the names there.

A tensor of the files belongs to one expert, whose number is in its name, or to all experts of a layer, with one entry for
each along one axis. All other tensors do not depend on the number of experts. A smaller model therefore has copies of the
stored tensors, whatever transformers makes of them in memory.

Where the experts themselves change, because they lose hidden units or are merged, the tensors with their projections are
made anew. How a stored tensor holds projections (stack_of.py) is found by comparing one with what transformers makes of it.

Shape suffixes: N experts, F expert width, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from engine.adapted.config_keys import ExpertAxis
from engine.adapted.expert_layers import PROJECTIONS
from engine.adapted.stack_of import SAMPLED_EXPERT, StoredModel, generic, stacks_of
from engine.checkpoint.stacks import joined, taken
from engine.errors import UnsupportedError
from engine.families.experts import DOWN, DOWN_BIAS, GATE, GATE_BIAS, UP, Stack

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


def expert_places(checkpoint: StoredModel) -> dict[str, Place]:
    """Return the place of every stored tensor that depends on the number of experts, by its name in the files.

    Raises UnsupportedError for tensors from which single experts cannot be taken.
    """
    axes = checkpoint.count_key.axes
    places: dict[str, Place] = {}
    by_target: dict[str, list[str]] = {}
    for name, target in checkpoint.names.targets.items():
        if target in axes:
            by_target.setdefault(target, []).append(name)
    for layer in checkpoint.found.experts:
        own = f"{checkpoint.found.layers}.{layer.index}."
        for target, names in by_target.items():
            if target.startswith(own):
                places |= _places(checkpoint, names, layer.index, layer.count, axes[target])
        _check_router(checkpoint, layer.router)
    return places | dict(_prediction_places(checkpoint, places))


def _prediction_places(checkpoint: StoredModel, places: Mapping[str, Place]) -> Iterator[tuple[str, Place]]:
    """Yield the places of tensors of layers for multi-token prediction, which the model of transformers does not have.

    Their names end as those of the last MoE layer, whose experts decide which of theirs stay. A layer that does not have all
    of the last layer's tensors with a place, in their shapes, is left out.
    """
    last, shapes = checkpoint.found.experts[-1].index, checkpoint.stored_shapes
    known: dict[str, tuple[str, Place]] = {}
    for name, place in places.items():
        if place.layer == last:
            before, _, after = name.partition(f".{last}.")
            known[after] = name, place
    found: dict[str, dict[str, str]] = {}
    for name in shapes.keys() - checkpoint.names.targets.keys():
        parts = name.split(".")
        for end in range(1, len(parts)):
            after = ".".join(parts[end:])
            if parts[end - 1].isdecimal() and after in known and shapes[name][1] == shapes[known[after][0]][1]:
                found.setdefault(".".join([*parts[:end], ""]), {})[after] = name
    for before, own in sorted(found.items()):
        if own.keys() == known.keys():
            for after, name in sorted(own.items()):
                yield name, _moved(known[after][1], known[after][0].removesuffix(after), before)


def _moved(place: Place, before: str, after: str) -> Place:
    """Return a place under another beginning of its name."""
    return place if isinstance(place, EveryExpert) else replace(place, prefix=after + place.prefix.removeprefix(before))


def _check_router(checkpoint: StoredModel, router: str) -> None:
    """Raise UnsupportedError for a router with a table of expert numbers, which would name experts that are gone."""
    for name, tensor in checkpoint.model.get_submodule(router).state_dict().items():
        if not tensor.is_floating_point():
            raise UnsupportedError(
                f"{checkpoint.directory}: {router}.{name} is a table of expert numbers, and a model "
                f"of the family {checkpoint.model_type} needs "
                "all experts in it; no expert can be removed"
            )


def _places(
    checkpoint: StoredModel, names: Sequence[str], layer: int, count: int, axis: ExpertAxis
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
                and (count > 1 or all("experts" in parts[place - 1] for parts in split))  # one expert: not a layer's number
            ):
                return [
                    (int(parts[place]), ".".join([*parts[:place], ""]), ".".join(["", *parts[place + 1 :]]))
                    for parts in split
                ]
    return None


class StoredExperts:
    """The projections of the experts of a checkpoint, whatever the layout of the tensors that hold them."""

    def __init__(self, checkpoint: StoredModel) -> None:
        """Raises the errors of `expert_places`, and UnsupportedError for tensors in which projections are not found."""
        self._checkpoint, self.places = checkpoint, expert_places(checkpoint)
        samples: dict[str, str] = {}
        first = checkpoint.found.sampled
        own = {f"{first.experts}.{each}" for each in PROJECTIONS}
        for name, place in self.places.items():
            if checkpoint.names.targets.get(name) in own and not (
                isinstance(place, OneExpert) and place.expert != SAMPLED_EXPERT
            ):
                samples.setdefault(generic(name), name)
        one = {key: partial(self._of_expert, name, SAMPLED_EXPERT) for key, name in samples.items()}
        counts = {layer.index: layer.count for layer in checkpoint.found.experts}
        self._stacks = stacks_of(checkpoint, one)
        self._names: dict[tuple[int, int, int], tuple[str, int]] = {}
        """Tensor of each projection of an expert, by layer, expert and projection, with its place in the stack."""
        for name, place in self.places.items():
            stack = self.stack(name) if name in checkpoint.names.targets else None
            experts = [place.expert] if isinstance(place, OneExpert) else range(counts[place.layer])
            for number, projection in enumerate(() if stack is None else stack.projections):
                self._names |= {(place.layer, expert, projection): (name, number) for expert in experts}

    def stack(self, name: str) -> Stack | None:
        """Return how a stored tensor holds projections; None for a tensor that holds none, such as a router's."""
        return self._stacks.get(generic(name))

    def projection(self, layer: int, expert: int, projection: int) -> Tensor:
        """Return gate or up [F, D], down [D, F] or a bias of an expert, as stored. Experts without gates have empty ones."""
        if projection in (GATE, GATE_BIAS) and (layer, expert, projection) not in self._names:
            return torch.zeros_like(self.projection(layer, expert, projection + 1)[..., :0])
        name, number = self._names[layer, expert, projection]
        stack = self.stack(name)
        assert stack is not None
        return taken(stack, self._of_expert(name, expert), number)

    def matrices(self, layer: int, expert: int) -> dict[int, str]:
        """Return the name of the tensor that holds each matrix of an expert, by projection."""
        found = {each: self._names.get((layer, expert, each)) for each in (GATE, UP, DOWN)}
        return {each: held[0] for each, held in found.items() if held is not None}

    def is_alone(self, name: str) -> bool:
        """Return whether a tensor is one matrix of one expert, [outputs, inputs]."""
        stack, place = self.stack(name), self.places[name]
        return isinstance(place, OneExpert) and stack is not None and not stack.transposed and len(stack.projections) == 1

    def _of_expert(self, name: str, expert: int) -> Tensor:
        """Return the part of a stored tensor that belongs to one expert."""
        stored, place = self._checkpoint.stored_tensor(name), self.places[name]
        return stored if isinstance(place, OneExpert) else stored.select(place.axis, expert)


Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]
Projection = Callable[[int, int, int], Tensor]
"""Function that returns a projection of an expert of a result, by layer, number in the result, and projection."""


@dataclass(frozen=True)
class ResultLayer:
    """The experts of one layer of a result."""

    rows: tuple[int, ...]
    """The source expert whose router row each has."""
    width: int
    """Number of hidden units of each expert."""
    changed: frozenset[int] = frozenset()
    """Numbers of those whose projections are not copies of the source's."""


class StoredResult:
    """The stored tensors of a model with other experts. Most are copies of the source's tensors, some under new names."""

    def __init__(
        self, checkpoint: StoredModel, layers: Mapping[int, ResultLayer], projection: Projection | None = None
    ) -> None:
        """layers: by decoder layer index. projection: needed where experts change. Raises the errors of `expert_places`."""
        self._checkpoint, self._layers, self._projection = checkpoint, layers, projection
        changes = any(layer.changed for layer in layers.values())
        self._experts: StoredExperts | None = checkpoint.stored_experts if changes else None
        places = expert_places(checkpoint) if self._experts is None else self._experts.places
        self._pieces: dict[str, Callable[[], Iterator[Tensor]]] = {}
        self.layout: Layout = {}
        for name, (dtype, shape) in checkpoint.stored_shapes.items():
            place = places.get(name)
            if place is None:
                self._copy(name, name)
            elif isinstance(place, EveryExpert):
                self._add_stacked(name, place, dtype, shape)
            elif place.expert == 0:
                self._add_single(name, place, dtype, shape)

    def _add(self, name: str, dtype: torch.dtype, shape: Sequence[int], pieces: Callable[[], Iterator[Tensor]]) -> None:
        self.layout[name], self._pieces[name] = (dtype, tuple(shape)), pieces

    def _copy(self, name: str, origin: str) -> None:
        """Add a copy of a weight of the source, of all tensors that it is stored as."""
        for suffix, (dtype, shape) in self._checkpoint.parts(origin).items():
            self._add(name + suffix, dtype, shape, partial(self._whole, origin + suffix))

    def _stack(self, name: str) -> Stack | None:
        """Return how a tensor of experts that change holds projections; None for copies, and in prediction layers."""
        return None if self._experts is None or name not in self._checkpoint.names.targets else self._experts.stack(name)

    def _add_single(self, first: str, place: OneExpert, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Add a layer's tensors of single experts that share a suffix. first: the source's name of the one of expert 0."""
        layer = self._layers[place.layer]
        stack = self._stack(first)
        for number, row in enumerate(layer.rows):
            own, origin = (f"{place.prefix}{each}{place.suffix}" for each in (number, row))
            if stack is None or number not in layer.changed:
                self._copy(own, origin)
            else:
                new = _narrowed(stack, shape, layer.width)
                self._add(own, dtype, new, partial(self._made, stack, place.layer, [number], dtype))

    def _add_stacked(self, name: str, place: EveryExpert, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Add a tensor of all experts of a layer."""
        layer, axis = self._layers[place.layer], place.axis
        stack = self._stack(name)
        if stack is None or not layer.changed:
            count = next(own.count for own in self._checkpoint.found.experts if own.index == place.layer)
            rows = (*layer.rows, *range(count, shape[axis]))
            self._add(name, dtype, (*shape[:axis], len(rows), *shape[axis + 1 :]), partial(self._rows, name, axis, rows))
            return
        one = _narrowed(stack, (*shape[:axis], *shape[axis + 1 :]), layer.width)
        new = (*one[:axis], len(layer.rows), *one[axis:])
        made = partial(self._made, stack, place.layer, range(len(layer.rows)), dtype)
        self._add(name, dtype, new, partial(_stacked, made, axis))

    @property
    def names(self) -> list[str]:
        """Names of all tensors of the result."""
        return list(self.layout)

    def parts(self, name: str) -> Mapping[str, Iterator[Tensor]]:
        """Return a tensor of the result in pieces along its first axis, by its name."""
        return {name: self.pieces(name)}

    def pieces(self, name: str) -> Iterator[Tensor]:
        """Yield a tensor of the result in pieces along its first axis."""
        return self._pieces[name]()

    def _whole(self, origin: str) -> Iterator[Tensor]:
        stored = self._checkpoint.stored_tensor(origin)
        size = max(1, _PIECE_BYTES // max(1, stored[:1].nbytes)) if stored.dim() else 1
        yield from stored.split(size) if stored.dim() else (stored,)

    def _rows(self, origin: str, axis: int, rows: Sequence[int]) -> Iterator[Tensor]:
        stored = self._checkpoint.stored_tensor(origin)
        if axis:
            yield stored.index_select(axis, torch.tensor(rows))
        else:
            for row in rows:
                yield stored[row : row + 1]

    def _made(self, stack: Stack, layer: int, numbers: Iterable[int], dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield the part of a tensor that belongs to each of these experts, made from their projections."""
        assert self._projection is not None
        for number in numbers:
            parts = [self._projection(layer, number, projection) for projection in stack.projections]
            yield joined(stack, parts).to(dtype)


def _stacked(made: Callable[[], Iterator[Tensor]], axis: int) -> Iterator[Tensor]:
    if axis:
        yield torch.stack(list(made()), dim=axis)
    else:
        for one in made():
            yield one[None]


def _narrowed(stack: Stack, shape: tuple[int, ...], width: int) -> tuple[int, ...]:
    """Return the shape of one expert's part of a tensor, where the expert has this number of hidden units."""
    if DOWN_BIAS in stack.projections:
        return shape
    axis = int((DOWN in stack.projections) != stack.transposed)
    return tuple(width * len(stack.projections) if each == axis else size for each, size in enumerate(shape))
