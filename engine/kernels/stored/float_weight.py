"""Weights in packed floats, which products read as they are stored: FP8 with scales of blocks, MXFP4 and NVFP4.

Shape suffixes: O outputs, D inputs, B bytes of a row, P and Q scales along outputs and inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.kernels.stored.quantized_weight import LowBitWeight

FLOAT_TYPES = ("FP8", "MXFP4", "NVFP4")
"""The types by name, as in float_types.FLOAT_KINDS: E4M3 with float32 scales, E2M1 with E8M0 scales for each 32 weights of a
row, and E2M1 with E4M3 scales for each 16."""


class FloatWeight(LowBitWeight):
    """A weight [O, D] in packed floats, in the place of a parameter. Its bytes stay where and as they were given."""

    values_OB: Tensor
    """uint8. Rows may have gaps between them; the first of two numbers of four bits is in the low half of its byte."""
    scales_PQ: Tensor
    """float32 for FP8, one for each block of outputs and inputs; uint8 for others, one for each group of a row."""
    kind: str
    """Name of the type."""

    def __init__(
        self,
        values_OB: Tensor,
        scales_PQ: Tensor,
        kind: str,
        inputs: int,
        dequantized: Callable[..., Tensor],
        *,
        block: tuple[int, int] | None = None,
        divisor: float = 1.0,
    ) -> None:
        """dequantized(values, scales, dtype): returns the numbers. block: rows and columns of a block of FP8.

        divisor: divides all weights.
        """
        super().__init__((values_OB.shape[0], inputs))
        self.register_buffer("values_OB", values_OB)
        self.register_buffer("scales_PQ", scales_PQ)
        self.kind, self.block, self.divisor, self._dequantized = kind, block, divisor, dequantized
        self._place: tuple[int, int] | None = None
        """Where the record's addresses lead; weights may be moved or copied."""
        self._record: Any = None
        self._address = 0

    @property
    def nbytes(self) -> int:
        """Stored size in bytes."""
        return self.values_OB.nbytes + self.scales_PQ.nbytes

    @property
    def addresses(self) -> tuple[int, int]:
        """Return the address of the first row, and that of a record of where rows and scales lie."""
        place = self.values_OB.data_ptr(), self.scales_PQ.data_ptr()
        if self._place != place:
            self._place, self._record = place, self._made(*place)
            self._address = int(self._record.ctypes.data)
        return place[0], self._address

    def _made(self, values: int, scales: int) -> Any:
        from engine.kernels.stored.float_types import FLOATS_OF_MATRIX, WHOLE_SHIFT  # here: it imports Numba's compiler

        rows, columns = self.block or (1, 1)
        one_row, one_column = self.scales_PQ.shape[0] == 1, self.scales_PQ.shape[1] == 1
        record = np.zeros(1, FLOATS_OF_MATRIX)
        record["values"], record["row"] = values, self.values_OB.stride(0)
        record["scales"] = scales
        record["scale_row"] = 0 if one_row else self.scales_PQ.stride(0) * self.scales_PQ.element_size()
        record["scaled_rows"], record["shift"] = rows, WHOLE_SHIFT if one_column else columns.bit_length() - 1
        record["divisor"] = self.divisor
        return record

    def product_form(self, kernels: Any) -> Any:
        """Return the form in which the kernels multiply the weight; None if they cannot."""
        return self.widened_form(kernels) if self.shape[0] % kernels.MULTIPLE_OF_OUTPUTS == 0 else None

    def widened_form(self, kernels: Any) -> Any:
        """Return the form in which the kernels widen the weight; None if they cannot."""
        is_there = self.values_OB.is_cpu and self.values_OB.stride(1) == self.scales_PQ.stride(1) == 1
        served = is_there and self.kind in kernels.FLOAT_KINDS and self.is_multiplied
        return (self.kind, kernels.WHOLE_ROWS) if served else None

    @property
    def is_multiplied(self) -> bool:
        """Return whether kernels exist for its sizes."""
        return fits_kernels(self.kind, self.shape, self.block)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantized weight [O, D], rounded once to `dtype`."""
        return self._dequantized(self.values_OB, self.scales_PQ, dtype)

    def extra_repr(self) -> str:
        """Return the text that `repr` shows for the module."""
        return f"{self.shape[0]}, {self.shape[1]}, {self.kind}"


def fits_kernels(kind: str, shape: tuple[int, ...], block: tuple[int, int] | None = None) -> bool:
    """Return whether the kernels multiply matrices of this type and shape. block: rows and columns of a block of FP8."""
    outputs, inputs = shape
    if outputs % 4:
        return False
    if kind != "FP8":
        return inputs % 32 == 0
    columns = 1 if block is None else block[1]
    is_power = columns >= 128 and columns & (columns - 1) == 0
    return inputs % 64 == 0 and (is_power or columns >= inputs)
