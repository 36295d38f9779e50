"""Layers for multi-token prediction in the result of a Plan: which entries of their tensors stay, under which names.

The names of their tensors end like those of the last MoE layer. The first of these layers keeps the experts in
`Plan.prediction`. Where that is empty, and in further layers, the experts with the numbers that the last MoE layer keeps
stay. The layers are part of the result only where it is a plain checkpoint with experts as wide as the source's, so that
programs that run them can load them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.plans.plan import Plan, expert_width
from engine.checkpoint.checkpoint import Checkpoint, in_parts
from engine.checkpoint.stored_views import StoredView
from engine.families.config import DecoderConfig
from engine.families.tensor_names import (
    expert_parts,
    expert_tensor,
    prediction_names,
    stacks_in_memory,
    stacks_on_disk,
)
from engine.families.tensor_shapes import expert_rows
from engine.files.mapped_file import RELEASE_EVERY_BYTES


@dataclass(frozen=True)
class PredictionTensor:
    """A tensor of such a layer in the result."""

    view: StoredView
    """Its tensor in the source."""
    axis: int = 0
    entries: tuple[int, ...] | None = None
    """The entries along `axis` that stay; None for a copy."""

    def parts(self, name: str, *, packed: bool) -> dict[str, Tensor]:
        """Return the stored tensors of a copied matrix in packed floats, if the result has such; empty for others."""
        return self.view.stored_parts(name) if packed and self.entries is None else {}

    @property
    def dtype(self) -> torch.dtype:
        """Element type in the result."""
        return self.view.element.torch

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the result."""
        shape = self.view.shape
        return shape if self.entries is None else (*shape[: self.axis], len(self.entries), *shape[self.axis + 1 :])

    def pieces(self) -> Iterator[Tensor]:
        """Yield the tensor in pieces along its first axis."""
        whole = self.view.read()
        if self.entries is None:
            yield from in_parts(whole, RELEASE_EVERY_BYTES)
        elif self.axis:
            yield whole.index_select(self.axis, torch.tensor(self.entries))
        else:
            for entry in self.entries:
                yield whole[entry : entry + 1]


def kept_prediction(plan: Plan, checkpoint: Checkpoint) -> dict[str, PredictionTensor]:
    """Return the tensors of layers for multi-token prediction in the result, by name; none where they are left out.

    The result must have as many experts in every layer, and weights that are not rounded; the caller sees to that.
    """
    config, there = checkpoint.config, checkpoint.prediction_tensors
    if not there or plan.kind != "moe" or plan.common or not plan.layers or checkpoint.schemes_used:
        return {}
    if plan.prediction is None:
        return {}
    for layer, experts in plan.layers.items():
        moe = config.layers[layer].moe
        if moe is None or {expert_width(expert, moe) for expert in experts} != set(moe.widths):
            return {}
    last = max(plan.layers)
    rows = [expert.copied_row for expert in plan.layers[last]]
    if None in rows:
        return {}
    own = set(prediction_names(config.architecture, len(config.layers), there).values()) if plan.prediction else set()
    first = {name: view for name, view in there.items() if name in own}
    others = {name: view for name, view in there.items() if name not in own}
    parts = (first, plan.prediction), (others, [int(row) for row in rows if row is not None])
    taken = [_taken(config, last, part, kept) for part, kept in parts]
    return {} if None in taken else {name: tensor for part in taken if part is not None for name, tensor in part.items()}


def _taken(
    config: DecoderConfig, last: int, there: Mapping[str, StoredView], rows: Sequence[int]
) -> dict[str, PredictionTensor] | None:
    """Return the tensors with these experts; None if a layer's experts are not those of the last layer with experts."""
    one, every = _endings(config, last)
    numbers = {row: [new for new, old in enumerate(rows) if old == row] for row in rows}
    kept: dict[str, PredictionTensor] = {}
    found: dict[str, set[int]] = {}
    for name, view in there.items():
        before, ending = _split(name, one.keys() | every)
        if ending in one:
            expert, generic = one[ending]
            found.setdefault(before + generic, set()).add(expert)
            kept |= {before + generic.format(new): PredictionTensor(view) for new in numbers.get(expert, ())}
        elif ending in every:
            count = config.experts_by_layer[last]
            if count not in view.shape:
                return None
            kept[name] = PredictionTensor(view, view.shape.index(count), tuple(rows))
        elif ".experts." in name:
            return None
        else:
            kept[name] = PredictionTensor(view)
    every_expert = set(range(config.experts_by_layer[last]))
    return kept if all(experts == every_expert for experts in found.values()) else None


def _endings(config: DecoderConfig, layer: int) -> tuple[dict[str, tuple[int, str]], set[str]]:
    """Return the endings of a layer's tensor names: of one expert, with its number and a generic ending; of all experts."""
    row, count = config.architecture, config.experts_by_layer[layer]
    one: dict[str, tuple[int, str]] = {}
    for projection in expert_parts(row):
        first, second = (_ending(expert_tensor(row, layer, expert, projection), layer) for expert in (0, 1))
        place = next(index for index, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1])
        generic = f"{first[:place]}{{}}{first[place + 1 :]}"
        one |= {generic.format(expert): (expert, generic) for expert in range(count)}
    stacks = (*stacks_on_disk(row, layer), *stacks_in_memory(row, layer))
    return one, {_ending(name, layer) for name in (*expert_rows(config, layer), *(stack.name for stack in stacks))}


def _ending(name: str, layer: int) -> str:
    return name.partition(f".{layer}.")[2]


def _split(name: str, endings: Set[str]) -> tuple[str, str]:
    """Return a name in two parts: up to the number of a layer, and an ending that is known; an empty one if none is."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        ending = ".".join(parts[end:])
        if parts[end - 1].isdecimal() and ending in endings:
            return ".".join([*parts[:end], ""]), ending
    return name, ""
