"""Stacked experts: extracting one projection of one expert from a stacked tensor, and stacking projections.

Shape suffixes: N experts of the layer, O outputs of all projections of a stack together, I inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.checkpoint.mxfp4 import BLOCK, BLOCKS, BYTES, POWERS
from engine.families.config import DecoderConfig
from engine.families.experts import DOWN, Stack
from engine.families.tensor_names import (
    expert_tensor,
    shared_stacks,
    shared_tensor,
    stacks_on_disk,
)
from engine.families.tensor_shapes import expected_tensors, expert_shapes, names_on_disk

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Stored:
    """A tensor as the family stores it on disk."""

    shape: tuple[int, ...]
    stack: Stack | None = None
    parts: tuple[tuple[str, ...], ...] = ()
    """Names of the tensors in a stack, expert by expert; empty for a tensor that is not a stack."""


def stored_tensors(config: DecoderConfig) -> dict[str, Stored]:
    """Return every tensor of a checkpoint of this model as it is written to disk, in the order of the layers."""
    stacks: dict[str, tuple[str, Stored]] = {}
    for layer, experts in config.experts_by_layer.items():
        for stack in expert_stacks(config, layer):
            parts = tuple(stacked_names(config, layer, stack, expert) for expert in range(experts))
            stored = Stored(stack_shape(config, layer, stack), stack, parts)
            stacks |= {name: (stack.name, stored) for names in parts for name in names}
        for stack in shared_stacks(config.architecture, layer):
            names = shared_names(config, layer, stack)
            stored = Stored(shared_stack_shape(config, layer, stack), stack, (names,) if names else ())
            stacks |= dict.fromkeys(names, (stack.name, stored))
    renamed = names_on_disk(config)
    return dict(
        stacks.get(name, (renamed.get(name, name), Stored(shape))) for name, shape in expected_tensors(config).items()
    )


def expert_stacks(config: DecoderConfig, layer: int) -> tuple[Stack, ...]:
    """Return the stacks of a layer's experts on disk; empty if experts are stored one by one, as are those of different
    widths in every family.
    """
    moe = config.layers[layer].moe
    return () if moe is None or moe.expert_widths else stacks_on_disk(config.architecture, layer)


def stacked_names(config: DecoderConfig, layer: int, stack: Stack, expert: int) -> tuple[str, ...]:
    """Return the common names of the projections of one expert in a stack."""
    return tuple(expert_tensor(config.architecture, layer, expert, projection) for projection in stack.projections)


def shared_names(config: DecoderConfig, layer: int, stack: Stack) -> tuple[str, ...]:
    """Return the common names of the shared expert's projections in a stack; empty if the layer has no shared expert."""
    moe = config.layers[layer].moe
    assert moe is not None
    projections = stack.projections if moe.shared_width else ()
    return tuple(shared_tensor(config.architecture, layer, projection) for projection in projections)


def shared_stack_shape(config: DecoderConfig, layer: int, stack: Stack) -> tuple[int, ...]:
    """Return the shape of a shared expert's stack, [O, I]."""
    moe = config.layers[layer].moe
    assert moe is not None
    if DOWN in stack.projections:
        return config.hidden_size, moe.shared_width
    return len(stack.projections) * moe.shared_width, config.hidden_size


def packed_shapes(config: DecoderConfig, layer: int, stack: Stack) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an MXFP4 stack by name: blocks [N, O, C, 16] and scales [N, O, C], never transposed."""
    experts, outputs, inputs = stack_shape(config, layer, replace(stack, transposed=False))
    scales = experts, outputs, inputs // BLOCK
    return {stack.name + BLOCKS: (*scales, BYTES), stack.name + POWERS: scales}


def stack_shape(config: DecoderConfig, layer: int, stack: Stack) -> tuple[int, ...]:
    """Return the shape of a stack: [N, O, I] or, transposed, [N, I, O]; [N, O] for biases."""
    shapes = [expert_shapes(config, layer)[projection] for projection in stack.projections]
    own = sum(shape[0] for shape in shapes), *shapes[0][1:]
    return config.experts_by_layer[layer], *(own[::-1] if stack.transposed else own)


def taken(stack: Stack, expert: Tensor, place: int) -> Tensor:
    """Return the projection at `place` from an expert's part of a stack, as [O, I]; a view if the layout permits."""
    return rows_taken(stack, expert, place).contiguous()


def rows_taken(stack: Stack, expert: Tensor, place: int) -> Tensor:
    """Return the same as a view, whose rows may lie apart."""
    expert_OI = expert.T if stack.transposed else expert
    count = len(stack.projections)
    return expert_OI[place::count] if stack.interleaved else expert_OI.chunk(count)[place]


def joined(stack: Stack, projections: Sequence[Tensor]) -> Tensor:
    """Stack the projections of one expert in the stack's layout."""
    import torch  # here: headers are read without it

    parts = list(projections)
    expert_OI = torch.stack(parts, dim=1).flatten(0, 1) if stack.interleaved else torch.cat(parts)
    return expert_OI.T.contiguous() if stack.transposed else expert_OI
