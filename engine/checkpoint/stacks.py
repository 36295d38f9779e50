"""Experts that lie stacked in one tensor: how one projection of one expert is taken out, and how they are put together.

Shape suffixes: N experts of the layer, O outputs of all projections of a stack together, I inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.architectures import (
    DOWN,
    Architecture,
    DecoderConfig,
    Stack,
    dense_tensor,
    expected_tensors,
    expert_shapes,
    expert_tensor,
    shared_stacks,
    shared_tensor,
    stacks_on_disk,
)
from engine.checkpoint.mxfp4 import BLOCK, BLOCKS, BYTES, POWERS


@dataclass(frozen=True)
class Stored:
    """A tensor as the family has it on disk."""

    shape: tuple[int, ...]
    stack: Stack | None = None
    parts: tuple[tuple[str, ...], ...] = ()
    """Of a stack: the names of what it holds, expert by expert."""


def stored_tensors(config: DecoderConfig) -> dict[str, Stored]:
    """Every tensor of a checkpoint of this model as it is written, in the order of the layers."""
    stacks: dict[str, tuple[str, Stored]] = {}
    for layer, experts in config.experts_by_layer.items():
        for stack in stacks_on_disk(config.architecture, layer):
            parts = tuple(stacked_names(config, layer, stack, expert) for expert in range(experts))
            stored = Stored(stack_shape(config, layer, stack), stack, parts)
            stacks |= {name: (stack.name, stored) for names in parts for name in names}
        for stack in shared_stacks(config.architecture, layer):
            names = shared_names(config, layer, stack)
            stored = Stored(shared_stack_shape(config, layer, stack), stack, (names,) if names else ())
            stacks |= dict.fromkeys(names, (stack.name, stored))
    renamed = dense_names(config)
    return dict(
        stacks.get(name, (renamed.get(name, name), Stored(shape))) for name, shape in expected_tensors(config).items()
    )


def dense_names(config: DecoderConfig) -> dict[str, str]:
    """Names on disk of the dense FFNs' tensors, by those that all else asks for them by; nothing where they are the same."""
    if config.architecture.dense_block == Architecture.dense_block:
        return {}
    dense = [index for index, layer in enumerate(config.layers) if layer.moe is None]
    names = [(index, dense_tensor(index, projection)) for index in dense for projection in range(3)]
    common, own = Architecture.dense_block, config.architecture.dense_block
    return {name: own.format(layer=index) + name.removeprefix(common.format(layer=index)) for index, name in names}


def stacked_names(config: DecoderConfig, layer: int, stack: Stack, expert: int) -> tuple[str, ...]:
    """What a stack holds of an expert, under the names that all else asks for it by."""
    return tuple(expert_tensor(config.architecture, layer, expert, projection) for projection in stack.projections)


def shared_names(config: DecoderConfig, layer: int, stack: Stack) -> tuple[str, ...]:
    """The same of a shared expert; nothing where the layer has none."""
    moe = config.layers[layer].moe
    assert moe is not None
    projections = stack.projections if moe.shared_width else ()
    return tuple(shared_tensor(config.architecture, layer, projection) for projection in projections)


def shared_stack_shape(config: DecoderConfig, layer: int, stack: Stack) -> tuple[int, ...]:
    """[O, I]."""
    moe = config.layers[layer].moe
    assert moe is not None
    if DOWN in stack.projections:
        return config.hidden_size, moe.shared_width
    return len(stack.projections) * moe.shared_width, config.hidden_size


def packed_shapes(config: DecoderConfig, layer: int, stack: Stack) -> dict[str, tuple[int, ...]]:
    """Of a stack of weights in MXFP4, by name: blocks [N, O, C, 16] and scales [N, O, C], whichever way others lie."""
    experts, outputs, inputs = stack_shape(config, layer, replace(stack, transposed=False))
    scales = experts, outputs, inputs // BLOCK
    return {stack.name + BLOCKS: (*scales, BYTES), stack.name + POWERS: scales}


def stack_shape(config: DecoderConfig, layer: int, stack: Stack) -> tuple[int, ...]:
    """[N, O, I] or, transposed, [N, I, O]; [N, O] of biases."""
    shapes = [expert_shapes(config, layer)[projection] for projection in stack.projections]
    own = sum(shape[0] for shape in shapes), *shapes[0][1:]
    return config.experts_by_layer[layer], *(own[::-1] if stack.transposed else own)


def taken(stack: Stack, expert: Tensor, place: int) -> Tensor:
    """One of a stack's projections of an expert, as other families have it on disk; a view where it lies so."""
    expert_OI = expert.T if stack.transposed else expert
    count = len(stack.projections)
    return (expert_OI[place::count] if stack.interleaved else expert_OI.chunk(count)[place]).contiguous()


def joined(stack: Stack, projections: Sequence[Tensor]) -> Tensor:
    """What a stack holds of an expert."""
    parts = list(projections)
    expert_OI = torch.stack(parts, dim=1).flatten(0, 1) if stack.interleaved else torch.cat(parts)
    return expert_OI.T.contiguous() if stack.transposed else expert_OI
