"""Blocks of GGUF files become the numbers that the format's own library makes of them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from gguf_for_tests import q8_0

from engine.checkpoint.gguf.blocks import dequantized
from engine.files.gguf_types import BLOCK_TYPES, BlockType

QUANTIZED = {number: kind for number, kind in BLOCK_TYPES.items() if kind.element is None}


def random_blocks(number: int, kind: BlockType) -> torch.Tensor:
    """Return 20 rows of three blocks; the number of the type is the seed."""
    data = random.Random(number).randbytes(kind.bytes * 60)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(20, -1)


@pytest.mark.parametrize("number", QUANTIZED, ids=[kind.name for kind in QUANTIZED.values()])
def test_every_type_is_dequantized_as_the_formats_package_does(number: int) -> None:
    kind, blocks = QUANTIZED[number], random_blocks(number, QUANTIZED[number])
    found = dequantized(blocks, kind)
    assert found.shape == (20, 3 * kind.numbers) and found.dtype == torch.float32
    with np.errstate(all="ignore"):  # random scales are any float16, NaN included
        expected = quants.dequantize(blocks.numpy(), GGMLQuantizationType(number))
    assert np.array_equal(found.numpy(), expected, equal_nan=True)


def test_one_expert_is_dequantized_alone() -> None:
    kind = QUANTIZED[12]
    stack = random_blocks(12, kind).view(4, 5, -1)
    whole = dequantized(stack, kind)
    assert torch.equal(dequantized(stack[2], kind).nan_to_num(), whole[2].nan_to_num())


def test_rounding_to_eight_bits_changes_no_number_by_more_than_half_a_step() -> None:
    tensor = torch.randn(6, 64)
    _, shape, data = q8_0(tensor)
    found = dequantized(torch.frombuffer(bytearray(data), dtype=torch.uint8).view(6, -1), QUANTIZED[8])
    assert found.shape == shape
    assert float((found - tensor).abs().max()) <= float(tensor.abs().max()) / 127
