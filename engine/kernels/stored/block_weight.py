"""Weights in blocks of GGUF's types, which products read as they are stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from engine.kernels.stored.float_weight import FLOAT_TYPES
from engine.kernels.stored.quantized_weight import LowBitWeight, QuantizedWeight, Weight, frozen_tensor


def kind_of(type_name: str) -> str:
    """Return the name that kernels give a GGUF type of blocks: MXFP4 is also that of a type of packed floats."""
    return f"{type_name}_BLOCKS" if type_name in FLOAT_TYPES else type_name


class BlockWeight(LowBitWeight):
    """A weight [O, D] in blocks, in the place of a parameter. Its bytes stay where and as they were given."""

    blocks_OB: Tensor
    """uint8, the bytes of each row."""
    kind: str
    """Name of the type, as `kind_of` returns it."""

    def __init__(self, blocks_OB: Tensor, kind: str, inputs: int, dequantized: Callable[..., Tensor]) -> None:
        """kind: the type's name. dequantized(blocks, dtype=…): returns the numbers of rows of blocks."""
        super().__init__((blocks_OB.shape[0], inputs))
        self.register_buffer("blocks_OB", blocks_OB)
        self.kind, self._dequantized = kind, dequantized

    @property
    def nbytes(self) -> int:
        """Stored size in bytes."""
        return self.blocks_OB.nbytes

    @property
    def addresses(self) -> tuple[int, int]:
        """Return the address of the first row, and that of the type's FORM."""
        from engine.kernels.stored.forms import form_address  # here: it imports Numba

        return self.blocks_OB.data_ptr(), form_address(self._form)

    @property
    def _form(self) -> tuple[str, int]:
        return self.kind, 1

    def product_form(self, kernels: Any) -> Any:
        """Return the form that matrices of all types of blocks share; None if the kernels cannot serve the weight."""
        served = self.shape[0] % kernels.MULTIPLE_OF_OUTPUTS == 0 and self.kind in kernels.BLOCK_KINDS
        return kernels.BLOCKS if served and self._is_contiguous else None

    def widened_form(self, kernels: Any) -> Any:
        """Return the form in which the kernels widen the weight; None if they cannot."""
        return self._form if self.kind in kernels.BLOCK_KINDS and self._is_contiguous else None

    @property
    def _is_contiguous(self) -> bool:
        return self.blocks_OB.is_cpu and self.blocks_OB.is_contiguous()

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantized weight [O, D], rounded once to `dtype`."""
        return self._dequantized(self.blocks_OB, dtype=dtype)

    def taken(self, places: Tensor) -> BlockWeight:
        """Return a weight of the rows at these places."""
        return BlockWeight(self.blocks_OB[places], self.kind, self.shape[1], self._dequantized)

    def extra_repr(self) -> str:
        """Return the text that `repr` shows for the module."""
        return f"{self.shape[0]}, {self.shape[1]}, {self.kind}"


RowWeight = BlockWeight | QuantizedWeight
"""Low-bit weights of which single rows can be taken, as embeddings are read."""


def frozen_embedding(weight: Weight) -> nn.Parameter | RowWeight:
    """Return embeddings in the form that a module keeps as an attribute."""
    return weight if isinstance(weight, RowWeight) else frozen_tensor(weight)
