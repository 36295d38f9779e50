"""The types of numbers in GGUF files: the size of their blocks, without torch.

A row of a tensor is a sequence of blocks. A block of a quantized type holds the low-bit numbers of `numbers` weights and
the scales that they share; a block of a plain type is one number.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.files.element_type import BFLOAT16, ELEMENT_TYPES, FLOAT16, FLOAT32, ElementType


@dataclass(frozen=True)
class BlockType:
    """One type of a tensor's numbers."""

    name: str
    numbers: int
    """Numbers in a block."""
    bytes: int
    """Bytes of a block."""
    element: ElementType | None = None
    """The element type of plain numbers; None for a quantized type."""


def _plain(name: str, element: ElementType) -> BlockType:
    return BlockType(name, 1, element.itemsize, element)


BLOCK_TYPES: dict[int, BlockType] = {
    0: _plain("F32", FLOAT32),
    1: _plain("F16", FLOAT16),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    20: BlockType("IQ4_NL", 32, 18),
    23: BlockType("IQ4_XS", 256, 136),
    24: _plain("I8", ELEMENT_TYPES["I8"]),
    25: _plain("I16", ELEMENT_TYPES["I16"]),
    26: _plain("I32", ELEMENT_TYPES["I32"]),
    27: _plain("I64", ELEMENT_TYPES["I64"]),
    28: _plain("F64", ELEMENT_TYPES["F64"]),
    30: _plain("BF16", BFLOAT16),
    39: BlockType("MXFP4", 32, 17),
}
"""By the numbers that stand for them in files (`enum ggml_type`)."""
NOT_READ: dict[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}
"""Names of further types, for messages."""
