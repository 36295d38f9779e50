"""The element types of safetensors files, without torch: reading a header imports nothing that takes seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ElementType:
    """One type of a tensor's elements."""

    name: str
    """Its name in torch, such as "bfloat16"."""
    itemsize: int
    """Bytes of an element."""
    is_floating_point: bool = False

    @property
    def torch(self) -> torch.dtype:
        """The dtype in torch."""
        import torch  # here: headers are read without it

        dtype: torch.dtype = getattr(torch, self.name)
        return dtype

    def __str__(self) -> str:
        return f"torch.{self.name}"


FLOAT32, FLOAT16, BFLOAT16 = (
    ElementType("float32", 4, True),
    ElementType("float16", 2, True),
    ElementType("bfloat16", 2, True),
)
FLOAT8 = ElementType("float8_e4m3fn", 1, True)
FLOAT8_POWER = ElementType("float8_e8m0fnu", 1, True)
INT64, INT32, UINT8 = ElementType("int64", 8), ElementType("int32", 4), ElementType("uint8", 1)
ELEMENT_TYPES = {
    "F64": ElementType("float64", 8, True),
    "F32": FLOAT32,
    "F16": FLOAT16,
    "BF16": BFLOAT16,
    "I64": INT64,
    "I32": INT32,
    "I16": ElementType("int16", 2),
    "I8": ElementType("int8", 1),
    "U64": ElementType("uint64", 8),
    "U32": ElementType("uint32", 4),
    "U16": ElementType("uint16", 2),
    "U8": UINT8,
    "BOOL": ElementType("bool", 1),
    "F8_E4M3": FLOAT8,
    "F8_E5M2": ElementType("float8_e5m2", 1, True),
    "F8_E8M0": FLOAT8_POWER,
}
"""By the names that safetensors headers use."""
