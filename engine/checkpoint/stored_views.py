"""Location of each tensor of a checkpoint: stored alone, as part of a stack, or packed in MXFP4 blocks."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from engine.checkpoint.block_float8 import SCALE_TYPES, SUFFIXES, Float8, dequantised, dequantised_bytes, matrix_of_scales
from engine.checkpoint.mxfp4 import BLOCK, BLOCKS, POWERS, unpacked, unpacked_rows
from engine.checkpoint.stacks import (
    packed_shapes,
    rows_taken,
    shared_names,
    shared_stack_shape,
    stack_shape,
    stacked_names,
    taken,
)
from engine.errors import CheckpointError, UnsupportedError
from engine.families.config import DecoderConfig
from engine.families.experts import Stack
from engine.families.tensor_names import router_in_memory, router_tensor, shared_stacks, stacks_in_memory, stacks_on_disk
from engine.families.tensor_shapes import expert_shapes, names_on_disk
from engine.files.element_type import BFLOAT16, FLOAT8, UINT8
from engine.files.mapped_file import MappedFile

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from engine.kernels.stored.quantized_weight import LowBitWeight

FP8, MXFP4 = "FP8", "MXFP4"
"""Names of types of packed floats, as in engine/kernels/stored/float_weight.py."""
SAME_MODEL = "config.json and the weights must be of the same model"


@dataclass(frozen=True)
class Scales:
    """Location of the scales of an FP8 weight."""

    file: MappedFile
    name: str
    float8: Float8

    def check(self, view: StoredView, where: str) -> None:
        """Raise a CompressError unless the scales match the weight."""
        entry, shape = self.file.entries[self.name], view.shape
        is_matrix = len(shape) == 2 and not isinstance(view, _StackedView)
        if view.element != FLOAT8 or entry.element not in SCALE_TYPES or not is_matrix:
            raise UnsupportedError(
                f"{where}: is {view.element} with scales of {entry.element}; quantized weights are read if they are "
                f"{FLOAT8} matrices with scales of {', '.join(map(str, SCALE_TYPES))}; take the model's weights in bfloat16"
            )
        asked = self.float8.scales_shapes(shape)
        if entry.shape not in asked:
            block = self.float8.block
            parts = "whole rows or tensors" if block is None else f"blocks of {list(block)}"
            raise CheckpointError(
                f"{where}: has scales of shape {list(entry.shape)}, and {list(shape)} in {parts} asks for "
                f"{' or '.join(str(list(each)) for each in asked)}; {SAME_MODEL}"
            )

    def named(self, weight: str) -> str:
        """Return the name that such scales of another weight have."""
        return weight + next(suffix for suffix in SUFFIXES if self.name.endswith(suffix))

    def of(self, shape: tuple[int, ...]) -> tuple[Tensor, tuple[int, int]]:
        """Return the scales of a weight of this shape in float32 [P, Q], and the rows and columns of a block."""
        return matrix_of_scales(self.file.tensor(self.name), self.float8.block, shape)


class StoredView:
    """Location of a tensor: a whole stored tensor, or one projection of one expert in a stack."""

    scales: Scales | None = None
    """Scales of an FP8 weight, which is read as `element`; None for other weights."""
    is_packed = False
    """Whether several weights share a byte."""
    is_quantized = False
    """Whether the weight is in blocks of low-bit numbers of a GGUF file."""

    def __init__(self, file: MappedFile, stored_name: str, shape: tuple[int, ...]) -> None:
        self.file, self.stored_name, self.shape = file, stored_name, shape
        self.element = file.entries[stored_name].element

    @property
    def stored_names(self) -> tuple[str, ...]:
        return (self.stored_name,) if self.scales is None else (self.stored_name, self.scales.name)

    @property
    def bytes(self) -> int:
        """Stored size in bytes."""
        if self.scales is None:
            return math.prod(self.shape) * self.element.itemsize
        return math.prod(self.shape) + self.scales.file.entries[self.scales.name].nbytes

    @property
    def floats(self) -> tuple[MappedFile, str] | None:
        """The stored numbers that are finite if the weight is; None if the weight itself must be computed first."""
        return (self.file, self.stored_name) if self.scales is None else None

    def stored_parts(self, name: str) -> dict[str, Tensor]:
        """Return the stored tensors of a matrix in packed floats that lies alone, as those of a weight `name` are called;
        empty for others.
        """
        if self.scales is None:
            return {}
        stored = {name: (self.file, self.stored_name), self.scales.named(name): (self.scales.file, self.scales.name)}
        return {own: file.tensor(place) for own, (file, place) in stored.items()}

    def read(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the tensor. `dtype`: that of a weight which is computed from blocks; None for `element`."""
        tensor = self.file.tensor(self.stored_name)
        return tensor if self.scales is None else dequantised(tensor, *self.scales.of(self.shape), self.element.torch)

    def weight(self, kinds: Container[str]) -> LowBitWeight | None:
        """Return the matrix as it is stored, mapped; None if it is plain, or the kernels do not multiply it so.

        kinds: names of the types that the compiled kernels multiply.
        """
        if self.scales is None or FP8 not in kinds:
            return None
        import torch  # here: headers are read without it

        from engine.kernels.stored.float_weight import FloatWeight, fits_kernels

        scales, block = self.scales.of(self.shape)
        if not fits_kernels(FP8, self.shape, block):
            return None
        values = self.file.tensor(self.stored_name).view(torch.uint8)
        return FloatWeight(values, scales, FP8, self.shape[1], partial(dequantised_bytes, block=block), block=block)


class _StackedView(StoredView):
    def __init__(self, file: MappedFile, stack: Stack, expert: int | None, place: int, shape: tuple[int, ...]) -> None:
        """expert: index of the expert; None for a stack of the shared expert."""
        super().__init__(file, stack.name, shape)
        self.stack, self.expert, self.place = stack, expert, place

    def read(self, dtype: torch.dtype | None = None) -> Tensor:
        whole = super().read()
        return taken(self.stack, whole if self.expert is None else whole[self.expert], self.place)


class _PackedView(StoredView):
    """One projection of one expert in an MXFP4 stack, unpacked when it is read."""

    is_packed = True

    def __init__(
        self, files: Mapping[str, MappedFile], stack: Stack, expert: int, place: int, shape: tuple[int, ...]
    ) -> None:
        super().__init__(files[stack.name + BLOCKS], stack.name + BLOCKS, shape)
        self.powers, self.element = files[stack.name + POWERS], BFLOAT16
        self.stack, self.expert, self.place = replace(stack, transposed=False), expert, place

    @property
    def stored_names(self) -> tuple[str, ...]:
        return self.stored_name, self.stack.name + POWERS

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) // 2 + math.prod(self.shape) // BLOCK

    @property
    def floats(self) -> None:
        return None

    def read(self, dtype: torch.dtype | None = None) -> Tensor:
        return unpacked(*(part.contiguous() for part in self._parts))

    def weight(self, kinds: Container[str]) -> LowBitWeight | None:
        """Return the projection as it is stored, mapped; None if it is a bias, or the kernels do not multiply it so."""
        from engine.kernels.stored.float_weight import FloatWeight, fits_kernels  # here: headers are read without torch

        if MXFP4 not in kinds or len(self.shape) != 2 or not fits_kernels(MXFP4, self.shape):
            return None
        blocks_OCB, powers_OC = self._parts
        return FloatWeight(blocks_OCB.flatten(1), powers_OC, MXFP4, self.shape[1], unpacked_rows)

    @property
    def _parts(self) -> list[Tensor]:
        """Blocks and scales as views, whose rows may lie apart."""
        stored = zip((self.file, self.powers), self.stored_names, strict=True)
        return [rows_taken(self.stack, file.tensor(name)[self.expert], self.place) for file, name in stored]


def views_of(config: DecoderConfig, by_name: Mapping[str, MappedFile]) -> dict[str, StoredView]:
    """Return a view for every name that can be served: stored tensors as they are, stacked experts one by one."""
    views = {name: StoredView(file, name, file.entries[name].shape) for name, file in by_name.items()}
    row = config.architecture
    views |= {name: views[stored] for name, stored in names_on_disk(config).items() if stored in views}
    for layer in config.moe_layers:
        moe = config.layers[layer].moe
        is_ragged = moe is not None and bool(moe.expert_widths)
        for stacks in () if is_ragged else (stacks_on_disk(row, layer), stacks_in_memory(row, layer)):
            if all(stack.name in by_name or stack.name + BLOCKS in by_name for stack in stacks):
                views |= _of_stacks(config, layer, stacks, by_name)
        for stack in shared_stacks(row, layer):
            for place, name in enumerate(shared_names(config, layer, stack) if stack.name in by_name else ()):
                _check_stack(by_name, stack.name, shared_stack_shape(config, layer, stack), False)
                own = replace(stack, projections=stack.projections[place : place + 1])
                shape = shared_stack_shape(config, layer, own)
                views[name] = _StackedView(by_name[stack.name], stack, None, place, shape)
        stacked_router = router_in_memory(row, layer)
        if router_tensor(row, layer) not in views and stacked_router in by_name:
            views[router_tensor(row, layer)] = views[stacked_router]
    return views


def _of_stacks(
    config: DecoderConfig, layer: int, stacks: Iterable[Stack], by_name: Mapping[str, MappedFile]
) -> dict[str, StoredView]:
    """Return views of a layer's stacked experts. Raises CheckpointError for a stack of another shape."""
    views: dict[str, StoredView] = {}
    shapes = expert_shapes(config, layer)
    for stack in stacks:
        packed = stack.name not in by_name
        expected = packed_shapes(config, layer, stack) if packed else {stack.name: stack_shape(config, layer, stack)}
        for name, shape in expected.items():
            _check_stack(by_name, name, shape, packed)
        for expert in range(config.experts_by_layer[layer]):
            for place, name in enumerate(stacked_names(config, layer, stack, expert)):
                shape = shapes[stack.projections[place]]
                if packed:
                    views[name] = _PackedView(by_name, stack, expert, place, shape)
                else:
                    views[name] = _StackedView(by_name[stack.name], stack, expert, place, shape)
    return views


def _check_stack(by_name: Mapping[str, MappedFile], name: str, shape: tuple[int, ...], packed: bool) -> None:
    if name not in by_name:
        raise CheckpointError(f"tensor {name} is missing")
    entry = by_name[name].entries[name]
    if entry.shape != shape:
        raise CheckpointError(f"tensor {name} has shape {list(entry.shape)} and config.json says {list(shape)}")
    if packed and entry.element != UINT8:
        raise CheckpointError(f"tensor {name} is {entry.element}; packed weights are torch.uint8")
