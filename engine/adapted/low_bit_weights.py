"""Low-bit weights of a model that transformers runs: where its files have them, and modules that multiply them as stored.

A matrix X of a linear layer, or of one expert, is stored as `engine/checkpoint/pack_quantized.py` says. An expert whose
family has no tensor for this matrix alone, because it stacks experts or joins gate and up, has tensors of our own names.
Passes layer by layer dequantize a layer's weights when they load it; a whole model in memory keeps them as they are stored.

Shape suffixes: T tokens, N experts, O I outputs and inputs of a matrix, P outputs of all matrices of a product.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.adapted.expert_layers import ExpertLayer
from engine.checkpoint.pack_quantized import PACKED, SCALE, SHAPE, QuantizedView
from engine.families.experts import DOWN, GATE, PROJECTIONS, UP
from engine.files.mapped_file import MappedFile
from engine.kernels.kernel_choice import KernelChoice
from engine.kernels.linear import linear, linears
from engine.kernels.stored.quantized_weight import QuantizedWeight
from engine.kernels.stored.scheme import WHOLE_ROW, Scheme

_WORD_BITS = 32


def expert_matrix(experts: str, expert: int, projection: int) -> str:
    """Return our name of a matrix of one expert. experts: name of the module of stacked experts."""
    return f"{experts}.{expert}.{PROJECTIONS[projection]}.weight"


def first_name(module: Any) -> str:
    """Return the name of the stacked weights that multiply the input of a module's experts."""
    return "gate_up_proj" if module.has_gate else "up_proj"


def expert_matrices(layers: Iterable[ExpertLayer], low_bit: Iterable[str]) -> dict[str, tuple[ExpertLayer, int, int]]:
    """Return layer, expert and projection of the low-bit weights that have our own names."""
    there = frozenset(low_bit)
    return {
        name: (layer, expert, projection)
        for layer in layers
        for expert in range(layer.count)
        for projection in (GATE, UP, DOWN)
        if (name := expert_matrix(layer.experts, expert, projection)) in there
    }


def low_bit_views(stored: Mapping[str, MappedFile], schemes: Sequence[Scheme]) -> dict[str, QuantizedView]:
    """Return the place of each low-bit weight by its name. Raises CheckpointError for tensors that match no scheme."""
    views = {}
    for packed in stored if schemes else ():
        name = packed.removesuffix(PACKED)
        if name != packed:
            views[name] = QuantizedView(name, _shape(stored, name, schemes), stored, schemes)
    return views


def _shape(stored: Mapping[str, MappedFile], name: str, schemes: Sequence[Scheme]) -> tuple[int, ...]:
    """Return the shape of a weight by its packed integers and its scales; [0, 0] if they match no scheme.

    Where they match several, with a scale for each whole row, the stored shape decides.
    """
    packed, scales = (stored[own].entries[own].shape if own in stored else () for own in (name + PACKED, name + SCALE))
    if len(packed) != 2 or len(scales) != 2:
        return 0, 0
    found = []
    for bits, size in schemes:
        shape = packed[0], packed[1] * _WORD_BITS // bits if size == WHOLE_ROW else scales[1] * size
        if Scheme(bits, size).shapes(shape) == (packed, scales):
            found.append(shape)
    if len(found) > 1 and name + SHAPE in stored:
        said = tuple(stored[name + SHAPE].tensor(name + SHAPE).tolist())
        found = [shape for shape in found if shape == said]
    return found[0] if found else (0, 0)


# In memory


class LowBitLinear(nn.Module):
    """A linear layer of a model of transformers with a low-bit weight."""

    def __init__(
        self, stored: QuantizedWeight, bias_O: nn.Parameter | None, dtype: torch.dtype, choice: KernelChoice
    ) -> None:
        """dtype: of the model. choice: kernels of the products."""
        super().__init__()
        self.stored, self.bias, self.choice, self._dtype = stored, bias_O, choice, dtype
        self.out_features, self.in_features = stored.shape

    @property
    def weight(self) -> Tensor:
        """The dequantized weight [O, I], for models that multiply by it themselves."""
        return self.stored.dequantised(self._dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map […, I] to […, O]."""
        return linear(x.contiguous(), self.stored, self.bias, self.choice)


class LowBitStack:
    """The matrices of one product of all experts of a layer, in the place of a stacked weight: gate and up, or down."""

    def __init__(self, experts: Sequence[Sequence[QuantizedWeight]], *, interleaved: bool) -> None:
        """interleaved: whether the outputs of gate and up alternate."""
        self.experts, self._interleaved = [tuple(own) for own in experts], interleaved
        matrices = self.experts[0]
        self.shape = (len(self.experts), sum(each.shape[0] for each in matrices), matrices[0].shape[1])

    @property
    def matrices(self) -> Iterator[QuantizedWeight]:
        """All matrices, expert by expert."""
        return (matrix for own in self.experts for matrix in own)

    @property
    def nbytes(self) -> int:
        """Bytes of integers and scales."""
        return sum(buffer.nbytes for matrix in self.matrices for buffer in matrix.buffers())

    @property
    def scales(self) -> Tensor:
        """Scales of the first matrix."""
        return self.experts[0][0].scales_OC

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.scales.device

    def dim(self) -> int:
        """Return the number of dimensions, those of a stacked weight [N, P, I]."""
        return len(self.shape)

    def product(self, x_TI: Tensor, expert: int, choice: KernelChoice) -> Tensor:
        """Return the product of one expert, [T, P]."""
        matrices = self.experts[expert]
        made = linears(x_TI.contiguous(), matrices, (None,) * len(matrices), choice)
        if len(made) == 1:
            return made[0]
        return torch.stack(made, dim=-1).flatten(-2) if self._interleaved else torch.cat(made, dim=-1)


def stack_low_bit(module: Any, weights: Sequence[Sequence[QuantizedWeight]]) -> None:
    """Give a module of stacked experts low-bit weights. weights: those of each expert: gate if there is one, up, down."""
    parts = {first_name(module): [own[:-1] for own in weights], "down_proj": [own[-1:] for own in weights]}
    for name, own in parts.items():
        delattr(module, name)
        setattr(module, name, LowBitStack(own, interleaved=not module.is_concatenated))


# Dequantized


def dense_experts(module: Any, matrices: Mapping[tuple[int, int], QuantizedView], device: torch.device | str) -> None:
    """Give a module of stacked experts dequantized weights. matrices: by expert and projection."""
    firsts = (GATE, UP) if module.has_gate else (UP,)
    for name, projections in ((first_name(module), firsts), ("down_proj", (DOWN,))):
        like = getattr(module, name)
        made = torch.empty(like.shape, dtype=like.dtype, device=device)
        for expert, own in enumerate(made):
            own_PI = own.T if module.is_transposed else own
            for place, projection in enumerate(projections):
                is_apart = module.is_concatenated or len(projections) == 1
                rows_OI = own_PI.chunk(len(projections))[place] if is_apart else own_PI[place :: len(projections)]
                rows_OI.copy_(matrices[expert, projection].weight().dequantised(like.dtype))
        setattr(module, name, nn.Parameter(made, requires_grad=False))
